"""A published run, repeated: the same bits here, and a drift where a number was changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from kilter.errors import Mistake
from kilter.report.study_page import publish
from kilter.study.folder import Folder
from kilter.study.grid import Study
from kilter.study.pipeline import conduct
from kilter.study.repeat import repeat


def test_a_repeated_run_has_the_same_bits_and_a_changed_number_is_noticed(tmp_path: Path) -> None:
    values = {"data": "digits", "rows": 200, "clients": 2, "rounds": 2, "model": "mlp:8"}
    study = Study.of({"name": "tiny", "methods": ["fedavg", "solo"], "seeds": 1, "experiment": values})
    with Folder(tmp_path) as folder:
        results = conduct(study, folder, 1, Console(quiet=True))
        publish(results, tmp_path, "test")
    same = repeat(study, tmp_path)
    assert same.is_same
    assert "tiny: same bits" in str(same)
    assert "fedavg" in same.title  # not the run that sends nothing
    stored = json.loads((tmp_path / "results.json").read_text())
    losses = stored["lines"][0]["runs"][0]["curves"]["loss"]
    losses["1"] += 1e-5
    (tmp_path / "results.json").write_text(json.dumps(stored))
    nearly = repeat(study, tmp_path)
    assert not nearly.is_same
    assert "same accuracies, training losses differ by up to 1.0e-05" in str(nearly)
    losses.clear()
    (tmp_path / "results.json").write_text(json.dumps(stored))
    assert "no published losses to compare" in str(repeat(study, tmp_path))
    stored["lines"][0]["runs"][0]["accuracy"]["global"] += 0.01
    (tmp_path / "results.json").write_text(json.dumps(stored))
    drifted = repeat(study, tmp_path)
    assert not drifted.is_same
    assert "differs by up to 1.00 points" in str(drifted)


@pytest.mark.parametrize(("method", "rounds"), [("fedavg", (3, 6)), ("local", (3, 6)), ("tuned", (6, 6))])
def test_of_a_long_run_the_first_rounds_are_repeated(method: str, rounds: tuple[int, int], tmp_path: Path) -> None:
    values = {"data": "digits", "rows": 200, "clients": 2, "rounds": 6, "model": "mlp:8", "evaluate_every": 2}
    entries = {
        "fedavg": "fedavg",
        "local": {"method": "fedbn", "label": "local"},
        "tuned": {
            "method": "fedavg-tuned",
            "lr_schedule": "fedbe",
            "label": "tuned",
        },  # depends on the number of rounds
    }
    study = Study.of({"name": "tiny", "methods": [entries[method]], "seeds": 1, "experiment": values})
    with Folder(tmp_path) as folder:
        publish(conduct(study, folder, 1, Console(quiet=True)), tmp_path, "test")
    repeated = repeat(study, tmp_path, seconds=0.001)
    assert repeated.is_same
    assert repeated.rounds == rounds
    assert ("same bits in the first 3 of 6 rounds" in str(repeated)) == (method != "tuned")
    stored = json.loads((tmp_path / "results.json").read_text())
    stored["lines"][0]["runs"][0]["curves"]["global"]["2"] += 0.01
    (tmp_path / "results.json").write_text(json.dumps(stored))
    assert "differs by up to 1.00 points" in str(repeat(study, tmp_path, seconds=0.001))


def test_a_study_file_that_was_changed_since_cannot_be_repeated(tmp_path: Path) -> None:
    values = {"data": "digits", "rows": 200, "clients": 2, "rounds": 1, "model": "mlp:8"}
    study = Study.of({"name": "tiny", "methods": ["fedavg"], "seeds": 1, "experiment": values})
    with Folder(tmp_path) as folder:
        publish(conduct(study, folder, 1, Console(quiet=True)), tmp_path, "test")
    changed = Study.of({"name": "tiny", "methods": ["fedprox"], "seeds": 1, "experiment": values})
    with pytest.raises(Mistake, match="it was changed since"):
        repeat(changed, tmp_path)


def test_a_tuned_run_is_repeated_with_the_chosen_settings(tmp_path: Path) -> None:
    values = {"data": "digits", "rows": 200, "clients": 2, "rounds": 2, "model": "mlp:8", "lr": 0.3}
    entries = [{"method": "fedprox", "label": "prox"}]
    tuned = {"experiment": values, "tune": {"mu": [5.0, 0.1]}}
    study = Study.of({"name": "tiny", "methods": entries, "seeds": 1, "presets": {"tuned": tuned}}, "tuned")
    with Folder(tmp_path) as folder:
        publish(conduct(study, folder, 1, Console(quiet=True)), tmp_path, "test")
    repeated = repeat(study, tmp_path)
    assert repeated.is_same
    assert "tiny, tuned: same bits" in str(repeated)
    assert "mu=" in repeated.title
    stored = json.loads((tmp_path / "results.json").read_text())
    chosen = stored["tuning"][0]["settings"]
    chosen["mu"] = 5.1 - chosen["mu"]  # the other candidate gives another model
    (tmp_path / "results.json").write_text(json.dumps(stored))
    assert not repeat(study, tmp_path).is_same
