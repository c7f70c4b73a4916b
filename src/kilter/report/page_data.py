"""What a report page shows: the results of studies, and the details of runs, read from their folders.

A study comes as its results.json, number for number. Single runs are grouped into one comparison of the same form. Details
(clients, confusion matrix, exhibits) come from run folders; a study gives those of one seed for each method in each cell.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kilter.errors import Mistake
from kilter.records.display import SHARES
from kilter.records.notices import describe
from kilter.records.run_folder import read_clients, read_partition, read_rounds, read_summary
from kilter.records.toml_file import read_toml
from kilter.records.types import ClientReport, Exhibit, Metrics, Round, Summary
from kilter.report.run_labels import distinguish
from kilter.study.results import curves_by_round
from kilter.study.statistics import mean_std, paired

MEASURES = ("global", "client", "local")
MOST_DETAILS = 60  # runs of one page that are shown in detail


@dataclass(frozen=True)
class ClientRow:
    """One client at the end of a run."""

    name: str
    n_test: int
    received: Metrics | None
    own: Metrics | None
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True)
class RunDetail:
    """Everything a page shows about one run."""

    folder: str
    cell: str
    label: str
    method: str
    seed: int
    settings: dict[str, object]
    rounds: int
    planned: int
    finished: bool
    seconds: float
    device: str
    topology: str
    global_model: str
    metric: str  # the one that curves and clients are about
    curves: dict[str, dict[int, float]]  # by measure, and the training loss
    spent: dict[int, tuple[int, int]]  # bytes up and down by round
    clients: list[ClientRow]
    partition: dict[str, list[int]]  # by client: rows of each class
    classes: list[str]
    confusion: list[list[int]] | None
    variants: dict[str, Metrics]
    phases: dict[str, float]  # seconds of training by step
    failures: list[tuple[int, str, str, str]]  # round, node, step, reason
    notices: list[str]
    notes: list[tuple[int, str, str]]  # round, node, sentence
    series: dict[str, dict[str, dict[int, float]]]  # by name and node: value by round
    listens: dict[int, dict[str, dict[str, float]]]  # by round: how much each node took of others' models
    exhibits: list[tuple[int, Exhibit]]


@dataclass(frozen=True)
class Comparison:
    """A study, or several single runs side by side. `lines` has the form of results.json."""

    name: str
    folder: str
    about: str
    reference: str
    seeds: list[int]
    lines: list[dict[str, object]]
    metric: str = "accuracy"
    in_percent: bool = True
    failures: list[dict[str, object]] = field(default_factory=list)
    origin: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class PageData:
    """The data of a page, as its script reads it."""

    comparisons: list[Comparison]
    runs: list[RunDetail]
    left_out: list[str] = field(default_factory=list)  # what is not shown, and why


def collect(paths: Sequence[Path]) -> PageData:
    """Read studies and runs. A folder that is neither is searched for them."""
    studies, runs = _find(paths)
    comparisons, details, left_out = [], [], []
    for folder in studies:
        comparison, shown, unread = _study(folder)
        comparisons.append(comparison)
        details += shown
        left_out += unread
    singles = []
    for folder in runs:
        try:
            singles.append(read_detail(folder))
        except Mistake as e:
            left_out.append(str(e))
    if singles:
        singles = _labelled(singles)
        comparisons += _compare(singles)
        details += singles
    if not comparisons:
        raise Mistake(left_out[0] if left_out else "No runs to report on: name run folders or study folders.")
    if len(details) > MOST_DETAILS:
        left_out.append(f"Details of {len(details) - MOST_DETAILS} runs: the page shows those of {MOST_DETAILS}.")
    return PageData(comparisons, details[:MOST_DETAILS], left_out)


def is_study(folder: Path) -> bool:
    return (folder / "results.json").is_file()


def is_run(folder: Path) -> bool:
    return (folder / "experiment.toml").is_file() or (folder / "summary.json").is_file()


def _find(paths: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Study folders and run folders at or below these paths."""
    studies: list[Path] = []
    runs: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise Mistake(f"'{path}' is not a folder: name run folders or study folders.")
        before = len(studies) + len(runs)
        _search(path, studies, runs, depth=3)
        if len(studies) + len(runs) == before:
            raise Mistake(f"'{path}' holds neither a run nor the results of a study.")
    return studies, runs


def _search(path: Path, studies: list[Path], runs: list[Path], depth: int) -> None:
    if is_study(path):
        studies.append(path)
    elif is_run(path):
        runs.append(path)
    elif depth:
        for child in sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith(".")):
            _search(child, studies, runs, depth - 1)


# A study ------------------------------------------------------------------------------------------------------------


def _study(folder: Path) -> tuple[Comparison, list[RunDetail], list[str]]:
    try:
        results = json.loads((folder / "results.json").read_text())
        study = _read_if_present(folder / "study.toml")
        lines = [_with_round_numbers(line) for line in results["lines"]]
        comparison = Comparison(
            name=str(results["study"]),
            folder=str(folder),
            about=str(study.get("about", "")).strip(),
            reference=str(results["reference"]),
            seeds=list(results["seeds"]),
            lines=lines,
            metric=str(results.get("metric", "accuracy")),
            in_percent=str(results.get("metric", "accuracy")) in SHARES,
            failures=list(results.get("failures", [])),
            origin={
                k: results[k] for k in ("command", "preset", "commit", "date", "versions", "machine", "runs", "minutes")
            },
        )
    except (OSError, ValueError, LookupError, TypeError):
        raise Mistake(
            f"'{folder}' has a results.json that cannot be read: repeat the study to write it again."
        ) from None
    details, left_out = [], []
    for line in results["lines"]:
        for run in line["runs"][:1]:
            path = folder / "runs" / run["folder"]
            if not is_run(path):
                continue
            try:
                details.append(read_detail(path, cell=line["cell"], label=line["method"]))
            except Mistake as e:
                left_out.append(str(e))
    if not details:
        left_out.append(f"Clients, confusion matrices and what the methods do in '{folder}': its runs are not here.")
    return comparison, details, left_out


def _with_round_numbers(line: Mapping[str, object]) -> dict[str, object]:
    """A line of results.json without what no chart draws."""
    runs = line["runs"]
    assert isinstance(runs, list)
    wanted = ("seed", "accuracy", "curves", "spent", "clients", "worst", "failures", "notices", "own_models", "series")
    short = [{k: run[k] for k in wanted if k in run} for run in runs]
    for run in short:
        run["curves"] = {k: v for k, v in run["curves"].items() if v}
    return {**line, "runs": short}


# A run --------------------------------------------------------------------------------------------------------------


def read_detail(folder: Path, cell: str = "", label: str = "") -> RunDetail:
    """The details of a run, finished or not."""
    rounds = read_rounds(folder)
    summary = read_summary(folder) if (folder / "summary.json").exists() else None
    settings = _read_if_present(folder / "experiment.toml")
    partition = read_partition(folder)
    scores = summary.last.scores if summary else None
    metric = summary.chosen_by if summary else main_metric(rounds)
    method = str(settings.get("method", summary.method if summary else folder.name))
    words = [str(settings[k]) for k in ("data", "partition") if k in settings]
    return RunDetail(
        folder=str(folder),
        cell=cell or ", ".join([*words, *([metric] if metric != "accuracy" else [])]) or "runs",
        label=label or method,
        method=method,
        seed=_number(settings.get("seed", summary.seed if summary else 0)),
        settings=settings,
        rounds=max((r.round for r in rounds), default=0),
        planned=_number(settings.get("rounds", summary.rounds if summary else 0)),
        finished=summary is not None,
        seconds=summary.seconds if summary else sum(r.seconds for r in rounds),
        device=summary.device if summary else "",
        topology=summary.topology if summary else str(settings.get("topology", "")),
        global_model=summary.global_model if summary else "global",
        metric=metric,
        curves=curves(rounds, metric),
        spent={r.round: (r.bytes_up, r.bytes_down) for r in rounds},
        clients=_clients(folder, rounds) if summary else [],
        partition=partition.clients if partition else {},
        classes=(partition.classes if partition else []) or [],
        confusion=scores.confusion if scores else None,
        variants={name: s.metrics for name, s in summary.last.variants.items()} if summary else {},
        phases=_phases(rounds),
        failures=[(r.round, f.node, f.step, f.reason) for r in rounds for f in r.failures][:500],
        notices=_notices(summary, rounds),
        notes=[(r.round, n.node, n.text) for r in rounds for n in r.notes][:400],
        series=_series(rounds, metric),
        listens={r.round: r.listens for r in rounds if r.listens},
        exhibits=_exhibits(rounds),
    )


def _read_if_present(path: Path) -> dict[str, object]:
    return read_toml(path) if path.exists() else {}


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def main_metric(rounds: Sequence[Round]) -> str:
    """The metric to show of a run that is not finished: accuracy, or the first that it records."""
    names = [name for r in rounds for name in (r.global_metrics or r.client)]
    return "accuracy" if "accuracy" in names or not names else names[0]


def curves(rounds: Sequence[Round], metric: str) -> dict[str, dict[int, float]]:
    """The main metric and the training loss by round, rounded to what a page can show."""
    lines = curves_by_round(rounds, metric)
    return {name: {at: round(value, 6) for at, value in line.items()} for name, line in lines.items() if line}


def _clients(folder: Path, rounds: Sequence[Round]) -> list[ClientRow]:
    reports = read_clients(folder).last.clients
    up: dict[str, int] = {}
    down: dict[str, int] = {}
    for record in rounds:
        for node, (sent, received) in record.bytes_by_node.items():
            up[node], down[node] = up.get(node, 0) + sent, down.get(node, 0) + received
    return [_client(name, report, up.get(name, 0), down.get(name, 0)) for name, report in reports.items()]


def _client(name: str, report: ClientReport, up: int, down: int) -> ClientRow:
    return ClientRow(name, report.n_test, report.test, report.own_test, up, down)


def _phases(rounds: Sequence[Round]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for record in rounds:
        for step, spent in record.fit_seconds.items():
            seconds[step] = round(seconds.get(step, 0.0) + spent, 3)
    return seconds


def _notices(summary: Summary | None, rounds: Sequence[Round]) -> list[str]:
    if summary:
        return [describe(notice) for notice in summary.notices]
    return list(dict.fromkeys(n.what for r in rounds for n in r.notices))


def _series(rounds: Sequence[Round], metric: str) -> dict[str, dict[str, dict[int, float]]]:
    """What the method records, and the main metric of each client."""
    lines: dict[str, dict[str, dict[int, float]]] = {}
    for record in rounds:
        for node, value in record.by_client.items():
            lines.setdefault(f"{metric} at each client", {}).setdefault(node, {})[record.round] = round(value, 4)
        for point in record.series:
            lines.setdefault(point.series, {}).setdefault(point.node, {})[point.at] = round(point.value, 6)
    return lines


def _exhibits(rounds: Sequence[Round]) -> list[tuple[int, Exhibit]]:
    """Values by name of every round, and of each node the latest rows and pictures."""
    latest: dict[tuple[str, str], tuple[int, Exhibit]] = {}
    values = []
    for record in rounds:
        for exhibit in record.exhibits:
            if exhibit.values is not None:
                values.append((record.round, exhibit))
            else:
                latest[exhibit.name, exhibit.node] = record.round, exhibit
    return [*values, *latest.values()]


# Single runs side by side -------------------------------------------------------------------------------------------


def _labelled(runs: Sequence[RunDetail]) -> list[RunDetail]:
    """The runs, with labels that tell runs of one method with other settings apart."""
    labels: dict[str, str] = {}  # by folder
    for key in dict.fromkeys((r.cell, r.method) for r in runs):
        group = [r for r in runs if (r.cell, r.method) == key]
        labels |= dict(zip((r.folder for r in group), distinguish(key[1], [r.settings for r in group]), strict=True))
    return [replace(r, label=labels[r.folder]) for r in runs]


def _compare(runs: Sequence[RunDetail]) -> list[Comparison]:
    """Single runs, compared by their metric: an accuracy and an error do not belong into one table."""
    metrics = list(dict.fromkeys(r.metric for r in runs))
    name = "runs" if len(metrics) == 1 else "runs by {}"
    return [_compare_by(name.format(metric), [r for r in runs if r.metric == metric]) for metric in metrics]


def _compare_by(name: str, runs: Sequence[RunDetail]) -> Comparison:
    """Single runs as the lines of a comparison: a line for each method in each cell, over seeds. All have the same metric."""
    labels = list(dict.fromkeys(r.label for r in runs))
    reference = next((r.label for r in runs if r.method == "fedavg"), labels[0])
    groups: dict[tuple[str, str], list[RunDetail]] = {}
    for run in runs:
        groups.setdefault((run.cell, run.label), []).append(run)
    lines = [
        _line(cell, label, some, groups.get((cell, reference), []) if label != reference else [])
        for (cell, label), some in groups.items()
    ]
    seeds, metric = sorted({r.seed for r in runs}), runs[0].metric
    return Comparison(name, "", "", reference, seeds, lines, metric, metric in SHARES)


def _line(cell: str, label: str, runs: Sequence[RunDetail], reference: Sequence[RunDetail]) -> dict[str, object]:
    line: dict[str, object] = {"cell": cell, "method": label, "seeds": len({r.seed for r in runs})}
    for measure in MEASURES:
        values, others = _last(runs, measure), _last(reference, measure)
        mean, std = mean_std(list(values.values())) if values else (None, None)
        line |= {f"{measure}_mean": mean, f"{measure}_std": std}
        difference = paired(values, others) if others else None
        if difference:
            keys = {"mean": "", "low": "_low", "high": "_high", "p": "_p", "verdict": "_verdict"}
            line |= {f"{measure}_difference{end}": getattr(difference, name) for name, end in keys.items()}
    line["bytes"] = sum(sum(map(sum, r.spent.values())) for r in runs) / len(runs)
    line["seconds"] = sum(r.seconds for r in runs) / len(runs)
    line["runs"] = [_run(r) for r in runs]
    return line


def _last(runs: Sequence[RunDetail], measure: str) -> dict[int, float]:
    """Accuracy by seed at the last evaluated round."""
    return {r.seed: r.curves[measure][max(r.curves[measure])] for r in runs if r.curves.get(measure)}


def _run(run: RunDetail) -> dict[str, object]:
    return {
        "seed": run.seed,
        "accuracy": {m: c[max(c)] for m, c in run.curves.items() if m in MEASURES},
        "curves": run.curves,
        "spent": {t: up + down for t, (up, down) in run.spent.items()},
        "clients": [a for c in run.clients if (a := (c.own or c.received or {}).get(run.metric)) is not None],
        "failures": len(run.failures),
        "own_models": run.global_model != "global",
    }
