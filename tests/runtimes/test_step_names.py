"""Step names survive the wire, and nothing else passes for one."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilter.errors import Mistake
from kilter.runtimes.step_names import ADOPT, EVALUATE, LOOK, StepKind, StepName

identifiers = st.from_regex(r"[a-z_][a-z0-9_]{0,40}", fullmatch=True).filter(str.isidentifier)
rules = st.sampled_from(["", "clip", "clip:1", "median", "trimmed:0.2", "krum:0.1"])
names = st.one_of(
    identifiers.map(StepName),
    identifiers.map(StepName.spread),
    st.builds(StepName.gather, identifiers, rules),
    st.sampled_from([EVALUATE, LOOK, ADOPT]),
)


@given(names)
def test_a_name_is_the_same_after_formatting_and_parsing(name: StepName) -> None:
    assert StepName.parse(str(name)) == name


@given(st.text(max_size=60))
def test_whatever_parses_formats_to_the_same_text(text: str) -> None:
    name = None
    with suppress(Mistake):
        name = StepName.parse(text)
    assert name is None or str(name) == text


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("train", StepName("train")),
        ("spread:train", StepName("train", StepKind.SPREAD)),
        ("gather:combine", StepName("combine", StepKind.GATHER)),
        ("gather:median:combine", StepName("combine", StepKind.GATHER, "median")),
        ("gather:trimmed:0.2:combine", StepName("combine", StepKind.GATHER, "trimmed:0.2")),
        (":evaluate", EVALUATE),
    ],
)
def test_the_texts_on_the_wire_stay_the_same(text: str, name: StepName) -> None:
    assert str(name) == text
    assert StepName.parse(text) == name


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "::",
        ":unknown",
        "spread:",
        "spread:median:train",
        "spread::train",
        "gather::combine",
        "gather:nonsense:combine",
        "gather:trimmed:2:combine",
        "gather:median::combine",
        "other:train",
        "two words",
        "tr\u0430in",  # a Cyrillic letter
        "train\n",
        "a" * 201,
    ],
)
def test_anything_else_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(Mistake):
        StepName.parse(text)
