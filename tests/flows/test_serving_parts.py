"""The decisions and texts of serving, without a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.context import BASE_PORT, SERVE_PORT, port
from flows.errors import FlowError
from flows.serving.desired import steps
from flows.serving.places import Places
from flows.serving.proxy import render
from flows.serving.smoke import Answer, Token, is_near_tie
from flows.serving.state import Refused, State, Target, read_state, write_state
from flows.serving.supervisor import program_text

ALONE, PAIR = Target("a" * 64, 1), Target("a" * 64, 1, "c" * 64, 1)
OTHER_PAIR, NEW_ALONE, NEW_PAIR = Target("a" * 64, 1, "d" * 64, 2), Target("b" * 64, 2), Target("b" * 64, 2, "e" * 64, 3)


@pytest.mark.parametrize(
    ("live", "wanted", "expected"),
    [
        (None, ALONE, [ALONE]),
        (None, PAIR, [ALONE, PAIR]),
        (ALONE, ALONE, []),
        (ALONE, PAIR, [PAIR]),
        (PAIR, PAIR, []),
        (PAIR, ALONE, [ALONE]),
        (PAIR, OTHER_PAIR, [OTHER_PAIR]),
        (PAIR, NEW_ALONE, [NEW_ALONE]),
        (PAIR, NEW_PAIR, [NEW_ALONE, NEW_PAIR]),
    ],
)
def test_a_new_verifier_is_served_alone_before_its_pair(live: Target | None, wanted: Target, expected: list[Target]) -> None:
    assert steps(live, wanted) == expected


@pytest.mark.parametrize(
    ("said", "same"),
    [("one two three ", True), ("one too three", True), ("one four three", False), ("one six", False), ("one ", False)],
    ids=["identical", "nearly as likely", "unlikely", "not among the likeliest", "ends early"],
)
def test_a_difference_that_rounding_explains_is_none(said: str, same: bool) -> None:
    tokens = (Token("one ", {"one ": -0.1}), Token("two ", {"two ": -0.7, "too ": -0.9, "four ": -3.0}), Token("three ", {"three ": -0.1}))
    answer = Answer("one two three ", tokens)
    assert (said == answer.text or is_near_tie(answer, said, 0.75)) is same


def test_the_proxy_s_configuration_says_what_it_was_made_from(tmp_path: Path) -> None:
    states = [State("tiny", "127.0.0.1", 8000, "engine-tiny-1", 40001, ALONE), State("large", "::", 8001, "engine-large-1", 40002, PAIR)]
    text, digest = render(states, tmp_path / "sock", 60)
    assert f"description {digest}\n" in text
    assert "bind [::]:8001\n    server engine-large-1 127.0.0.1:40002\n" in text
    assert render(states[:1], tmp_path / "sock", 60)[1] != digest


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    places = Places(tmp_path)
    state = State("tiny", "127.0.0.1", 8000, "engine-tiny-1", 40001, PAIR, Refused("a" * 64, "d" * 64, "differs"))
    write_state(places, state)
    assert read_state(places, "tiny") == state
    (places.states / "tiny.json").write_text("{}")
    with pytest.raises(FlowError, match="not a state of serving"):
        read_state(places, "tiny")


def test_a_program_s_command_survives_supervisord_s_and_the_shell_s_signs(tmp_path: Path) -> None:
    text = program_text("engine-tiny", ["python", "a b", "100%"], tmp_path, tmp_path / "log", {})
    assert "command = python 'a b' 100%%\n" in text


@pytest.mark.parametrize("value", ["", "0", "65536", "eighty"])
def test_a_port_that_is_none_is_said(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_PORT", value)
    with pytest.raises(FlowError, match="SERVE_PORT = "):
        port(SERVE_PORT, BASE_PORT)
