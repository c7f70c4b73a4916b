"""kilter run and kilter resume."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kilter.commands.experiment_options import (
    Log,
    Out,
    Quiet,
    RayAddress,
    RuntimeName,
    Set,
    Workers,
    assemble,
    experiment_options,
    ray_cluster,
    stderr,
    stdout,
    stops_with,
    worker_count,
)
from kilter.errors import Mistake

if TYPE_CHECKING:
    from kilter.core import Method
    from kilter.data import Dataset
    from kilter.experiment import Experiment
    from kilter.records.run_folder import Store
    from kilter.records.types import Round
    from kilter.runtimes.base import Runtime


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(experiment_options(run))
    app.command()(resume)


def run(
    file: Annotated[
        Path | None, typer.Argument(help="An experiment file; options on the command line win.", show_default=False)
    ] = None,
    settings: Set = None,
    out: Out = "",
    workers: Workers = "auto",
    runtime: RuntimeName = "simulation",
    ray_address: RayAddress = "",
    log: Log = "",
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Run one experiment. Its folder holds everything needed to read, repeat and resume it."""
    from kilter.records.run_folder import Store, write
    from kilter.report.choices import choices

    stdout.quiet = quiet
    _check_trackers(log)
    experiment = assemble(file, settings, options)
    name = Path(experiment.method.split(":")[0]).stem
    folder = Path(out or f"runs/{name}-{Path(experiment.data).stem}-{experiment.seed}")
    _refuse_used(folder)
    # Bad data is refused before a folder is created.
    datasets: list[Dataset] = []
    method, fed = experiment.build(worker_count(workers), ray_cluster(runtime, ray_address), datasets.append)
    with fed:
        fed.bind(method)
        store = Store(folder)
        write(folder / "experiment.toml", experiment.write())
        for line in choices(experiment, datasets[0]):
            stdout.print(line, markup=False, soft_wrap=True)
        _show_table(datasets[0], folder)
        _run_to_the_end(experiment, method, fed, store, log)


def _show_table(dataset: Dataset, folder: Path) -> None:
    """Say how a table is prepared, and write its schema and preparation into the run folder."""
    from kilter.data.explain import explain
    from kilter.data.preparation import FILE as PREPARATION_FILE
    from kilter.records.run_folder import write

    for note in dataset.notes:
        stdout.print(note, markup=False, soft_wrap=True)
    if dataset.schema is None or dataset.preparation is None:
        return
    write(folder / "schema.toml", dataset.schema.text())
    write(folder / PREPARATION_FILE, dataset.preparation.text())
    for line in explain(dataset.preparation, dataset.client_source):
        stdout.print(line, markup=False, soft_wrap=True)


def _check_trackers(log: str) -> None:
    """Refuse an unknown or missing tracker before anything is written."""
    if log:
        from kilter.report.trackers import check_names

        check_names(log)


def _refuse_used(folder: Path) -> None:
    if (folder / "summary.json").exists():
        raise Mistake(f"'{folder}' already holds a finished run: choose another --out.")
    if (folder / "experiment.toml").exists():
        raise Mistake(
            f"'{folder}' already holds a run: continue it with `kilter resume {folder}`, or choose another --out."
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Mistake(f"'{folder}' exists and is not a run folder: choose another --out.")


def resume(
    folder: Annotated[Path, typer.Argument(help="A run folder.")],
    rounds: Annotated[
        int | None, typer.Option(help="Extend the run to this many rounds in all.", show_default=False, min=1)
    ] = None,
    workers: Workers = "auto",
    runtime: RuntimeName = "simulation",
    ray_address: RayAddress = "",
    log: Log = "",
) -> None:
    """Resume a stopped run, or extend a finished one. The result is identical to that of an uninterrupted run."""
    from kilter.experiment import Experiment
    from kilter.records.run_folder import Store
    from kilter.report.result import result_table

    if not (folder / "experiment.toml").is_file():
        raise Mistake(f"'{folder}' is not a run folder: it has no experiment.toml.")
    _check_trackers(log)
    experiment = Experiment.read(folder / "experiment.toml")
    if rounds:
        experiment = replace(experiment, rounds=rounds)
    store = Store(folder)
    if (folder / "summary.json").exists() and not rounds:
        stdout.print(result_table(folder))
        stdout.print("This run is finished. Extend it with --rounds.")
        return
    method, fed = experiment.build(worker_count(workers), ray_cluster(runtime, ray_address))
    with fed:
        _run_to_the_end(experiment, method, fed, store, log, extend=rounds is not None)


def _run_to_the_end(
    experiment: Experiment, method: Method, fed: Runtime, store: Store, log: str = "", extend: bool = False
) -> None:
    """Run all rounds, show progress and log it, or stop cleanly and say how to resume."""
    from kilter.federate import NothingTrained
    from kilter.records.run_folder import read_summary
    from kilter.report.progress import Progress
    from kilter.report.result import show_briefly, show_notices, show_result
    from kilter.report.trackers import Trackers
    from kilter.runtimes.devices import describe
    from kilter.runtimes.interrupts import stoppable

    stdout.print(f"Device: {describe(fed.devices)}", markup=False)
    trackers = Trackers.of(log, store.folder, lambda text: stderr.print(text, markup=False, soft_wrap=True))
    rounds = 0
    try:
        with (
            stops_with(f"Resume with: kilter resume {store.folder}"),
            trackers,
            stoppable(),
            Progress(experiment.rounds, stdout, method.task.main) as progress,
        ):

            def watch(record: Round) -> None:
                nonlocal rounds
                rounds += 1
                progress.see(record)
                trackers.round(record)

            trackers.start(store.folder.name, asdict(experiment))
            experiment.run(method, fed, store, watch, extend=extend)
            trackers.finish(store.folder)
    except NothingTrained:
        show_notices(read_summary(store.folder), stderr)
        raise
    except Mistake as e:
        if not rounds:  # nothing was done that could be continued
            raise
        raise Mistake(
            f"{e} (the run is in '{store.folder}'; `kilter resume {store.folder}` continues from its last checkpoint)"
        ) from None
    if stdout.quiet:
        stdout.quiet = False
        show_briefly(store.folder, stdout)
    else:
        show_result(store.folder, stdout)
    for problem in trackers.problems:
        stdout.print(problem, markup=False, soft_wrap=True)
