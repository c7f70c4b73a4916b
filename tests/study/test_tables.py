"""Tables from run folders written by hand, and tuning that looks at validation rows only."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kilter.records.codec import to_json
from kilter.records.types import (
    ClientReport,
    Clients,
    ClientsAt,
    Evaluation,
    Metrics,
    ModelScores,
    Notice,
    Point,
    Round,
    Spread,
    Summary,
)
from kilter.report.study_figures import draw
from kilter.study.folder import Folder
from kilter.study.grid import Job, Study
from kilter.study.results import Results, gather
from kilter.study.runner import FailedRun
from kilter.study.tables import caption, comma_separated, markdown, show
from kilter.study.tuning import choose, trials


def spread(mean: float) -> Spread:
    return Spread(mean, 0.02, mean - 0.02, mean + 0.02, mean - 0.02)


def write_run(
    folder: Folder,
    job: Job,
    curve: list[float],
    spent: int,
    valid: float | Metrics = 0.5,
    own: bool = False,
    summary: dict[str, Any] | None = None,
    last: dict[str, Any] | None = None,
    first: dict[str, Any] | None = None,
    end: dict[str, Any] | None = None,
) -> None:
    """A finished run: this global curve, clients two points below and above it, so many bytes each way in each round.

    `summary` and `last` change the summary and its last evaluation; `first` and `end` the first and the last round.
    """
    path = folder.run(job)
    path.mkdir(parents=True)
    records = [Round(**{"round": 0, "bytes_up": 5, **(first or {})})]
    for t, a in enumerate(curve, start=1):
        evaluation: dict[str, Any] = {"global_metrics": {"accuracy": a}, "client": {"accuracy": spread(a)}}
        changes = (end or {}) if t == len(curve) else {}
        records.append(Round(**{"round": t, **evaluation, "bytes_up": spent, "bytes_down": spent, **changes}))
    (path / "rounds.jsonl").write_text("".join(to_json(r) + "\n" for r in records))
    part = "own_test" if own else "test"
    reports = {
        str(k): ClientReport(1, 1, **{part: {"accuracy": curve[-1] + d}})  # type: ignore[arg-type]
        for k, d in enumerate((-0.02, 0.02))
    }
    (path / "clients.json").write_text(to_json(Clients(ClientsAt(len(curve), reports))))
    (path / "experiment.toml").write_text(job.experiment.write())
    metrics: Metrics = valid if isinstance(valid, dict) else {"accuracy": valid}
    model = "mean of personal models" if own else "global"
    evaluation = {"round": len(curve), "global_model": model, "scores": None, "valid": metrics, **(last or {})}
    values: dict[str, Any] = {
        "method": job.experiment.method,
        "rounds": len(curve),
        "seed": job.seed,
        "clients": 2,
        "topology": "star",
        "global_accuracy": curve[-1],
        "global_model": model,
        "client_accuracy": spread(curve[-1]),
        "seconds": 2.0,
        "last": Evaluation(**evaluation),
        **(summary or {}),
    }
    (path / "summary.json").write_text(to_json(Summary(**values)))


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
                lost.append(FailedRun(job, "its process was killed by signal 9"))
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
    assert float(prox["global_difference_p_holm"]) == pytest.approx(2 / 16)  # of two comparisons
    assert prox["global_difference_verdict"] == "higher, uncorrected"
    assert prox["client_difference_verdict"] == "higher, uncorrected"
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
    assert "| 0.062 | 0.12 | higher, uncorrected | 75.0 |" in text  # beside the paper's number
    assert "| fedavg | 2 (3 of 5) | - | 405 B (3 of 5) | 2 | 405 B | 2.0 |" in text
    assert "| fedprox | 1 | 4 | 405 B | 2 | 805 B | 2.0 |" in text
    assert "| solo (4 of 5 seeds) | not reached |" in text
    assert "solo \\* (4 of 5 seeds)" in text
    assert "target: fedavg's final 58.0 %" in text
    assert "killed by signal 9" in text
    assert "70.0 ± 8.8 △" in text  # in the overview
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
    figures = draw(results, tmp_path / "figures")
    assert [figure.kind for figure in figures] == ["curves-global", "curves-client", "bytes", "clients"]
    for path in [figure.path for figure in figures]:
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
        assert "mu = 0.1 | 60.0 % | accuracy | 3 |" in text
        assert "3 runs for each method in each cell" in text


def test_failed_trials_do_not_win(tmp_path: Path) -> None:
    study = Study.of({"methods": ["fedprox"], "seeds": 1, "tune": {"mu": [0.01, 0.1]}})
    with Folder(tmp_path) as folder:
        jobs = trials(study)
        write_run(folder, jobs[1], [0.5], 100, valid=0.1)
        (choice,) = choose(study, jobs, folder).values()
    assert choice.settings == {"mu": 0.1}
    assert choice.tried == [({"mu": 0.01}, None), ({"mu": 0.1}, 0.1)]


def test_tuning_minimises_a_metric_where_lower_is_better(tmp_path: Path) -> None:
    study = Study.of({"methods": ["fedprox"], "seeds": 1, "tune": {"mu": [0.01, 0.1, 1.0]}})
    with Folder(tmp_path) as folder:
        jobs = trials(study)
        for job, loss in zip(jobs, (0.9, 0.2, 0.5), strict=True):
            write_run(folder, job, [0.5], 100, valid={"loss": loss}, summary={"chosen_by": "loss"})
        (choice,) = choose(study, jobs, folder).values()
        text = markdown(gather(study, folder, [], choices={("", ""): choice}))
    assert (choice.settings, choice.score, choice.metric) == ({"mu": 0.1}, 0.2, "loss")
    assert "mu = 0.1 | 0.2 | loss | 3 |" in text


def test_a_run_that_trained_nothing_is_not_done(tmp_path: Path) -> None:
    study = Study.of({"methods": ["fedavg"], "seeds": 1})
    folder = Folder(tmp_path)
    (job,) = study.jobs()
    write_run(folder, job, [0.5], 1, summary={"outcome": "no valid replies"})
    assert not folder.is_done(job)


def test_what_did_not_happen_has_a_table(tmp_path: Path) -> None:
    study = Study.of({"methods": ["fedavg", "slfed"], "seeds": 2, "experiment": {"topology": "full"}})
    folder = Folder(tmp_path)
    for job in study.jobs():
        notices = [Notice("fewer than two contributors", 3, [1, 2], ["a", "b"])] if job.label == "slfed" else []
        write_run(folder, job, [0.5], 1, summary={"notices": notices})
    results = gather(study, folder, study.jobs())
    assert "| slfed | fewer than two contributors | 6 | 2 of 2 |" in markdown(results)
    out = io.StringIO()
    show(results, Console(file=out, width=200))
    assert "fewer than two contributors" in out.getvalue()
    kept = [n.what for run in results.cells[0].lines[1].runs for n in run.notices]
    assert kept == ["fewer than two contributors"] * 2


def test_other_results_and_classes_have_tables_of_their_own(tmp_path: Path) -> None:
    study = Study.of({"methods": ["fedavg"], "seeds": 2, "by_class": True, "experiment": {"data": "digits"}})
    folder = Folder(tmp_path)
    for job, at in zip(study.jobs(), (0.5, 0.7), strict=True):
        each = {k: [at, 1.0] for k in ("precision", "recall", "specificity", "f1")}
        other = {"mean": ModelScores({"accuracy": at - 0.1, "calibration_error": 0.05}, each)}
        write_run(folder, job, [at], 1, last={"scores": ModelScores({"accuracy": at}, each), "variants": other})
    text = markdown(gather(study, folder, study.jobs()))
    assert "| fedavg: mean | 50.0 ± 14.1 | - | 5.0 ± 0.0 | - |" in text
    assert "| fedavg: 0 | 60.0 ± 14.1 | 60.0 ± 14.1 | 60.0 ± 14.1 | 60.0 ± 14.1 |" in text
    assert "| fedavg: 1 | 100.0 ± 0.0 |" in text
    quiet = Study.of({"methods": ["fedavg"], "seeds": 2, "experiment": {"data": "digits"}})
    assert "each class" not in markdown(gather(quiet, folder, quiet.jobs()))


def test_each_class_at_each_client_has_a_table(tmp_path: Path) -> None:
    study = Study.of({"methods": ["fedavg"], "seeds": 2, "experiment": {"data": "digits", "metrics": "by_class"}})
    folder = Folder(tmp_path)
    for job, at in zip(study.jobs(), (0.5, 0.7), strict=True):
        write_run(folder, job, [at], 1)
        of_cat: Metrics = {f"{k}:cat": at for k in ("precision", "recall", "specificity", "f1")}
        reports = {"a": ClientReport(9, 1, test={"accuracy": at, **of_cat, "recall:dog": None})}
        (folder.run(job) / "clients.json").write_text(to_json(Clients(ClientsAt(1, reports))))
    text = markdown(gather(study, folder, study.jobs()))
    assert "| fedavg: a, cat | 60.0 ± 14.1 | 60.0 ± 14.1 | 60.0 ± 14.1 | 60.0 ± 14.1 |" in text
    assert "dog" not in text  # this client has no rows of the class


def test_the_local_measure_has_its_own_tables_and_curves(tmp_path: Path) -> None:
    study = Study.of({"methods": ["fedavg", "solo"], "measure": "local", "seeds": 3})
    with Folder(tmp_path) as folder:
        for job in study.jobs():
            local = Spread(0.8 if job.label == "solo" else 0.6, 0.1, 0.4, 0.9, 0.4)
            common = Spread(0.5, 0.1, 0.45, 0.55, 0.45)
            over = {"local_accuracy": local, "common_accuracy": common}
            write_run(folder, job, [0.2, 0.3], 1, summary=over, end={"bench": {"local": local}})
        results = gather(study, folder, study.jobs())
    text = markdown(results)
    assert "local accuracy in %" in text
    assert "| solo | 40.0 | 80.0 | 90.0 | 45.0 | 50.0 | 55.0 |" in text
    assert "top-5" not in text
    solo = list(csv.DictReader(io.StringIO(comma_separated(results))))[1]
    assert float(solo["local_difference"]) == pytest.approx(0.2)
    assert float(solo["local_min_client"]) == pytest.approx(0.4)
    assert "curves-local" in {figure.kind for figure in draw(results, tmp_path / "figures")}


def test_top_5_accuracy_has_columns_where_there_are_more_classes(tmp_path: Path) -> None:
    study = Study.of({"methods": ["fedavg"], "measure": "local", "seeds": 1})
    with Folder(tmp_path) as folder:
        (job,) = study.jobs()
        write_run(folder, job, [0.3], 1, last={"client": {"top5": Spread(0.7, 0.1, 0.6, 0.9, 0.6)}})
        text = markdown(gather(study, folder, study.jobs()))
    assert "top-5 min | top-5 mean | top-5 max" in text
    assert "| fedavg | - | - | - | - | - | - | 60.0 | 70.0 | 90.0 |" in text


def test_every_series_that_a_method_records_has_a_figure(tmp_path: Path) -> None:
    """The study knows no method's names: whatever is recorded is averaged over nodes and drawn."""
    study = Study.of({"methods": ["fedavg", "feddisk"], "seeds": 1, "experiment": {"data": "digits"}})
    folder = Folder(tmp_path)
    setup = [Point("my loss", "server", 0, 9.0), Point("my loss", "a", 1, 4.0), Point("my loss", "b", 1, 6.0)]
    for job in study.jobs():
        mine = job.label == "feddisk"
        later = [Point("size of a list", "a", 1, 3.0)] if mine else []
        write_run(folder, job, [0.5], 1, first={"series": setup if mine else []}, end={"series": later})
    results = gather(study, folder, study.jobs())
    fedavg, feddisk = (line.runs[0] for line in results.cells[0].lines)
    assert (fedavg.series, feddisk.series["my loss"]) == ({}, {0: 9.0, 1: 5.0})
    assert feddisk.setup_series == ["my loss"]
    figures = {figure.kind: figure for figure in draw(results, tmp_path / "figures")}
    assert figures["series-my-loss"].title == "my loss"
    assert "round of the set-up phase" in figures["series-my-loss"].path.with_suffix(".svg").read_text()
    assert "series-size-of-a-list" in figures


def test_a_letter_between_peers_is_counted_once(tmp_path: Path) -> None:
    """Between peers, what one sends is what another receives; between clients and a server these are different letters."""
    methods = ["fedavg", {"method": "fedavg", "topology": "full", "label": "peers"}]
    study = Study.of({"methods": methods, "seeds": 1, "experiment": {"rounds": 1}})
    with Folder(tmp_path) as folder:
        for job in study.jobs():
            write_run(folder, job, [0.5], 100)
        star, peers = gather(study, folder, study.jobs()).cells[0].lines
    assert star.runs[0].spent[1] == 200
    assert peers.runs[0].spent[1] == 100


def test_a_study_of_another_metric_is_shown_in_its_units_and_direction(tmp_path: Path) -> None:
    study = Study.of({"methods": ["fedavg", "fedprox"], "seeds": 1, "target": "reference", "experiment": {"rounds": 2}})
    errors = {"fedavg": [40.0, 20.0], "fedprox": [30.0, 15.0]}
    with Folder(tmp_path) as folder:
        for job in study.jobs():
            curve = errors[job.label]
            write_run(
                folder,
                job,
                curve,
                100,
                summary={"chosen_by": "mae", "directions": {"mae": "lower"}, "global_accuracy": None},
                last={"scores": ModelScores({"mae": curve[-1]}), "client": {"mae": spread(curve[-1])}},
                end={"global_metrics": {"mae": curve[-1]}, "client": {"mae": spread(curve[-1])}},
            )
        actual = gather(study, folder, study.jobs())
    text = markdown(actual)
    assert "global mae" in text
    assert "in %" not in text.split("cost")[0].split("Global")[0]
    assert "fedprox" in text
    lines = {line.label: line for line in actual.cells[0].lines}
    assert lines["fedprox"].over_seeds("global") == (15.0, None)
    assert lines["fedprox"].rounds_to == [2]  # 15 is below the reference's 20
    assert lines["fedavg"].rounds_to == [2]
