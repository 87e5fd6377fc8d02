"""From a registered verifier to a served pair, and back: the default 135M model, real engines, nobody's doing but `verifiers add`.

As it is → its INT8 W8A8 copy → as it is. Training is short: what is shown is the way, not the drafter; and in fp32, which every
processor multiplies well.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from ruamel.yaml import YAML

from flows.serving import smoke
from flows.serving.engines import url
from flows.serving.places import Places
from flows.serving.state import State, read_state
from stages.errors import DraftlineError
from tests.flows.house import House
from tests.gate.pair import make_bigram_verifier
from tests.paths import REPOSITORY
from tests.pipeline.clone import Clone

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

NAME = "smollm2-135m"
RETRAIN_SECONDS = 1500
SWITCH_SECONDS = 600
TOKENS = 48
SHORT: dict[str, dict[str, Any]] = {
    "engine": {"dtype": "float32", "max_model_len": 512, "kv_cache_bytes": 1 << 28},
    "extraction": {"dtype": "float32"},
    "prepare": {"limit": 60, "max_seq_len": 256, "evaluation_fraction": 0.2, "regeneration": {"max_tokens": 64}},
    "train": {"steps": 40, "precision": "fp32", "checkpoint_every": 20, "validation_every": 40},
    "gate": {"prompts_per_kind": 1, "max_tokens": 32},
    "evaluate": {"prompts_per_kind": 2, "max_tokens": 32, "repeats": 1, "speed_prompts": 1},
    # A drafter of so little training would not pay, and be left out.
    "deploy": {"speculation": "fixed"},
}


class Served:
    """A house, and what each verifier of it says alone."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.alone: dict[str, list[smoke.Answer]] = {}

    def state(self) -> State | None:
        return read_state(Places(self.house.root), NAME)

    def change(self, quantization: str) -> str:
        """Register the verifier in a quantization; the digest of its identity."""
        self.house.do(sys.executable, "-m", "flows.verifiers", "add", NAME, "--quantization", quantization, seconds=600)
        serving = self.house.registry.serving_verifier(NAME)
        assert serving is not None
        return serving.digest

    def until_alone(self, digest: str) -> None:
        """Wait until a verifier is served alone, and keep what it says."""

        def look() -> bool:
            state = self.state()
            if state is None or state.target.digest != digest or state.target.content is not None:
                return False
            try:
                self.alone[digest] = smoke.reference(url(state.engine_port), NAME, TOKENS)
            except DraftlineError:
                return False  # its place was taken meanwhile
            return True

        self.house.until("the verifier, alone", look, SWITCH_SECONDS, pause=0.5)

    def until_pair(self, digest: str) -> State:
        """Wait until a verifier is served with a drafter."""

        def look() -> State | None:
            state = self.state()
            return state if state is not None and state.target.digest == digest and state.target.content is not None else None

        found: State = self.house.until("the pair", look, SWITCH_SECONDS, pause=0.5)
        return found

    def difference(self, digest: str) -> str | None:
        """Where what users get differs from what the verifier alone has said."""
        front = self.state()
        assert front is not None
        return smoke.first_difference(url(front.port), NAME, TOKENS, self.alone[digest], near_tie=0.75)

    def retrained(self, count: int) -> dict[str, Any]:
        """The run with this number, once it has ended well."""
        run = self.house.until(f"retrain run {count}", lambda: self.house.flow_runs("retrain")[count - 1 :], 120)[0]
        ended = self.house.ended(run["id"], RETRAIN_SECONDS)
        assert ended["state_type"] == "COMPLETED", f"{ended['state']['message']}\n{self.house.logs()}"
        return ended


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    clone = Clone(tmp_path_factory.mktemp("real") / "repository", make_bigram_verifier(tmp_path_factory.mktemp("unused") / "verifier"))
    params = YAML(typ="safe", pure=True).load((REPOSITORY / "params.yaml").read_text(encoding="utf-8"))
    params["prepare"]["inputs"] = [str(path) for path in sorted((REPOSITORY / "data" / "prompts").glob("*.jsonl"))]
    for section, values in SHORT.items():
        params[section] = params.get(section, {}) | values
    clone.write_params(params)
    with House(clone) as house:
        yield Served(house)


def test_a_change_of_quantization_is_followed_to_what_users_get(served: Served) -> None:
    """One retraining per identity, none on the way back; a user always gets what the verifier says that is to be served."""
    house = served.house
    began = time.monotonic()

    def told(what: str) -> None:
        print(f"\n{time.monotonic() - began:6.0f} s  {what}", flush=True)

    plain = served.change("as-is")
    served.until_alone(plain)
    told("it is served alone")
    served.retrained(1)
    told("its drafter is trained")
    first = served.until_pair(plain)
    told("the pair is served")
    assert served.difference(plain) is None

    quantised = served.change("w8a8")
    assert quantised != plain
    served.until_alone(quantised)
    told("w8a8 is served alone")
    assert [a.text for a in served.alone[quantised]] != [a.text for a in served.alone[plain]], "another verifier says other things"
    reason = served.retrained(2)["parameters"]["reason"]
    told(f"its drafter is trained ({reason})")
    assert "quantization" in reason
    second = served.until_pair(quantised)
    told("the pair is served")
    assert second.target.drafter_version == 2
    assert served.difference(quantised) is None
    previous = house.registry.drafter(NAME, "previous")
    assert previous is not None
    assert previous.version == first.target.drafter_version

    assert served.change("as-is") == plain
    back = served.until_pair(plain)
    told("the first pair is served again")
    assert back.target.content == first.target.content
    assert served.difference(plain) is None
    assert len(house.flow_runs("retrain")) == 2
    assert len(house.registry.drafters(NAME)) == 2
