"""Messages survive the wire, and whatever else arrives is refused as malformed: never another error, never a wrong type."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.net.messages import (
    Card,
    DataDescription,
    Goodbye,
    Hello,
    MailMark,
    Order,
    PeerAnswer,
    PeerHello,
    PeerLetter,
    Refusal,
    Reply,
    StateMark,
)
from kilter.net.results import NOTES, StepResult, check_counts, check_note, check_report
from kilter.net.terms import Terms
from kilter.records.wire import Malformed
from kilter.runtimes.step_names import EVALUATE, StepName

RUN, SESSION = "0" * 32, "1" * 32
MARK = StateMark("ab" * 16, 3)
DATA = DataDescription((3, 8, 8), ("x", "y"), True)
CARD = Card("public", "cert", "signature")
MESSAGES: list[Any] = [
    Hello("a", DATA, 100, "ab" * 16, CARD),
    Hello("a", DATA, 100, "ab" * 16, CARD, "dry-run"),
    Refusal("no"),
    Refusal("not yet", True),
    Goodbye(True),
    Goodbye(False, "the disk is full"),
    Order(RUN, SESSION, 0, 1, 1, EVALUATE),
    Order(
        RUN, SESSION, 2, 3, 4, StepName.gather("combine", "median"), (3, 3), MARK, MailMark(3, 3, EVALUATE), {"b": CARD}
    ),
    Reply("a", RUN, SESSION, 1, 1, StepName("train"), MARK),
    Reply("a", RUN, SESSION, 1, 1, StepName.spread("train"), MARK, True, "it failed"),
    PeerLetter("run", "a", "b", 1, 2, StepName("train"), True, ("c",)),
    PeerHello("run", "a", "b", 7),
    PeerAnswer(3, True),
    Terms(RUN, SESSION, {"method": "fedavg", "seed": 3}, "", DATA, ("a", "b"), ("b",), True),
]

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_is_the_same_after_the_wire(message: Any) -> None:
    assert type(message).parse(json.loads(json.dumps(message.head()))) == message


@settings(max_examples=1500, deadline=None)
@given(st.sampled_from(MESSAGES), st.data())
def test_a_changed_message_is_refused_or_parsed_into_the_same_types(message: Any, data: st.DataObject) -> None:
    head = dict(message.head())
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from([*head, "other"]))
        if data.draw(st.booleans()):
            head[key] = data.draw(values)
        else:
            head.pop(key, None)
    with suppress(Malformed):
        parsed = type(message).parse(head)
        json.dumps(parsed.head(), allow_nan=False)
        assert type(message).parse(parsed.head()) == parsed


@settings(max_examples=500, deadline=None)
@given(values)
def test_bodies_are_refused_or_usable(value: Any) -> None:
    with suppress(Malformed):
        json.dumps(
            StepResult.parse({"reply": None, "fits": [], "seconds": 0.0, "notes": [value]}).notes, allow_nan=False
        )
    with suppress(Malformed):
        json.dumps(check_note(value, ("a",)), allow_nan=False)
    with suppress(Malformed):
        check_report(value, 100, None)
    with suppress(Malformed):
        check_counts(value, 100)
    with suppress(Malformed):
        StepResult.parse({"reply": None, "fits": value, "seconds": value, "notes": []})


def test_notes_are_few_and_short() -> None:
    result = {"reply": None, "fits": [], "seconds": 0.0}
    assert len(StepResult.parse({**result, "notes": ["x"] * NOTES}).notes) == NOTES
    with pytest.raises(Malformed):
        StepResult.parse({**result, "notes": ["x"] * (NOTES + 1)})
    with pytest.raises(Malformed):
        StepResult.parse({**result, "notes": ["x" * 501]})


def test_counts_are_neither_negative_nor_larger_than_possible() -> None:
    check_counts(({"w": 1.5}, 100, [True, "x", None, 0]), 100)
    for bad in (-1, 101, 10**400, {"n": [3, -2]}):
        with pytest.raises(Malformed, match="counts"):
            check_counts(bad, 100)
