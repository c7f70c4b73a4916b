"""The results of a study, read from its run folders: one line for each method in each cell."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kilter.errors import Mistake
from kilter.metrics import Direction, is_of_one_class
from kilter.records.display import SHARES, metric
from kilter.records.run_folder import read_clients, read_partition, read_rounds, read_summary
from kilter.records.types import ClientReport, Notice, Partition, Round, Spread
from kilter.records.versions import BEGAN_WITH
from kilter.study.folder import Folder
from kilter.study.grid import Job, Study
from kilter.study.runner import FailedRun
from kilter.study.schema import COMPARED, MEASURES, Cell
from kilter.study.statistics import (
    Difference,
    bytes_to_target,
    corrected,
    ecr_paper,
    mean_std,
    median_reached,
    paired,
    round_of_best,
    rounds_to_target,
)
from kilter.study.tuning import Choice

SKEWED = 0.9  # share of the pooled labels' entropy below which a client's labels count as skewed


@dataclass(frozen=True)
class Run:
    """One finished run."""

    seed: int
    folder: str
    accuracy: dict[str, float]  # by measure, at the last round
    curves: dict[str, dict[int, float]]  # by measure: accuracy by round; and the training loss
    spent: dict[int, int]  # bytes by round, each letter counted once; round 0 is the set-up
    worst: float | None  # mean accuracy of the worst tenth of the clients
    bench: dict[str, Spread]  # over clients: `local` and `common` on the common test set, `top5` on their own test rows
    clients: list[float]  # every client's accuracy at the last round
    seconds: float
    failures: int  # calls that failed
    own_models: bool  # `global` is the mean over the clients' own models
    setup_rounds: int
    versions: dict[str, str]
    variants: dict[str, dict[str, float]] = field(default_factory=dict)  # the method's other results: metrics by name
    classes: dict[str, list[float]] = field(default_factory=dict)  # the global model's metrics of each class
    classes_by_client: dict[str, dict[str, float]] = field(default_factory=dict)  # with --metrics by_class
    series: dict[str, dict[int, float]] = field(default_factory=dict)  # what the method records: mean over nodes
    setup_series: list[str] = field(default_factory=list)  # those of them that were recorded during the set-up
    notices: list[Notice] = field(default_factory=list)  # what did not happen as intended
    metric: str = "accuracy"  # the task's main metric: what `accuracy`, `curves`, `worst` and `clients` hold
    better: Direction = "higher"

    def rising(self, measure: str) -> dict[int, float]:
        """The curve of a measure; with the opposite sign where lower is better."""
        sign = 1 if self.better == "higher" else -1
        return {t: sign * v for t, v in self.curves[measure].items()}


@dataclass(frozen=True)
class Line:
    """A method in a cell, over its seeds."""

    label: str
    runs: list[Run]
    differences: dict[str, Difference | None]  # to the reference, by measure
    rounds_to: list[int | None]  # by seed
    bytes_to: list[int | None]
    ecr: int | None
    choice: Choice | None
    paper: dict[str, float]

    def values(self, measure: str) -> dict[int, float]:
        """Accuracy by seed."""
        return {r.seed: r.accuracy[measure] for r in self.runs if measure in r.accuracy}

    def over_seeds(self, measure: str) -> tuple[float, float | None] | None:
        """Mean and standard deviation."""
        values = list(self.values(measure).values())
        return mean_std(values) if values else None

    def mean(self, name: str) -> float | None:
        """The mean over seeds of `bytes`, `seconds` or `worst`."""
        values = [sum(r.spent.values()) if name == "bytes" else getattr(r, name) for r in self.runs]
        known = [v for v in values if v is not None]
        return sum(known) / len(known) if known else None

    def over_clients(self, part: str, name: str) -> float | None:
        """The mean over seeds of min, mean or max over the clients of a part of `bench`."""
        values = [getattr(r.bench[part], name) for r in self.runs if part in r.bench]
        return sum(values) / len(values) if values else None

    def reached(self, what: str) -> tuple[float | None, int]:
        """Median of `rounds_to` or `bytes_to` over seeds, and how many seeds reached the target."""
        values: list[int | None] = getattr(self, what)
        return median_reached(values), sum(v is not None for v in values)

    def cost_at_ecr(self, counts_setup: bool) -> float | None:
        """FedDisk's Eq. 18-19: numbers of four bytes that a client sends and receives until the ECR, over the seeds."""
        if self.ecr is None:
            return None
        last = {r.seed: self.ecr - (r.setup_rounds if counts_setup else 0) for r in self.runs}
        values = [
            sum(b for t, b in r.spent.items() if t <= last[r.seed]) / 4 / len(r.clients) for r in self.runs if r.clients
        ]
        return sum(values) / len(values) if values else None

    @property
    def own_models(self) -> bool:
        return any(r.own_models for r in self.runs)


@dataclass(frozen=True)
class CellResult:
    """The results of one cell."""

    cell: Cell
    target: float | None
    target_is: str
    lines: list[Line]


@dataclass(frozen=True)
class Results:
    """A study's tables, its failures and its tuning."""

    study: Study
    cells: list[CellResult]
    failures: list[FailedRun]
    choices: list[Choice]
    budget: int = 0
    notes: list[str] = field(default_factory=list)
    metric: str = "accuracy"  # the main metric of the runs
    scale: int = 100  # 1 for a metric that is not shown in per cent


def gather(
    study: Study,
    folder: Folder,
    jobs: Sequence[Job],
    failures: Sequence[FailedRun] = (),
    choices: Mapping[tuple[str, str], Choice] | None = None,
    budget: int = 0,
) -> Results:
    """The results of the finished runs among these jobs."""
    chosen = dict(choices or {})
    runs: dict[tuple[str, str], list[Run]] = {}
    for job in jobs:
        if folder.is_done(job):
            runs.setdefault((job.cell.name, job.label), []).append(read_run(job, folder.run(job)))
    return tabulate(study, runs, failures, chosen, budget)


def tabulate(
    study: Study,
    runs: Mapping[tuple[str, str], list[Run]],
    failures: Sequence[FailedRun] = (),
    chosen: Mapping[tuple[str, str], Choice] | None = None,
    budget: int = 0,
) -> Results:
    """The results of these runs, which are keyed by the names of their cells and methods."""
    chosen = dict(chosen or {})
    cells = [_cell(study, cell, runs, chosen) for cell in study.cells]
    versions = {json.dumps(r.versions, sort_keys=True) for some in runs.values() for r in some}
    notes = []
    if any(BEGAN_WITH in v for v in versions):
        notes.append("Runs were extended under other versions than they began with: see `versions` in results.json.")
    if len(versions) > 1:
        notes.append("The runs used different versions of the code or its libraries: see `versions` in results.json.")
    main = next((r.metric for some in runs.values() for r in some), "accuracy")
    scale = 100 if main in SHARES else 1
    return Results(study, cells, list(failures), list(chosen.values()), budget, notes, main, scale)


def read_run(job: Job, folder: Path) -> Run:
    """A finished run's folder."""
    summary, rounds, clients = read_summary(folder), read_rounds(folder), read_clients(folder)
    try:
        versions = tomllib.loads((folder / "experiment.toml").read_text()).get("versions", {})
    except (OSError, ValueError):
        raise Mistake(f"'{folder}' is damaged: delete it, and the study runs it again.") from None
    main, of_all = summary.chosen_by, summary.last.scores
    of_classes = main == "accuracy"
    client = summary.client_accuracy if of_classes else summary.last.client.get(main)
    local = summary.local_accuracy if of_classes else None
    last = {
        "global": summary.global_accuracy if of_classes else of_all.metrics.get(main) if of_all else None,
        "client": client.mean if client else None,
        "local": local.mean if local else None,
        "skewed": skewed_accuracy(read_partition(folder), clients.last.clients) if of_classes else None,
    }
    series, setup_series = _series(rounds)
    bench = {
        "local": summary.local_accuracy,
        "common": summary.common_accuracy,
        "top5": summary.last.client.get("top5"),
    }
    scores = summary.last.scores
    return Run(
        seed=job.seed,
        folder=job.folder,
        accuracy={k: v for k, v in last.items() if v is not None},
        curves=curves_by_round(rounds, main),
        # Between clients and a server, up and down are different letters; between clients, they are the same ones.
        spent={r.round: r.bytes_up + (r.bytes_down if job.experiment.topology == "star" else 0) for r in rounds},
        worst=client.worst_decile if client else None,
        bench={part: over for part, over in bench.items() if over},
        clients=[a for report in clients.last.clients.values() if (a := client_metric(report, main)) is not None],
        seconds=summary.seconds,
        failures=summary.failures,
        own_models=summary.global_model != "global",
        setup_rounds=summary.setup_rounds,
        versions=versions,
        variants={
            name: {k: v for k, v in variant.metrics.items() if v is not None}
            for name, variant in summary.last.variants.items()
        },
        classes=(scores.per_class if scores else None) or {},
        classes_by_client=_classes_by_client(clients.last.clients),
        series=series,
        setup_series=setup_series,
        notices=summary.notices,
        metric=main,
        better=summary.directions.get(main, "higher"),
    )


def _classes_by_client(reports: Mapping[str, ClientReport]) -> dict[str, dict[str, float]]:
    """The metrics of single classes of the model that each client would use, on its own test rows."""
    metrics = {name: report.own_test or report.test or {} for name, report in reports.items()}
    of_classes = {
        name: {k: v for k, v in each.items() if is_of_one_class(k) and v is not None} for name, each in metrics.items()
    }
    return {name: each for name, each in of_classes.items() if each}


def curves_by_round(rounds: Sequence[Round], main: str) -> dict[str, dict[int, float]]:
    """The main metric and the training loss by round; a measure that was not taken is empty."""
    curves: dict[str, dict[int, float]] = {m: {} for m in (*MEASURES, "loss")}
    for r in rounds:
        if r.loss is not None:
            curves["loss"][r.round] = r.loss
        if (at := (r.global_metrics or {}).get(main)) is not None:
            curves["global"][r.round] = at
        if client := r.client.get(main):
            curves["client"][r.round] = client.mean
        if (local := r.bench.get("local")) and main == "accuracy":
            curves["local"][r.round] = local.mean
    return curves


def _series(rounds: Sequence[Round]) -> tuple[dict[str, dict[int, float]], list[str]]:
    """Every series the method recorded, as the mean over nodes; and the names of those recorded during the set-up."""
    values: dict[str, dict[int, list[float]]] = {}
    for record in rounds:
        for point in record.series:
            values.setdefault(point.series, {}).setdefault(point.at, []).append(point.value)
    setup = [name for name in values if any(p.series == name for r in rounds if r.round == 0 for p in r.series)]
    return {name: {t: sum(v) / len(v) for t, v in points.items()} for name, points in values.items()}, setup


def skewed_accuracy(partition: Partition | None, reports: Mapping[str, ClientReport]) -> float | None:
    """The mean `local` accuracy of the clients with skewed labels; None if these are all clients or none.

    A client's labels are skewed if their entropy is below SKEWED of the entropy of all clients' labels together.
    """
    if partition is None or not partition.clients:
        return None
    counts = {name: np.asarray(rows, dtype=float) for name, rows in partition.clients.items()}
    pooled = _entropy(sum(counts.values(), np.zeros(1)))
    skewed = [name for name, rows in counts.items() if _entropy(rows) < SKEWED * pooled]
    local = [report.local for name in skewed if (report := reports.get(name)) and report.local is not None]
    return sum(local) / len(local) if local and len(skewed) < len(counts) else None


def _entropy(counts: NDArray[np.float64]) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def client_metric(report: ClientReport, metric: str) -> float | None:
    """A metric of the model a client would use: its own where it has one."""
    return (report.own_test or report.test or {}).get(metric)


def _cell(
    study: Study, cell: Cell, runs: Mapping[tuple[str, str], list[Run]], chosen: Mapping[tuple[str, str], Choice]
) -> CellResult:
    mine = {e.label: runs.get((cell.name, e.label), []) for e in study.entries}
    target, target_is = _target(study, cell, mine[study.reference])
    ecr = _ecr(study, mine)
    reference = {m: {r.seed: r.accuracy[m] for r in mine[study.reference] if m in r.accuracy} for m in COMPARED}
    values = {
        m: {label: {r.seed: r.accuracy[m] for r in some if m in r.accuracy} for label, some in mine.items()}
        for m in COMPARED
    }
    differences = {
        m: corrected({label: paired(v, reference[m]) for label, v in values[m].items() if label != study.reference})
        for m in COMPARED
    }
    lines = []
    for label, some in mine.items():
        curves = [(r.rising(study.measure), r.spent) for r in some]
        sign = 1 if all(r.better == "higher" for r in some) else -1
        lines.append(
            Line(
                label,
                some,
                {m: differences[m].get(label) for m in COMPARED},
                [] if target is None else [rounds_to_target(c, sign * target) for c, _ in curves],
                [] if target is None else [bytes_to_target(c, s, sign * target) for c, s in curves],
                ecr.get(label),
                chosen.get((cell.name, label)),
                _printed(study, cell, label),
            )
        )
    return CellResult(cell, target, target_is, lines)


def _target(study: Study, cell: Cell, reference: Sequence[Run]) -> tuple[float | None, str]:
    target = study.target_of(cell)
    if target is not None:
        return target, f"{100 * target:g} %"
    final = [r.accuracy[study.measure] for r in reference if study.measure in r.accuracy]
    if study.target != "reference" or not final:
        return None, "no target"
    mean = sum(final) / len(final)
    return mean, f"{study.reference}'s final {metric(reference[0].metric, mean)}"


def mean_curve(runs: Sequence[Run], measure: str) -> dict[int, float]:
    """The mean over seeds at the rounds that every run evaluated, from the six digits that results.json keeps."""
    curves = [r.rising(measure) for r in runs if r.curves[measure]]
    common = sorted(set.intersection(*map(set, curves))) if curves else []
    return {t: sum(round(c[t], 6) for c in curves) / len(curves) for t in common}


def _ecr(study: Study, mine: Mapping[str, Sequence[Run]]) -> dict[str, int | None]:
    """The paper's ECR of the mean curves over seeds. Without proposed methods, every method counts to its own maximum."""
    curves = {label: c for label, runs in mine.items() if (c := mean_curve(runs, study.measure))}
    proposed = {k: c for k, c in curves.items() if k in study.proposed}
    baselines = {k: c for k, c in curves.items() if k not in study.proposed}
    if not baselines:
        return {k: round_of_best(c) for k, c in curves.items()}
    setup = {k: max(r.setup_rounds for r in mine[k]) for k in proposed}
    return ecr_paper(baselines, proposed, setup).rounds


def _printed(study: Study, cell: Cell, label: str) -> dict[str, float]:
    """The paper's numbers for this method in this cell."""
    numbers = [n for n in study.paper.get("numbers", []) if n["method"] == label]
    fields = vars(study.experiment(cell, study.entry(label), study.seeds[0])) if numbers else {}
    for n in numbers:
        wanted = {k: v for k, v in n.items() if k not in ("method", "rounds_to", "std", *MEASURES)}
        if all(str(fields[k]) == str(v) for k, v in wanted.items()):
            return {k: float(n[k]) for k in (*MEASURES, "rounds_to", "std") if k in n}
    return {}
