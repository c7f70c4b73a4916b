"""The data of a report page equals what the folders say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from finished_runs import run

from kilter.errors import Mistake
from kilter.experiment import Experiment
from kilter.records.run_folder import read_partition, read_rounds
from kilter.report.html_report import page
from kilter.report.page_data import collect
from kilter.report.summary_text import sentences


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        run(home / f"fedavg-{seed}", "fedavg", seed=seed)
        run(home / f"fedpdc-{seed}", "fedpdc", seed=seed, public=3)
    run(home / "fedep", "fedep")
    return home


def test_runs_become_one_comparison(runs: Path) -> None:
    data = collect([runs])
    (comparison,) = data.comparisons
    assert comparison.reference == "fedavg"
    assert [(line["method"], line["seeds"]) for line in comparison.lines] == [
        ("fedavg", 2),
        ("fedep", 1),
        ("fedpdc", 2),
    ]
    summary = json.loads((runs / "fedavg-0" / "summary.json").read_text())
    (first, second) = (run.curves["global"][2] for run in data.runs if run.label == "fedavg")
    assert comparison.lines[0]["global_mean"] == pytest.approx((first + second) / 2)
    assert first == pytest.approx(summary["global_accuracy"], abs=1e-6)


def test_the_partition_is_recorded(runs: Path) -> None:
    partition = read_partition(runs / "fedavg-0")
    assert partition is not None
    assert len(partition.clients) == 4
    clients = Experiment.read(runs / "fedavg-0" / "experiment.toml").split().clients
    for name, counts in partition.clients.items():
        assert torch.equal(torch.tensor(counts), torch.bincount(clients[name].train["y"], minlength=10))


def test_methods_exhibit_scores_and_mixtures(runs: Path) -> None:
    by_label = {run.label: run for run in collect([runs]).runs}
    scores = [(round, e) for round, e in by_label["fedpdc"].exhibits if e.name == "score on public rows"]
    assert [round for round, _ in scores] == [1, 2]
    assert scores[0][1].values is not None
    assert set(scores[0][1].values) == set(by_label["fedpdc"].partition)
    mixtures = [e for _, e in by_label["fedep"].exhibits if e.name.startswith("share of labels")]
    assert len(mixtures) == 4
    for mixture in mixtures:
        assert mixture.values is not None
        assert sum(mixture.values.values()) == pytest.approx(1, abs=1e-6)


def test_a_running_or_damaged_run(runs: Path, tmp_path: Path) -> None:
    folder = run(tmp_path / "cut", "fedavg")
    for name in ("summary.json", "checksums.json"):
        (folder / name).unlink(missing_ok=True)
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    (folder / "rounds.jsonl").write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:40])
    (detail,) = collect([folder]).runs
    assert not detail.finished
    assert detail.rounds == 1
    assert detail.planned == 2
    (folder / "experiment.toml").write_text("[")
    with pytest.raises(Mistake, match=r"experiment\.toml. is not a TOML file"):
        collect([folder])


def test_wrong_folders(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match="is not a folder"):
        collect([tmp_path / "absent"])
    with pytest.raises(Mistake, match="holds neither a run nor the results"):
        collect([tmp_path])


def test_published_studies_are_shown_without_their_runs() -> None:
    folder = Path(__file__).parents[2] / "experiments" / "label-skew" / "results" / "laptop"
    data = collect([folder])
    (comparison,) = data.comparisons
    results = json.loads((folder / "results.json").read_text())
    assert [line["global_mean"] for line in comparison.lines] == [line["global_mean"] for line in results["lines"]]
    assert any("its runs are not here" in text for text in data.left_out)
    text = " ".join(sentences(comparison))
    assert f"the reference is {comparison.reference}" in text
    assert "has the highest global accuracy" in text


def test_a_name_cannot_end_the_script(runs: Path) -> None:
    data = collect([runs])
    evil = "</script><script>alert(1)</script>"
    data.runs[0].settings["note"] = evil
    text = page(data, evil)
    assert evil not in text
    assert "\\u003c/script>" in text


def test_rounds_with_exhibits_are_read_back(runs: Path) -> None:
    record = read_rounds(runs / "fedpdc-0")[1]
    assert record.exhibits
    assert record.exhibits[0].name == "score on public rows"


def test_runs_that_differ_in_more_than_their_seed_are_not_averaged(tmp_path: Path) -> None:
    for seed in (0, 1):
        run(tmp_path / f"star-{seed}", "fedavg", seed=seed)
    run(tmp_path / "ring", "fedavg", topology="ring", local={"lr": 0.3})
    (comparison,) = collect([tmp_path]).comparisons
    assert {str(line["method"]): line["seeds"] for line in comparison.lines} == {
        "fedavg (topology=star, lr=0.1)": 2,
        "fedavg (topology=ring, lr=0.3)": 1,
    }
    assert comparison.reference in {line["method"] for line in comparison.lines}


def test_the_same_run_twice_is_one_seed(tmp_path: Path) -> None:
    for name in ("first", "again"):
        run(tmp_path / name, "fedavg")
    (comparison,) = collect([tmp_path]).comparisons
    assert [(line["method"], line["seeds"]) for line in comparison.lines] == [("fedavg", 1)]


def test_runs_with_different_metrics_are_compared_apart(tmp_path: Path) -> None:
    run(tmp_path / "a", "fedavg")
    run(tmp_path / "b", "fedavg", data="diabetes", model="mlp")
    first, second = collect([tmp_path]).comparisons
    assert {(c.name, c.metric, c.in_percent) for c in (first, second)} == {
        ("runs by accuracy", "accuracy", True),
        ("runs by mae", "mae", False),
    }
    assert [len(c.lines) for c in (first, second)] == [1, 1]
