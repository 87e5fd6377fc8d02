"""A sample is handed over once, whole, to whom it belongs; otherwise the reader learns which of the five things went wrong."""

from __future__ import annotations

import errno
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.hidden_states.envelope import DATA, KEY, MANIFEST, ForeignError, TornError, make_key
from stages.hidden_states.receive import LateError, LostError, RefusedError, check_key, take
from tests.hidden_states.conftest import Ends
from tests.hidden_states.samples import make_origin, make_publisher

ORIGIN = make_origin()
KEY_A, KEY_B = make_key("run", "a"), make_key("run", "b")
STATES, TOKEN_IDS = torch.randn(5, 2, 3), torch.tensor([4, 3, 2, 1, 0])


def publish(ends: Ends, key: str = KEY_A) -> None:
    make_publisher(ends.writer).put(key, STATES, TOKEN_IDS)


def test_taking_a_sample_acknowledges_it_and_nothing_remains(ends: Ends) -> None:
    publish(ends)
    publish(ends, KEY_B)
    states, token_ids, manifest = take(ends.reader, KEY_A, ORIGIN, 5)
    assert torch.equal(states, STATES)
    assert torch.equal(token_ids, TOKEN_IDS)
    assert manifest.producer.published == 1
    assert set(ends.writer.held()) == {f"{KEY_B}{DATA}", f"{KEY_B}{MANIFEST}"}
    with pytest.raises(LateError):
        take(ends.reader, KEY_A, ORIGIN, 0)


def test_a_sample_that_comes_while_somebody_waits_is_taken_at_once(ends: Ends) -> None:
    later = threading.Timer(0.3, publish, args=(ends,))
    later.start()
    started = time.monotonic()
    take(ends.reader, KEY_A, ORIGIN, 10)
    later.join()
    assert 0.2 < time.monotonic() - started < 1


def test_waiting_ends_in_time_or_when_nobody_wants_the_sample_any_more(ends: Ends) -> None:
    started = time.monotonic()
    with pytest.raises(LateError, match=f"sample {KEY_A} was not published within 0 s"):
        take(ends.reader, KEY_A, ORIGIN, 0.2)
    with pytest.raises(LateError):
        take(ends.reader, KEY_A, ORIGIN, 60, going=lambda: False)
    assert time.monotonic() - started < 1


def test_a_sample_whose_data_have_gone_is_lost_and_says_who_published_it(ends: Ends) -> None:
    publish(ends)
    ends.reader.remove(f"{KEY_A}{DATA}")
    with pytest.raises(LostError, match=rf"sample {KEY_A} was published by \S+:\d+ and is gone"):
        take(ends.reader, KEY_A, ORIGIN, 5)
    assert not ends.writer.held()


@pytest.mark.parametrize("part", [DATA, MANIFEST])
def test_torn_bytes_are_never_handed_over_and_give_their_room_back(ends: Ends, part: str) -> None:
    publish(ends)
    raw = ends.reader.read(f"{KEY_A}{part}")
    assert raw is not None
    raw[len(raw) // 2] ^= 1
    ends.writer.remove(f"{KEY_A}{part}")
    ends.writer.write(f"{KEY_A}{part}", [raw])
    with pytest.raises(TornError):
        take(ends.reader, KEY_A, ORIGIN, 5)
    assert not ends.writer.held()


@pytest.mark.parametrize(("number", "again"), [(errno.ENOSPC, True), (None, False)])
def test_a_refusal_reaches_the_reader_with_all_it_says_and_is_gone(ends: Ends, number: int | None, again: bool) -> None:
    make_publisher(ends.writer).refuse(KEY_A, "why not", number, again)
    with pytest.raises(RefusedError, match=r"^why not$") as refused:
        take(ends.reader, KEY_A, ORIGIN, 5)
    assert (refused.value.number, refused.value.again) == (number, again)
    assert not ends.writer.held()


def test_a_foreign_sample_is_refused_and_stays_where_it_is(ends: Ends) -> None:
    """It may be someone else's: whoever it belongs to can still take it."""
    publish(ends)
    with pytest.raises(ForeignError, match=r"verifier 'vvv.*', expected 'www"):
        take(ends.reader, KEY_A, make_origin(verifier="w" * 64), 5)
    assert torch.equal(take(ends.reader, KEY_A, ORIGIN, 5)[0], STATES)


@pytest.mark.parametrize(
    "key",
    [
        "../../etc/passwd",
        "/etc/passwd",
        f"../{KEY_A}",
        f"{KEY_A}/../x",
        f"{KEY_A}\n",
        f"{KEY_A}.json",
        f"{KEY_A}\x00",
        KEY_A.upper(),
        f"*-{'0' * 32}",
        "",
        None,
        7,
        b"x",
        [KEY_A],
        {"key": KEY_A},
    ],
)
def test_a_key_that_leads_elsewhere_is_refused_before_anything_is_read(key: object) -> None:
    """Engines' answers come over a network."""
    with pytest.raises(RefusedError, match="no key of a sample; nothing was read"):
        check_key(key)


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(max_size=60), st.from_regex(r"[a-z0-9/.\-\n]{1,33}-[0-9a-f/.]{31,33}\n?")))
def test_what_passes_for_a_key_is_a_plain_name(text: str) -> None:
    if KEY.fullmatch(text):
        assert check_key(text) == text
        assert text.replace("-", "").isalnum()
    else:
        with pytest.raises(RefusedError):
            check_key(text)
