"""Every command that reads a user's data takes the same options for it."""

from __future__ import annotations

from dataclasses import fields

import pytest
import typer

from kilter import cli
from kilter.data import TableOptions
from kilter.options import TABLE_FILES, TABLE_SETTINGS


def options_of(command: str) -> dict[str, str]:
    """Option -> help text."""
    group = typer.main.get_command(cli.app)
    return {name: p.help for p in group.commands[command].params for name in p.opts}  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", ["inspect", "join", "peer"])
def test_a_command_reads_data_as_run_does(command: str) -> None:
    run, own = options_of("run"), options_of(command)
    for name in TABLE_SETTINGS:
        option = f"--{name.replace('_', '-')}"
        assert own.get(option) == run[option] != "", option


def test_the_list_is_complete() -> None:
    assert {*TABLE_SETTINGS} - {"schema"} == {f.name for f in fields(TableOptions)} - {"categories"}  # in the schema
    assert set(TABLE_FILES) <= set(TABLE_SETTINGS)
