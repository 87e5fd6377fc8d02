"""A file is final or absent, a directory is complete or refused, whatever ends the writer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.artifacts import (
    MANIFEST,
    canonical_json,
    digest_json,
    file_table,
    read_json,
    read_manifest,
    read_object,
    sha256_bytes,
    sha256_file,
    staged_directory,
    write_atomic,
    write_json,
    write_manifest,
)
from stages.errors import ArtifactError
from tests.paths import REPOSITORY

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
SCALARS = st.characters(exclude_categories=["Cs"])


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    """A Python process that runs `code` with the repository on its path."""
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, stdout=subprocess.PIPE, text=True)


def kill_when_it_says(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().strip() == word
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


class TestObjects:
    @pytest.mark.parametrize(
        ("content", "says"),
        [
            ([], "expected a JSON object, found list"),
            (None, "expected a JSON object, found NoneType"),
            ({"a": 1}, "b is missing"),
        ],
    )
    def test_what_is_no_report_is_one_line(self, content: Any, says: str, tmp_path: Path) -> None:
        write_json(tmp_path / "report.json", content)
        with pytest.raises(ArtifactError, match=rf"report\.json: {says}; run the stage that writes it again$"):
            read_object(tmp_path / "report.json", "a", "b")

    def test_one_with_its_keys_is_read(self, tmp_path: Path) -> None:
        write_json(tmp_path / "report.json", {"a": 1, "b": None})
        assert read_object(tmp_path / "report.json", "a", "b") == {"a": 1, "b": None}

    @pytest.mark.parametrize("files", [[], {"x": 1}, {"x": {"bytes": 1}}])
    def test_a_manifest_without_its_table_is_one_line(self, files: Any, tmp_path: Path) -> None:
        write_json(tmp_path / MANIFEST, {"verifier": "v", "files": files})
        with pytest.raises(ArtifactError, match="files does not hold bytes and sha256 of each"):
            read_manifest(tmp_path, "v")


class TestAtomicFiles:
    def test_a_file_is_replaced_whole_with_the_user_s_permissions(self, tmp_path: Path) -> None:
        path = tmp_path / "deep" / "file.txt"
        write_atomic(path, "one")
        write_atomic(path, b"two")
        assert path.read_bytes() == b"two"
        umask = os.umask(0)
        os.umask(umask)
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask
        assert [entry.name for entry in path.parent.iterdir()] == ["file.txt"]

    def test_a_failing_writer_leaves_what_was_there(self, tmp_path: Path) -> None:
        path = tmp_path / "report.json"
        write_json(path, {"a": 1})
        with pytest.raises(ValueError, match="Out of range float"):
            write_json(path, {"a": float("nan")})
        assert read_json(path) == {"a": 1}
        assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]

    def test_kill_9_inside_a_write_leaves_what_was_there(self, tmp_path: Path) -> None:
        path = tmp_path / "weights.bin"
        write_atomic(path, b"old" * 1000)
        process = start(
            "import sys, time; from pathlib import Path; from stages.artifacts import atomic_path\n"
            "with atomic_path(Path(sys.argv[1])) as temporary:\n"
            "    temporary.write_bytes(b'half of the new'); print('writing', flush=True); time.sleep(60)\n",
            str(path),
        )
        kill_when_it_says(process, "writing")
        assert path.read_bytes() == b"old" * 1000

    def test_kill_9_at_any_moment_of_a_long_series_of_writes(self, tmp_path: Path) -> None:
        """Whatever is found afterwards is one whole version."""
        path = tmp_path / "state.json"
        code = (
            "import sys; from pathlib import Path; from stages.artifacts import write_json\n"
            "for number in range(100000):\n"
            "    write_json(Path(sys.argv[1]), {'number': number, 'fill': [number] * 2000})\n"
            "    print('wrote', flush=True)\n"
        )
        for delay in (0.0, 0.003, 0.011, 0.05):
            process = start(code, str(path))
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(delay)
            process.kill()
            process.communicate()
            state = read_json(path)
            assert state["fill"] == [state["number"]] * 2000

    def test_absent_and_broken_json_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(ArtifactError, match=r"none\.json: no such file; run the stage that writes it"):
            read_json(tmp_path / "none.json")
        (tmp_path / "broken.json").write_text('{"a": ', encoding="utf-8")
        with pytest.raises(ArtifactError, match=r"broken\.json: not valid JSON"):
            read_json(tmp_path / "broken.json")
        (tmp_path / "bytes.json").write_bytes(b"\xff\xfe{")
        with pytest.raises(ArtifactError, match=r"bytes\.json: not valid JSON"):
            read_json(tmp_path / "bytes.json")


class TestStagedDirectories:
    def test_the_new_directory_replaces_the_old_one_whole(self, tmp_path: Path) -> None:
        final = tmp_path / "checkpoint"
        for names in (["a", "b"], ["c"]):
            with staged_directory(final) as temporary:
                for name in names:
                    (temporary / name).write_text(name, encoding="utf-8")
        assert [entry.name for entry in final.iterdir()] == ["c"]
        assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]
        assert final.stat().st_mode & 0o777 == 0o755

    def test_a_failing_writer_leaves_the_old_one(self, tmp_path: Path) -> None:
        final = tmp_path / "checkpoint"
        with staged_directory(final) as temporary:
            (temporary / "a").write_text("a", encoding="utf-8")

        def write_half() -> None:
            with staged_directory(final) as temporary:
                (temporary / "b").write_text("b", encoding="utf-8")
                raise RuntimeError("half way")

        with pytest.raises(RuntimeError, match="half way"):
            write_half()
        assert [entry.name for entry in final.iterdir()] == ["a"]
        assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]

    def test_kill_9_leaves_the_old_one_and_the_next_writer_cleans_up(self, tmp_path: Path) -> None:
        final = tmp_path / "checkpoint"
        with staged_directory(final) as temporary:
            (temporary / "a").write_text("a", encoding="utf-8")
        process = start(
            "import sys, time; from pathlib import Path; from stages.artifacts import staged_directory\n"
            "with staged_directory(Path(sys.argv[1])) as temporary:\n"
            "    (temporary / 'half').write_bytes(b'half'); print('writing', flush=True); time.sleep(60)\n",
            str(final),
        )
        kill_when_it_says(process, "writing")
        assert [entry.name for entry in final.iterdir()] == ["a"]
        with staged_directory(final) as temporary:
            (temporary / "b").write_text("b", encoding="utf-8")
        assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


class TestManifests:
    def make(self, directory: Path) -> dict[str, Any]:
        (directory / "deep").mkdir(parents=True)
        (directory / "a.bin").write_bytes(b"\x00" * 1000)
        (directory / "deep" / "b.txt").write_text("b", encoding="utf-8")
        return write_manifest(directory, "v" * 64, {"samples": 3})

    def test_a_manifest_holds_every_file_and_reads_back(self, tmp_path: Path) -> None:
        manifest = self.make(tmp_path / "out")
        assert set(manifest["files"]) == {"a.bin", "deep/b.txt"}
        assert manifest["files"]["a.bin"] == {"bytes": 1000, "sha256": sha256_bytes(b"\x00" * 1000)}
        assert read_manifest(tmp_path / "out", "v" * 64) == manifest
        assert manifest["samples"] == 3

    def test_a_directory_without_a_manifest_is_incomplete(self, tmp_path: Path) -> None:
        self.make(tmp_path / "out")
        (tmp_path / "out" / MANIFEST).unlink()
        with pytest.raises(ArtifactError, match=r"out: incomplete \(no manifest\.json\)"):
            read_manifest(tmp_path / "out")
        with pytest.raises(ArtifactError, match=r"nothing: incomplete"):
            read_manifest(tmp_path / "nothing")

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda out: (out / "a.bin").unlink(), r"a\.bin: missing, but listed in"),
            (lambda out: (out / "a.bin").write_bytes(b"\x00" * 999), r"a\.bin: 999 bytes, .* says 1000"),
            (lambda out: (out / "a.bin").write_bytes(b"\x00" * 999 + b"\x01"), r"a\.bin: content differs from the sha256 in"),
            (lambda out: (out / MANIFEST).write_text("{", encoding="utf-8"), r"manifest\.json: not valid JSON"),
        ],
        ids=["missing", "truncated", "one bit", "manifest"],
    )
    def test_damage_is_refused_by_name(self, tmp_path: Path, damage: Any, message: str) -> None:
        self.make(tmp_path / "out")
        damage(tmp_path / "out")
        with pytest.raises(ArtifactError, match=message):
            read_manifest(tmp_path / "out")

    def test_another_verifier_s_directory_is_refused(self, tmp_path: Path) -> None:
        self.make(tmp_path / "out")
        with pytest.raises(ArtifactError, match=r"made for verifier vvvvvvvvvvvv, the current one is wwwwwwwwwwww; run dvc repro"):
            read_manifest(tmp_path / "out", "w" * 64)

    def test_sizes_alone_are_compared_on_request(self, tmp_path: Path) -> None:
        """A dump of terabytes is not read twice."""
        self.make(tmp_path / "out")
        (tmp_path / "out" / "a.bin").write_bytes(b"\x01" * 1000)
        read_manifest(tmp_path / "out", verify=False)

    @settings(max_examples=25, deadline=None)
    @given(files=st.dictionaries(st.text(st.characters(categories=["L", "Nd"]), min_size=1, max_size=20), st.binary(max_size=200), max_size=5))
    def test_any_content_reads_back_and_any_flipped_byte_is_seen(self, tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]) -> None:
        out = tmp_path_factory.mktemp("any")
        for name, content in files.items():
            (out / f"f-{name}").write_bytes(content)
        write_manifest(out, "v")
        table = read_manifest(out)["files"]
        assert table == file_table(out)
        for name in table:
            content = (out / name).read_bytes()
            if content:
                (out / name).write_bytes(bytes([content[0] ^ 1]) + content[1:])
                with pytest.raises(ArtifactError, match="content differs"):
                    read_manifest(out)
                (out / name).write_bytes(content)


class TestDigests:
    @settings(deadline=None)
    @given(JSON)
    def test_json_reads_back_and_the_digest_follows_the_value(self, value: Any) -> None:
        text = canonical_json(value)
        again = json.loads(text)
        assert canonical_json(again) == text
        assert digest_json(again) == digest_json(value)

    @given(st.dictionaries(st.text(SCALARS), st.integers(), min_size=2, max_size=6))
    def test_the_order_of_keys_does_not_matter(self, value: dict[str, int]) -> None:
        assert digest_json(dict(reversed(value.items()))) == digest_json(value)

    @given(st.text(SCALARS), st.text(SCALARS))
    def test_different_texts_have_different_digests(self, left: str, right: str) -> None:
        assert (digest_json(left) == digest_json(right)) == (left == right)

    def test_nan_has_no_digest(self) -> None:
        with pytest.raises(ValueError, match="Out of range float"):
            digest_json({"a": float("nan")})

    @given(content=st.binary(max_size=5000))
    @settings(max_examples=20, deadline=None)
    def test_a_file_s_digest_is_its_content_s(self, tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
        path = tmp_path_factory.mktemp("digest") / "file"
        path.write_bytes(content)
        assert sha256_file(path) == sha256_bytes(content)
