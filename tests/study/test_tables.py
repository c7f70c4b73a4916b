"""Tables from run folders written by hand, and tuning that looks at validation rows only."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kilter.report.study_figures import draw
from kilter.study.grid import Job, Study
from kilter.study.results import Results, gather
from kilter.study.runner import Failure, Folder
from kilter.study.tables import caption, comma_separated, markdown, show
from kilter.study.tuning import choose, trials


def write_run(folder: Folder, job: Job, curve: list[float], spent: int, valid: float = 0.5, own: bool = False) -> None:
    """A finished run: this global curve, clients two points below and above it, so many bytes each way in each round."""
    path = folder.run(job)
    path.mkdir(parents=True)
    client = {
        "mean": curve[-1],
        "std": 0.02,
        "min": curve[-1] - 0.02,
        "max": curve[-1] + 0.02,
        "worst_decile": curve[-1] - 0.02,
    }
    records: list[dict[str, Any]] = [{"round": 0, "global": None, "client": None, "bytes_up": 5, "bytes_down": 0}]
    for t, a in enumerate(curve, start=1):
        accuracy = {"global": {"accuracy": a}, "client": {"accuracy": {**client, "mean": a}}}
        records.append({"round": t, **accuracy, "bytes_up": spent, "bytes_down": spent})
    (path / "rounds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    part = "own_test" if own else "test"
    clients = {str(k): {part: {"accuracy": curve[-1] + d}} for k, d in enumerate((-0.02, 0.02))}
    (path / "clients.json").write_text(json.dumps({"last": {"round": len(curve), "clients": clients}}))
    (path / "experiment.toml").write_text(job.experiment.write())
    summary = {
        "global_accuracy": curve[-1],
        "client_accuracy": client,
        "global_is": "the mean over the clients' own models" if own else "the global model",
        "seconds": 2.0,
        "failures": 0,
        "last": {"valid": {"accuracy": valid}},
    }
    (path / "summary.json").write_text(json.dumps(summary))


CURVES = {  # by method and seed
    "fedavg": [[0.3, 0.50], [0.3, 0.60], [0.3, 0.70], [0.3, 0.50], [0.3, 0.60]],
    "fedprox": [[0.6, 0.60], [0.6, 0.71], [0.6, 0.82], [0.6, 0.63], [0.5, 0.74]],
    "solo": [[0.1, 0.2]] * 4,
}


@pytest.fixture
def results(tmp_path: Path) -> Results:
    paper = {
        "source": "A. Paper",
        "numbers": [{"method": "fedprox", "partition": "iid", "global": 0.75, "rounds_to": 4}],
    }
    study = Study.of(
        {
            "name": "by-hand",
            "methods": list(CURVES),
            "grid": {"partition": ["iid", "dirichlet:0.1"]},
            "experiment": {"rounds": 2},
            "paper": paper,
        }
    )
    with Folder(tmp_path) as folder:
        lost = []
        for job in study.jobs():
            curves = CURVES[job.label]
            if job.seed < len(curves):
                write_run(folder, job, curves[job.seed], 100 if job.label == "fedavg" else 200, own=job.label == "solo")
            else:
                lost.append(Failure(job, "its process was killed by signal 9"))
        return gather(study, folder, study.jobs(), lost)


def test_the_table_by_hand(results: Results) -> None:
    rows = {(r["partition"], r["method"]): r for r in csv.DictReader(io.StringIO(comma_separated(results)))}
    assert len(rows) == 6
    avg, prox, solo = (rows["iid", m] for m in CURVES)
    assert float(avg["global_mean"]) == pytest.approx(0.58)
    assert float(avg["global_std"]) == pytest.approx(0.0836660)  # sqrt((.0064 + .0004 + .0144 + .0064 + .0004) / 4)
    assert float(prox["global_mean"]) == pytest.approx(0.70)
    assert float(prox["global_difference"]) == pytest.approx(0.12)  # mean of .10 .11 .12 .13 .14
    assert 0.10 < float(prox["global_difference_low"]) < 0.12 < float(prox["global_difference_high"]) < 0.14
    assert float(prox["global_difference_p"]) == pytest.approx(1 / 16)
    assert prox["global_difference_verdict"] == "higher"
    assert prox["client_difference_verdict"] == "higher"
    assert float(prox["worst_tenth"]) == pytest.approx(0.68)
    # the target is the reference's final mean, 0.58: fedavg reaches it with seeds 1, 2, 4, all in round 2
    assert float(avg["target"]) == pytest.approx(0.58)
    assert (float(avg["rounds_to_target"]), avg["seeds_rounds_to_target"]) == (2, "3")
    assert float(avg["bytes_to_target"]) == 5 + 2 * 200
    assert (float(prox["rounds_to_target"]), prox["seeds_rounds_to_target"]) == (1, "5")
    assert float(prox["bytes_to_target"]) == 5 + 400
    assert (solo["rounds_to_target"], solo["seeds_rounds_to_target"], solo["seeds"]) == ("", "0", "4")
    assert (avg["ecr"], prox["ecr"]) == ("2", "2")
    assert float(prox["bytes"]) == 5 + 2 * 400
    assert avg["global_difference"] == ""


def test_the_table_in_words(results: Results) -> None:
    text = markdown(results)
    assert "| fedprox | 70.0 ± 8.8 | +12.0 [" in text
    assert "| 0.062 | higher | 75.0 |" in text  # beside the paper's number
    assert "| fedavg | 2 (3 of 5) | - | 405 B (3 of 5) | 2 | 405 B | 2.0 |" in text
    assert "| fedprox | 1 | 4 | 405 B | 2 | 805 B | 2.0 |" in text
    assert "| solo (4 of 5 seeds) | not reached |" in text
    assert "solo \\* (4 of 5 seeds)" in text
    assert "target: fedavg's final 58.0 %" in text
    assert "killed by signal 9" in text
    assert "70.0 ± 8.8 ▲" in text  # in the overview
    words = " ".join(caption(results))
    for phrase in (
        "bootstrap",
        "sign-flip",
        "0.062",
        "not like for like" if results.study.proposed else "own maximum",
        "A. Paper",
    ):
        assert phrase in words
    out = io.StringIO()
    show(results, Console(file=out, width=100))
    assert "2 runs failed" in out.getvalue()
    assert "no global model" in out.getvalue()


def test_no_difference_is_said_in_words(tmp_path: Path) -> None:
    study = Study.of({"methods": ["fedavg", "fedprox"], "proposed": ["fedprox"], "target": 0.9})
    with Folder(tmp_path) as folder:
        for job in study.jobs():
            shift = 0.0 if job.label == "fedavg" else (-1) ** job.seed * 0.01
            write_run(folder, job, [0.5 + shift], 100)
        results = gather(study, folder, study.jobs())
    assert "no difference shown" in markdown(results)
    assert "not like for like" in markdown(results)
    assert "90 %" in markdown(results)


def test_figures_are_drawn_twice(results: Results, tmp_path: Path) -> None:
    made = draw(results, tmp_path / "figures")
    assert [p.name for p in made] == ["curves-global", "curves-client", "bytes", "clients"]
    for path in made:
        assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in path.with_suffix(".svg").read_text()[:600]


def test_tuning_never_looks_at_test_rows(tmp_path: Path) -> None:
    study = Study.of({"methods": ["fedavg", "fedprox"], "seeds": 2, "tune": {"mu": [0.01, 0.1, 1.0]}})
    with Folder(tmp_path) as folder:
        jobs = trials(study)
        assert [j.settings["mu"] for j in jobs] == [0.01, 0.1, 1.0]
        for job, test, valid in zip(jobs, (0.9, 0.5, 0.95), (0.4, 0.6, 0.6), strict=True):
            write_run(folder, job, [test], 100, valid)
        (choice,) = choose(study, jobs, folder).values()
        assert choice.settings == {"mu": 0.1}  # best on validation, worst on test; first of equals
        assert choice.score == 0.6
        assert choice.runs == 3
        chosen = study.jobs({("digits, dirichlet:0.5", "fedprox"): choice.settings})
        assert {j.experiment.settings.get("mu") for j in chosen if j.label == "fedprox"} == {0.1}
        for job in chosen:
            write_run(folder, job, [0.5], 100)
        text = markdown(gather(study, folder, chosen, choices=choose(study, jobs, folder), budget=3))
        assert "mu = 0.1 | 60.0 | 3 |" in text
        assert "3 runs for each method in each cell" in text


def test_failed_trials_do_not_win(tmp_path: Path) -> None:
    study = Study.of({"methods": ["fedprox"], "seeds": 1, "tune": {"mu": [0.01, 0.1]}})
    with Folder(tmp_path) as folder:
        jobs = trials(study)
        write_run(folder, jobs[1], [0.5], 100, valid=0.1)
        (choice,) = choose(study, jobs, folder).values()
    assert choice.settings == {"mu": 0.1}
    assert choice.tried == [({"mu": 0.01}, None), ({"mu": 0.1}, 0.1)]


def test_other_results_and_classes_have_tables_of_their_own(tmp_path: Path) -> None:
    study = Study.of({"methods": ["fedavg"], "seeds": 2, "by_class": True, "experiment": {"data": "digits"}})
    folder = Folder(tmp_path)
    for job, at in zip(study.jobs(), (0.5, 0.7), strict=True):
        write_run(folder, job, [at], 1)
        path = folder.run(job) / "summary.json"
        summary = json.loads(path.read_text())
        each = {k: [at, 1.0] for k in ("precision", "recall", "specificity", "f1")}
        other = {"mean": {"accuracy": at - 0.1, "calibration_error": 0.05, "per_class": each}}
        summary["last"] |= {"global": {"per_class": each}, "variants": other}
        path.write_text(json.dumps(summary))
    text = markdown(gather(study, folder, study.jobs()))
    assert "| fedavg: mean | 50.0 ± 14.1 | - | 5.0 ± 0.0 | - |" in text
    assert "| fedavg: 0 | 60.0 ± 14.1 | 60.0 ± 14.1 | 60.0 ± 14.1 | 60.0 ± 14.1 |" in text
    assert "| fedavg: 1 | 100.0 ± 0.0 |" in text
    quiet = Study.of({"methods": ["fedavg"], "seeds": 2, "experiment": {"data": "digits"}})
    assert "each class" not in markdown(gather(quiet, folder, quiet.jobs()))


def test_the_local_measure_has_its_own_tables_and_curves(tmp_path: Path) -> None:
    study = Study.of({"methods": ["fedavg", "solo"], "measure": "local", "seeds": 3})
    with Folder(tmp_path) as folder:
        for job in study.jobs():
            write_run(folder, job, [0.2, 0.3], 1)
            path = folder.run(job)
            summary = json.loads((path / "summary.json").read_text())
            local = {"mean": 0.8 if job.label == "solo" else 0.6, "min": 0.4, "max": 0.9}
            summary |= {"local_accuracy": local, "common_accuracy": {"mean": 0.5, "min": 0.45, "max": 0.55}}
            (path / "summary.json").write_text(json.dumps(summary))
            rounds = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
            rounds[-1]["bench"] = {"local": local}
            rounds[-1]["notes"] = [{"node": "0", "step": "choose", "note": {"uncertainty": 0.25, "chosen": 3}}]
            (path / "rounds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rounds))
        results = gather(study, folder, study.jobs())
    text = markdown(results)
    assert "local accuracy in %" in text
    assert "| solo | 40.0 | 80.0 | 90.0 | 45.0 | 50.0 | 55.0 |" in text
    solo = list(csv.DictReader(io.StringIO(comma_separated(results))))[1]
    assert float(solo["local_difference"]) == pytest.approx(0.2)
    assert float(solo["local_min_client"]) == pytest.approx(0.4)
    names = {p.name for p in draw(results, tmp_path / "figures")}
    assert {"curves-local", "curves-uncertainty", "curves-chosen"} <= names


def test_the_density_phase_has_a_curve(tmp_path: Path) -> None:
    study = Study.of({"methods": ["fedavg", "feddisk"], "seeds": 1, "experiment": {"data": "digits"}})
    folder = Folder(tmp_path)
    for job in study.jobs():
        write_run(folder, job, [0.5], 1)
    path = folder.run(study.jobs()[1]) / "rounds.jsonl"
    first, *rest = path.read_text().splitlines()
    said = [
        {"density_round": 0, "nll": 9.0},
        {"density_round": 1, "nll": 4.0},
        {"density_round": 1, "nll": 6.0},
        "words",
    ]
    notes = [{"node": "server", "step": "merge", "note": note} for note in said]
    path.write_text("\n".join([json.dumps({**json.loads(first), "notes": notes}), *rest]) + "\n")
    results = gather(study, folder, study.jobs())
    fedavg, feddisk = (line.runs[0].curves["density"] for line in results.cells[0].lines)
    assert (fedavg, feddisk) == ({}, {0: 9.0, 1: 5.0})
    assert "curves-density" in [p.name for p in draw(results, tmp_path / "figures")]
