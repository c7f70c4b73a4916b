"""Run folders that are empty, half written, damaged or of a newer release; and commands that are stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from kilter.commands.experiment_options import stops_with

Run = Callable[..., tuple[int, str, str]]
SMALL = [
    "--rows",
    "200",
    "--clients",
    "2",
    "--model",
    "linear",
    "--partition",
    "iid",
    "--workers",
    "1",
    "--rounds",
    "1",
]


@pytest.fixture
def folder(kilter: Run, tmp_path: Path) -> Path:
    """A finished run."""
    assert kilter("run", *SMALL, "--quiet", "--out", "run")[0] == 0
    return tmp_path / "run"


def one_sentence(result: tuple[int, str, str]) -> str:
    code, _, error = result
    assert code == 2, error
    assert error.startswith("kilter: ")
    assert error.count("\n") == 1
    return error


def newer(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 999}))


def test_a_damaged_checkpoint_is_not_said_to_be_resumable(kilter: Run, folder: Path) -> None:
    (folder / "summary.json").unlink()
    (folder / "checkpoint.safetensors").write_bytes(b"x" * 100)
    error = one_sentence(kilter("resume", "run"))
    assert "a checkpoint that cannot be read" in error
    assert "continues from its last checkpoint" not in error


@pytest.mark.parametrize("command", ["resume", "report"])
def test_a_record_of_a_newer_release_is_named(kilter: Run, folder: Path, command: str) -> None:
    (folder / "summary.json").unlink()
    (folder / "checksums.json").unlink()
    newer(folder / "partition.json")
    assert "partition.json that cannot be read: its format is 999" in one_sentence(kilter(command, "run"))


def test_an_altered_summary_is_noticed(kilter: Run, folder: Path) -> None:
    text = (folder / "summary.json").read_text()
    (folder / "summary.json").write_text(text[: len(text) // 2])
    for words in (["report", "run"], ["resume", "run"]):
        assert "was altered or damaged after it was written" in one_sentence(kilter(*words))
    code, out, _ = kilter("runs", ".")
    assert code == 0
    assert "unreadable" in out


def test_folders_that_hold_no_run(kilter: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds neither a run nor" in one_sentence(kilter("report", "empty"))
    assert "it has no experiment.toml" in one_sentence(kilter("resume", "empty"))
    assert "it has no rounds.jsonl" in one_sentence(kilter("trust", "empty"))
    assert "There are no runs in 'empty'" in kilter("runs", "empty")[1]


def test_a_stopped_command_says_what_to_do(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, stops_with("Start it again."):
        raise KeyboardInterrupt
    assert ended.value.exit_code == 130
    assert capfd.readouterr().err == "Stopped. Start it again.\n"
