"""Experiment trackers: TensorBoard, MLflow and Weights & Biases. A tracker that fails is left out; the run goes on.

A tracker of your own is any object with the four methods of `Tracker`; pass it to `Trackers`, and `Trackers.round` as `watch` to
`federate` or `Experiment.run`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, Self

from kilter.errors import Mistake, unknown
from kilter.records.run_folder import read_clients, read_rounds, read_summary
from kilter.records.toml_file import read_toml
from kilter.records.types import Clients, Round, Summary
from kilter.study.results import Results

ARTEFACTS = ("experiment.toml", "summary.json", "clients.json", "rounds.jsonl", "model.safetensors", "best.safetensors")
Settings = Mapping[str, object]


class Tracker(Protocol):
    """What a tracker does. Every method may raise: the run goes on without the tracker."""

    def start(self, name: str, settings: Settings) -> None:
        """A run begins, or resumes."""

    def round(self, number: int, metrics: Mapping[str, float]) -> None:
        """A round is done."""

    def finish(self, metrics: Mapping[str, float], files: Sequence[Path]) -> None:
        """The run is done: its results, those of every client, and its files."""

    def close(self) -> None:
        """The program ends, with or without a result."""


class TensorBoard:
    """Event files in RUN/tensorboard: `tensorboard --logdir runs`."""

    def __init__(self, folder: Path) -> None:
        self._writer = import_module("torch.utils.tensorboard").SummaryWriter(str(folder / "tensorboard"))
        self._last = 0

    def start(self, name: str, settings: Settings) -> None:
        text = "\n".join(f"    {key} = {value}" for key, value in flat(settings))
        self._writer.add_text("settings", text, 0)

    def round(self, number: int, metrics: Mapping[str, float]) -> None:
        self._last = number
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, number)

    def finish(self, metrics: Mapping[str, float], files: Sequence[Path]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, self._last)

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """A run of the experiment `kilter`, where MLFLOW_TRACKING_URI says; otherwise in ./mlruns."""

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions want a yes for ./mlruns
        mlflow = import_module("mlflow")
        self._metric, self._param = mlflow.entities.Metric, mlflow.entities.Param
        self._client = mlflow.MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", Path("mlruns").resolve().as_uri()))
        self._run = ""
        self._last = 0
        self._ended = False

    def start(self, name: str, settings: Settings) -> None:
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "kilter")
        known = self._client.get_experiment_by_name(experiment)
        where = known.experiment_id if known else self._client.create_experiment(experiment)
        self._run = self._client.create_run(where, run_name=name).info.run_id
        params = [self._param(key, str(value)[:500]) for key, value in flat(settings)]
        self._client.log_batch(self._run, params=params[:100])

    def round(self, number: int, metrics: Mapping[str, float]) -> None:
        self._last = number
        self._log(metrics)

    def _log(self, metrics: Mapping[str, float]) -> None:
        now = 0  # one time for all: the step is what counts
        values = [self._metric(key.replace("'", ""), value, now, self._last) for key, value in metrics.items()]
        for start in range(0, len(values), 1000):  # the most that a request may carry
            self._client.log_batch(self._run, metrics=values[start : start + 1000])

    def finish(self, metrics: Mapping[str, float], files: Sequence[Path]) -> None:
        self._log(metrics)
        for path in files:
            self._client.log_artifact(self._run, str(path))
        self._client.set_terminated(self._run)
        self._ended = True

    def close(self) -> None:
        if self._run and not self._ended:
            self._client.set_terminated(self._run, "KILLED")


class WandB:
    """A run of the project `kilter` (or WANDB_PROJECT). WANDB_MODE=offline keeps everything on this machine."""

    def __init__(self, folder: Path) -> None:
        self._wandb, self._folder = import_module("wandb"), folder
        self._last = 0

    def start(self, name: str, settings: Settings) -> None:
        project = os.environ.get("WANDB_PROJECT", "kilter")
        self._run = self._wandb.init(
            project=project, name=name, config=dict(flat(settings)), dir=str(self._folder), reinit="create_new"
        )

    def round(self, number: int, metrics: Mapping[str, float]) -> None:
        self._last = number
        self._run.log(dict(metrics), step=number)

    def finish(self, metrics: Mapping[str, float], files: Sequence[Path]) -> None:
        self._run.summary.update(dict(metrics))
        artefact = self._wandb.Artifact("run", type="run")
        for path in files:
            artefact.add_file(str(path))
        self._run.log_artifact(artefact)

    def close(self) -> None:
        if hasattr(self, "_run"):  # it started
            self._run.finish()


KINDS: dict[str, Callable[[Path], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}
PACKAGES = {"tensorboard": "tensorboard", "mlflow": "mlflow-skinny", "wandb": "wandb"}  # what to install


class Trackers:
    """Several trackers. One that fails is left out from then on, and `problems` says why."""

    def __init__(self, trackers: Mapping[str, Tracker], report: Callable[[str], None] = lambda text: None) -> None:
        self._trackers = dict(trackers)
        self._report = report
        self.problems: list[str] = []

    @staticmethod
    def of(names: str, folder: Path, report: Callable[[str], None] = lambda text: None) -> Trackers:
        """The trackers with these names, separated by commas."""
        return Trackers({name: KINDS[name](folder) for name in check_names(names)}, report)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._each("close", lambda tracker: tracker.close())

    def _each(self, what: str, action: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                action(tracker)
            except Exception as e:
                del self._trackers[name]
                words = str(e).strip().splitlines()
                problem = f"The tracker {name} failed and is left out ({what}): {type(e).__name__}: {words[0] if words else ''}"
                self.problems.append(problem)
                self._report(problem)

    def start(self, name: str, settings: Settings) -> None:
        self._each("start", lambda tracker: tracker.start(name, settings))

    def round(self, record: Round) -> None:
        """Log a round: metrics, loss, traffic, failures, and what the method records."""
        metrics = round_metrics(record)
        self._each(f"round {record.round}", lambda tracker: tracker.round(record.round, metrics))

    def finish(self, folder: Path) -> None:
        """Log the result of a run, with every client's metrics and the files of its folder."""
        metrics = dict(final_metrics(read_summary(folder), read_clients(folder)))
        files = [path for name in ARTEFACTS if (path := folder / name).exists()]
        self._each("finish", lambda tracker: tracker.finish(metrics, files))


def check_names(names: str) -> list[str]:
    """The names in a list with commas; each must be a tracker's, and its package must be installed."""
    wanted = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    for name in wanted:
        if name not in KINDS:
            raise unknown("tracker", name, KINDS)
        if find_spec(name) is None:
            raise Mistake(f"The tracker {name} needs a package: pip install {PACKAGES[name]}.")
    return wanted


def log_study(names: str, results: Results, path: Path) -> list[str]:
    """Log the finished runs of a study from their folders, each once; what failed."""
    problems: list[str] = []
    for cell in results.cells:
        for line in cell.lines:
            for run in line.runs:
                folder = path / "runs" / run.folder
                for name in check_names(names):
                    mark = folder / f".logged-{name}"
                    if not mark.exists():
                        failed = log_finished(name, folder, f"{cell.cell.name}, {line.label}, seed {run.seed}")
                        problems += failed
                        if failed:
                            return problems  # it would fail for every run
                        mark.touch()
    return problems


def log_finished(name: str, folder: Path, title: str) -> list[str]:
    """Log a finished run to one tracker, from its folder; what failed."""
    settings = read_toml(folder / "experiment.toml")
    trackers = Trackers.of(name, folder)
    with trackers:
        trackers.start(title, settings)
        for record in read_rounds(folder):
            trackers.round(record)
        trackers.finish(folder)
    return trackers.problems


def round_metrics(record: Round) -> dict[str, float]:
    """The numbers of a round by name."""
    values: dict[str, float | None] = {"train/loss": record.loss}
    values |= {f"global/{name}": value for name, value in (record.global_metrics or {}).items()}
    values |= {f"valid/{name}": value for name, value in (record.valid or {}).items()}
    for name, over in record.client.items():
        values |= {f"clients/{name}/{part}": getattr(over, part) for part in ("mean", "min", "max", "worst_decile")}
    for variant, metrics in record.variants.items():
        values |= {f"{variant}/{name}": value for name, value in metrics.items()}
    values |= {"traffic/up": record.bytes_up, "traffic/down": record.bytes_down, "failures": len(record.failures)}
    values |= {"seconds": record.seconds, "participants": len(record.participants)}
    series: dict[str, list[float]] = {}
    for point in record.series:
        series.setdefault(f"method/{point.series}", []).append(point.value)
    values |= {name: sum(points) / len(points) for name, points in series.items()}
    return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}


def final_metrics(summary: Summary, clients: Clients) -> Iterator[tuple[str, float]]:
    """The results of a run, and those of every client."""
    scores = summary.last.scores
    for name, value in (scores.metrics if scores else {}).items():
        if value is not None:
            yield f"final/global/{name}", value
    yield "final/traffic", float(summary.bytes_up + summary.bytes_down)
    yield "final/seconds", summary.seconds
    for client, report in clients.last.clients.items():
        for kind, metrics in (("received", report.test), ("own", report.own_test)):
            for name, value in (metrics or {}).items():
                if value is not None:
                    yield f"client/{client}/{kind}/{name}", value


def flat(settings: Settings, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Nested settings as pairs, `local.lr`."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
