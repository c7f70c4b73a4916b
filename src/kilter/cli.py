"""The command line. Options come from the dataclass fields of Experiment and the optimiser; nothing is typed twice."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from kilter import __version__
from kilter.commands import network as net_commands
from kilter.commands import study as study_commands
from kilter.core import Method
from kilter.data import DATASETS, PARTITIONS
from kilter.errors import Mistake, unknown
from kilter.experiment import PLANS, Experiment
from kilter.methods import methods as all_methods
from kilter.models import MODELS
from kilter.options import choices, declaration, default
from kilter.records.run_folder import Store, write
from kilter.report.progress import Progress
from kilter.report.result import result_table, show_result
from kilter.runtimes.interrupts import stoppable
from kilter.topology import TOPOLOGIES

app = typer.Typer(
    name="kilter",
    help="Federated learning for data that is off kilter.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

Set = Annotated[list[str] | None, typer.Option("--set", help="a setting of the method, NAME=VALUE; may be repeated")]
Out = Annotated[str, typer.Option(help="the run folder; default runs/METHOD-DATA-SEED", show_default=False)]
Workers = Annotated[str, typer.Option(help="processes to train in; auto: as many as prove fastest")]

Where = Annotated[str, typer.Option("--runtime", help="where steps run: simulation (on this machine) or ray")]
RayAddress = Annotated[str, typer.Option(help="the Ray cluster, HOST:PORT; default: this machine", show_default=False)]


def cluster(runtime: str, address: str) -> str | None:
    """The address of the Ray cluster; None for this machine alone."""
    if runtime not in ("simulation", "ray"):
        raise unknown("runtime", runtime, ["simulation", "ray"])
    if address and runtime != "ray":
        raise Mistake("--ray-address is the address of a Ray cluster: give --runtime ray too.")
    return address if runtime == "ray" else None


def worker_count(text: str) -> int | Literal["auto"]:
    """How many processes: a number, or auto."""
    if text == "auto":
        return "auto"
    if not text.isdigit() or int(text) < 1:
        raise Mistake(f"--workers takes a number of processes or auto, not '{text}'.")
    return int(text)


def experiment_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for every field of Experiment and of the optimisers, by name, type, default and comment."""
    found: dict[str, inspect.Parameter] = {}
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    kinds: list[Any] = [Experiment, *PLANS.values()]
    for kind in kinds:
        for f in fields(kind):
            if f.name in ("settings", "local") or f.name in found:
                continue
            like = default(f)
            text = declaration(f).help + (f" ({', '.join(choices(f))})" if choices(f) else "")
            flag = f"--{f.name.replace('_', '-')}"
            option = typer.Option(flag, help=text, show_default=str(like) if like != "" else False)
            # None tells "not given", so that a file's values are only overridden by what was typed
            found[f.name] = inspect.Parameter(
                f.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[type(like) | None, option]
            )
    command.__signature__ = inspect.Signature([*own, *found.values()])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in [*own, *found.values()]}
    return command


def assemble(file: Path | None, settings: list[str] | None, given: Mapping[str, Any]) -> Experiment:
    """An experiment from a file and what was typed; what was typed wins."""
    from kilter.experiment import read_toml

    values: dict[str, Any] = dict(read_toml(file)) if file else {}
    typed = {k: v for k, v in given.items() if v is not None}
    plan = PLANS.get(typed.get("optimiser", values.get("optimiser", "sgd")), PLANS["sgd"])
    planned = {f.name for f in fields(plan)}
    names = {f.name for f in fields(Experiment)}
    foreign = [k for k in typed if k not in names and k not in planned]
    if foreign:
        raise Mistake(
            f"--{foreign[0].replace('_', '-')} does not go with this optimiser: choose another with --optimiser."
        )
    values["local"] = {**values.get("local", {}), **{k: v for k, v in typed.items() if k in planned}}
    values["settings"] = {**values.get("settings", {}), **dict(pair(s) for s in settings or [])}
    return Experiment.of({**values, **{k: v for k, v in typed.items() if k in names}})


def pair(text: str) -> tuple[str, str]:
    """NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise Mistake(f"--set takes NAME=VALUE, such as mu=0.1, not '{text}'.")
    return name.strip(), value.strip()


def listing(title: str, entries: Mapping[str, str]) -> None:
    table = Table(
        "name", "what it is", title=title, title_justify="left", box=None, header_style="bold", pad_edge=False
    )
    for name, text in entries.items():
        table.add_row(name, text)
    out.print(table)


@app.command()
def methods(
    measure: Annotated[
        bool, typer.Option("--measure", help="run two small rounds of each and say what they sent")
    ] = False,
) -> None:
    """The methods: their papers, what a client keeps, what leaves it, where they run, their settings."""
    from kilter.report.methods import table

    out.print(table(all_methods(), measure))
    if not measure:
        out.print("What each sends, measured against FedAvg: kilter methods --measure.")


@app.command()
def datasets() -> None:
    """The data sets that can be loaded by name."""
    listing("A name below, or a .npz, .csv or folder of your own.", DATASETS)


@app.command()
def models() -> None:
    """The networks, with their options."""
    listing("A name below, or my_model.py:Net.", MODELS)


@app.command()
def partitions() -> None:
    """The rules that divide data among clients, with their parameters."""
    listing("Parameters follow the name after colons: dirichlet:0.1.", PARTITIONS)


@app.command()
def topologies() -> None:
    """Who writes to whom, and who aggregates."""
    listing("Parameters follow the name after colons: regular:4.", TOPOLOGIES)


@app.command()
@experiment_options
def show(
    picture: Annotated[Path, typer.Option(help="where the picture goes (.png or .svg)")] = Path("skew.png"),
    federated: Annotated[
        bool, typer.Option("--federated", help="only from the label counts each client sends")
    ] = False,
    epsilon: Annotated[float, typer.Option(help="with --federated: privacy of Laplace noise on the counts")] = 0.0,
    **given: Any,
) -> None:
    """How a partition skews the data: in the terminal and as a picture."""
    from kilter.report.federated_skew import census
    from kilter.report.skew_picture import draw, table

    if epsilon and not federated:
        raise Mistake("--epsilon puts noise on the counts clients send: give --federated too.")
    split = assemble(None, None, given).split()
    skew, cells, spent = census(split, epsilon) if federated else (None, None, 0)
    out.print(table(split, skew, cells))
    if federated:
        out.print(f"From the label counts that clients sent, {spent:,} bytes in all; no label left a client.")
    if epsilon:
        out.print(
            f"Every count bears Laplace noise of scale {1 / epsilon:g}: epsilon = {epsilon:g} for one row more or less. "
            "Asking again spends as much again."
        )
    draw(split, picture, cells)
    out.print(f"Picture: {picture}")


@app.command()
@experiment_options
def run(
    file: Annotated[
        Path | None, typer.Argument(help="an experiment file; options typed beside it win", show_default=False)
    ] = None,
    settings: Set = None,
    out: Out = "",
    workers: Workers = "auto",
    runtime: Where = "simulation",
    ray_address: RayAddress = "",
    **given: Any,
) -> None:
    """Run one experiment; its folder holds everything to read, repeat and resume it."""
    experiment = assemble(file, settings, given)
    kind = Path(experiment.method.split(":")[0]).stem
    folder = Path(out or f"runs/{kind}-{Path(experiment.data).stem}-{experiment.seed}")
    if (folder / "summary.json").exists():
        raise Mistake(f"'{folder}' already holds a finished run: choose another --out.")
    if (folder / "experiment.toml").exists():
        raise Mistake(
            f"'{folder}' already holds a run: continue it with `kilter resume {folder}`, or choose another --out."
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Mistake(f"'{folder}' exists and is not a run folder: choose another --out.")
    # bad data is refused before a folder is made
    method, fed = experiment.build(worker_count(workers), cluster(runtime, ray_address))
    with fed:
        fed.bind(method)
        store = Store(folder)
        write(folder / "experiment.toml", experiment.write())
        carry_out(experiment, method, fed, store)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="a run folder")],
    workers: Workers = "auto",
    runtime: Where = "simulation",
    ray_address: RayAddress = "",
) -> None:
    """Go on with a run that was stopped; it ends as if it had not been."""
    if not (folder / "experiment.toml").is_file():
        raise Mistake(f"'{folder}' is not a run folder: it has no experiment.toml.")
    experiment = Experiment.read(folder / "experiment.toml")
    store = Store(folder)
    if (folder / "summary.json").exists():
        out.print(result_table(folder))
        out.print("This run is finished.")
        return
    method, fed = experiment.build(worker_count(workers), cluster(runtime, ray_address))
    with fed:
        carry_out(experiment, method, fed, store)


def carry_out(experiment: Experiment, method: Method, fed: Any, store: Store) -> None:
    """Run to the end with progress shown, or stop cleanly and say how to go on."""
    try:
        with stoppable(), Progress(experiment.rounds, out) as progress:
            experiment.run(method, fed, store, progress.see)
    except KeyboardInterrupt:
        err.print(f"Stopped. Go on with: kilter resume {store.folder}")
        raise typer.Exit(130) from None
    except Mistake as e:
        raise Mistake(
            f"{e} (the run is in '{store.folder}'; `kilter resume {store.folder}` goes on from its last checkpoint)"
        ) from None
    show_result(store.folder, out)


@app.command()
def trust(folder: Annotated[Path, typer.Argument(help="a run folder")]) -> None:
    """Who listens to whom in a run, as pictures: a graph, a matrix by round, uncertainty and list size by round."""
    from kilter.report.trust import draw_or_refuse

    for path in draw_or_refuse(folder):
        out.print(f"{path}", soft_wrap=True)


study_commands.add_to(app, experiment_options)


@app.command()
def version() -> None:
    """The version."""
    out.print(__version__)


net_commands.register(app)


def main() -> None:
    """Entry point: a user's mistake is one sentence and exit code 2, never a traceback."""
    try:
        app()
    except Mistake as e:
        err.print(f"kilter: {e}", markup=False, soft_wrap=True)
        sys.exit(2)
    except BrokenPipeError:  # `kilter methods | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:
        err.print("Stopped.")
        sys.exit(130)
