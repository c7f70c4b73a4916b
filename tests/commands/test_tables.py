"""Users' tables on the command line: from raw files to a result."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from kilter import cli
from kilter.data import Preparation, Schema

RUN = ["--partition", "natural", "--clients", "0", "--model", "mlp:4", "--lr", "0.1", "--workers", "1", "--rounds", "1"]


@pytest.fixture
def hospitals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two hospitals: one writes commas and points, the other semicolons and commas, with columns in another order."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "hospitals"
    folder.mkdir()
    first = [f"{40 + i}.5,{'fm'[i % 2]},{1 + (i > 14)}" for i in range(30)]
    second = [f"{1 + (i > 14)};{'fm'[i % 2]};{40 + i},5" for i in range(30)]
    (folder / "north.csv").write_text("\n".join(["age,sex,outcome", *first]))
    (folder / "south.csv").write_text("\n".join(["outcome;sex;age", *second]))
    return folder


def kilter(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kilter", *words])
    try:
        cli.main()
    except SystemExit as e:
        return int(e.code or 0)
    return 0


def test_a_run_says_how_it_prepares_a_table_and_keeps_the_schema(hospitals, monkeypatch, capsys):
    assert kilter(monkeypatch, "run", "--data", "hospitals", "--label", "outcome", *RUN, "--out", "r") == 0
    text = capsys.readouterr().out
    assert "Label: outcome (classes '1', '2')" in text
    assert "Numbers: age (standardised" in text
    schema = Schema.read("r/schema.toml")
    assert schema.names == ("age", "sex")
    preparation = Preparation.load("r")
    assert preparation.schema == schema
    assert preparation.columns[0].count == 44  # of 60 rows, 12 are test rows and 4 are for validation
    first = json.loads(Path("r/rounds.jsonl").read_text().splitlines()[0])
    assert first["round"] == 0
    assert first["bytes_up"] > 0  # the statistics
    assert first["bytes_down"] > 0  # the preparation


def test_a_study_reads_tables_with_the_same_options(hospitals, monkeypatch, capsys):
    words = [
        "compare",
        "--methods",
        "fedavg,solo",
        "--data",
        "hospitals",
        "--label",
        "outcome",
        *RUN[:-4],
        "--rounds",
        "1",
    ]
    assert kilter(monkeypatch, *words, "--seeds", "1", "--out", "s") == 0
    kept = list(Path("s").rglob("schema.toml"))
    assert len(kept) == 2
    assert {Schema.read(path).target for path in kept} == {"outcome"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--label", "outcom"], "did you mean 'outcome'"),
        (["--drop", "outcome", "--label", "outcome"], "column for --label"),
        (["--label", "outcome", "--client", "ward"], "column for --client"),
        (["--label", "outcome", "--schema", "gone.toml"], "The schema .*gone.toml' cannot be read"),
        (["--label", "outcome", "--test-file", "gone.csv"], "There is no file"),
    ],
)
def test_mistakes_end_with_one_sentence_and_no_folder(words, message, hospitals, monkeypatch, capsys):
    assert kilter(monkeypatch, "run", "--data", "hospitals", *RUN, *words, "--out", "r") == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert "Traceback" not in error
    assert error.count("\n") == 1
    assert not Path("r").exists()


def test_options_of_tables_are_refused_for_other_data(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert kilter(monkeypatch, "run", "--data", "digits", "--label", "y", "--out", "r") == 2
    assert "'digits' is built in and not a table of yours: leave out label" in capsys.readouterr().err
