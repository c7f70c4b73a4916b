"""Numbers that cannot work: refused for every option of every command, in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.cli import app
from kilter.commands.experiment_options import assemble, run_settings
from kilter.core import Method
from kilter.errors import Mistake
from kilter.methods import methods
from kilter.options import Option, declaration, default, own_fields

NOT_FINITE = ("nan", "inf", "-inf", "1e999")
Run = Callable[..., tuple[int, str, str]]


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


RUN_OPTIONS = sorted(name for name, setting in run_settings().items() if is_number(setting.default))
METHOD_SETTINGS = [
    (method, field.name, declaration(field))
    for method, kind in methods().items()
    for field in own_fields(kind, Method).values()
    if is_number(default(field))
]


def lowest(declared: Option) -> float | str | None:
    """The least value of a setting, or the name of the setting that it must not fall below."""
    return declared.above if declared.at_least is None else declared.at_least


@pytest.mark.parametrize("name", RUN_OPTIONS)
def test_an_option_of_a_run_refuses_what_is_not_a_number_in_its_range(kilter: Run, tmp_path: Any, name: str) -> None:
    optimiser = ["--optimiser", "adam"] if name in ("beta1", "beta2", "eps") else []
    for text in (*NOT_FINITE[:2], "-1", "many"):
        code, out, error = kilter("run", f"--{name.replace('_', '-')}={text}", *optimiser)
        assert code == 2, (text, out, error)
        assert name in error.replace("-", "_")
        assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("method", "name", "declared"), METHOD_SETTINGS, ids=lambda v: v if isinstance(v, str) else "")
def test_a_setting_of_a_method_refuses_what_is_not_a_number_in_its_range(
    method: str, name: str, declared: Option
) -> None:
    below = lowest(declared)
    assert below is not None, "every numeric setting states its least value"
    for text in (*NOT_FINITE, "many", "", *(["-1e9"] if isinstance(below, str) or below > -1e9 else [])):
        with pytest.raises(Mistake, match=name):
            assemble(None, [f"{name}={text}"], {"method": method})


@given(text=st.text(st.characters(categories=["Nd", "No", "Nl", "Pd", "Zs"]), max_size=6))
@settings(max_examples=50, deadline=None)
def test_no_text_makes_a_number_of_workers_fail_unexpectedly(text: str) -> None:
    from kilter.commands.experiment_options import worker_count

    try:
        count = worker_count(text)
    except Mistake:
        return
    assert count == "auto" or count >= 1


def other_numbers() -> Iterator[Any]:
    """The numeric options of all commands that are not settings of a run."""

    def walk(command: Any, path: str) -> Iterator[tuple[str, Any]]:
        for name, part in getattr(command, "commands", {}).items():
            yield from walk(part, f"{path} {name}".strip())
        for parameter in () if hasattr(command, "commands") else command.params:
            yield path, parameter

    for path, parameter in walk(typer.main.get_command(app), ""):
        if parameter.bare_type in (int, float) and parameter.name not in run_settings() and path != "hub study":
            yield pytest.param(parameter, id=f"{path} {parameter.name}")


@pytest.mark.parametrize("parameter", list(other_numbers()))
def test_every_other_numeric_option_states_its_range(parameter: Any) -> None:
    assert parameter.min is not None
    if parameter.bare_type is float:
        assert parameter.max is not None, "infinity must be refused"


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "e.toml", "--deadline", "nan"],
        ["serve", "e.toml", "--grace", "inf"],
        ["serve", "e.toml", "--quorum", "-1"],
        ["join", "--server", "a:1", "--data", "x", "--give-up", "-3"],
        ["certs", "new", "--out", "c", "--names", "a", "--days", "999999999"],
        ["show", "--federated", "--epsilon", "nan"],
        ["resume", "r", "--rounds", "0"],
    ],
)
def test_a_number_out_of_range_is_named_with_its_option(kilter: Run, words: list[str]) -> None:
    code, _, error = kilter(*words)
    assert code == 2
    assert f"Invalid value for '{words[-2]}'" in error
    assert "Traceback" not in error
