"""Settings as data: help texts, types, choices and ranges, checked wherever a value comes from."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilter import SGD, Adam, Method, Mistake
from kilter.core import Params
from kilter.experiment import Experiment
from kilter.methods import methods
from kilter.options import (
    PACKAGE,
    Option,
    Setting,
    check,
    choices,
    convert,
    declaration,
    default,
    fill,
    option,
    own_fields,
    read_classes,
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    rate: float = option(0.1, "A rate.", above=0)
    share: float = option(0.5, "A share.", at_least=0, below=1)
    low: float = option(1.0, "Lower limit.", at_most="high")
    high: float = option(2.0, "Upper limit.")
    count: int = option(3, "A count.", at_least=1)
    flag: bool = option(False, "A flag.")
    name: str = option("a", "A name.")
    mode: Literal["x", "y"] = option("x", "A mode.")
    table: dict[str, int] = option({}, "A table.")
    plain: float = 0.3  # declared without option(...)

    def __post_init__(self) -> None:
        check(self, "Settings")


def by_name(name: str):
    return next(f for f in fields(Settings) if f.name == name)


def test_a_declaration_is_data():
    assert declaration(by_name("share")) == Option("A share.", at_least=0, below=1)
    assert declaration(by_name("share")).range() == "at least 0 and below 1"
    assert declaration(by_name("plain")) == Option()
    assert default(by_name("table")) == {}
    assert choices(by_name("mode")) == ("x", "y")


def test_defaults_are_not_shared():
    Settings().table["a"] = 1
    assert Settings().table == {}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rate": 0.0}, "rate of Settings must be above 0, not 0.0."),
        ({"rate": math.inf}, "rate of Settings must be a finite number above 0, not inf."),
        ({"plain": math.nan}, "plain of Settings must be a finite number, not nan."),
        ({"share": 1}, "share of Settings must be at least 0 and below 1, not 1."),
        ({"share": np.float32(-1)}, "share of Settings must be at least 0 and below 1, not -1.0."),
        ({"low": 3.0}, "low of Settings must be at most high, not 3.0 (high is 2.0)."),
        ({"count": 0}, "count of Settings must be at least 1, not 0."),
        ({"count": 2.5}, "count of Settings takes a whole number (such as 3), not 2.5."),
        ({"count": True}, "count of Settings takes a whole number (such as 3), not True."),
        ({"rate": "fast"}, "rate of Settings takes a number (such as 0.1), not 'fast'."),
        ({"flag": 1}, "flag of Settings takes true or false (such as False), not 1."),
        ({"name": 1}, "name of Settings takes text (such as 'a'), not 1."),
        ({"mode": "z"}, "Unknown mode of Settings 'z': There are: x, y."),
    ],
)
def test_a_value_out_of_range_is_refused_in_one_sentence(values, message):
    with pytest.raises(Mistake) as caught:
        Settings(**values)
    assert str(caught.value) == message


def test_numbers_of_other_libraries_and_large_integers_are_accepted():
    assert Settings(rate=np.float32(0.5), count=np.int64(4)).count == 4
    assert Settings(count=10**400, rate=1).rate == 1


@given(st.floats())
def test_what_passes_the_check_lies_in_the_range(value):
    if 0 <= value < 1:
        assert Settings(share=value).share == value
    else:
        with pytest.raises(Mistake, match=r"share of Settings must be .*at least 0 and below 1, not ") as caught:
            Settings(share=value)
        assert str(value) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [("rate", "1e-3", 1e-3), ("count", "7", 7), ("flag", "true", True), ("flag", "0", False), ("mode", "y", "y")],
)
def test_values_from_the_command_line_are_converted(name, text, value):
    assert convert(text, by_name(name), "Settings") == value


@pytest.mark.parametrize(
    ("name", "value"), [("flag", 2), ("flag", "yes"), ("count", "7.5"), ("name", 3), ("rate", [1])]
)
def test_values_of_the_wrong_type_are_not_converted(name, value):
    with pytest.raises(Mistake, match=f"{name} of Settings takes"):
        convert(value, by_name(name), "Settings")


def test_an_unknown_name_gets_the_nearest_known_one():
    with pytest.raises(Mistake, match="did you mean 'rate'"):
        fill(Settings, {"rat": 1}, "settings")


@pytest.mark.parametrize("kind", [Experiment, SGD, Adam, *methods().values()], ids=lambda kind: kind.__name__)
def test_every_setting_has_a_help_text_and_a_valid_default(kind):
    own = own_fields(kind, Method).values() if issubclass(kind, Method) else fields(kind)
    for f in own:
        declared = declaration(f)
        assert declared.help.endswith("."), f.name
        assert not math.isnan(default(f)) if isinstance(default(f), float) else True
    if not issubclass(kind, Method):
        kind()


@dataclass(frozen=True, kw_only=True)
class Plain(Method):
    """A user's method with plain dataclass defaults."""

    mu: float = 0.1
    steps: int = 3

    def setup(self, fed) -> Params:
        return {}

    def round(self, fed, state) -> Params:
        return state


def test_a_method_with_plain_defaults_works_and_refuses_nan():
    assert Plain(task=None, local=SGD(), mu=-2).mu == -2
    with pytest.raises(Mistake, match="mu of Plain must be a finite number, not nan"):
        Plain(task=None, local=SGD(), mu=math.nan)
    with pytest.raises(Mistake, match=r"cohort of Plain must be above 0 and at most 1, not 1.5"):
        Plain(task=None, local=SGD(), cohort=1.5)


def test_a_decayed_rate_may_underflow():
    assert SGD(lr=0.1, decay=0.1).at(1000).lr == 0
    assert SGD(lr=0.1, decay=0.5).at(3).lr == 0.1 * 0.5**2


DECLARING = {"experiment.py": [Experiment], "train.py": [SGD, Adam]} | {
    f"methods/{name.replace('-', '_')}.py": [kind] for name, kind in methods().items()
}


@pytest.mark.parametrize("path", DECLARING)
def test_declarations_read_from_source_are_those_of_the_classes(path):
    for kind in DECLARING[path]:
        own = own_fields(kind, Method).values() if issubclass(kind, Method) else fields(kind)
        source = read_classes(PACKAGE / path)[kind.__name__]
        expected = {f.name: Setting(f.name, default(f), choices(f), declaration(f)) for f in own}
        assert source.settings == expected
        assert " ".join(source.doc.split()) == " ".join(kind.__doc__.split())
        assert source.needs == getattr(kind, "needs", frozenset())
