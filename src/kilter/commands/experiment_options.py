"""Options that several commands share. Those of a run are generated from the fields of Experiment and of the optimisers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from kilter.errors import Mistake, unknown
from kilter.options import PACKAGE, Setting, read_classes

if TYPE_CHECKING:
    from kilter.experiment import Experiment, MakeSimulation

stdout = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)

OPTIMISERS = ("SGD", "Adam", "TorchOptimiser")
Command = Callable[..., None]
Set = Annotated[list[str] | None, typer.Option("--set", help="A setting of the method, NAME=VALUE; may be repeated.")]
Out = Annotated[str, typer.Option(help="The run folder; default runs/METHOD-DATA-SEED.", show_default=False)]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print only one line with the result, and what did not happen.")]
Log = Annotated[str, typer.Option(help="Trackers to log to: tensorboard, mlflow, wandb, or several with commas.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Workers = Annotated[str, typer.Option(help="Number of worker processes; auto: as many as prove fastest.")]
RuntimeName = Annotated[str, typer.Option("--runtime", help="Where steps run: simulation (this machine) or ray.")]
RayAddress = Annotated[str, typer.Option(help="The Ray cluster, HOST:PORT; default: this machine.", show_default=False)]


@contextmanager
def stops_with(advice: str) -> Iterator[None]:
    """Ctrl-C inside this block ends the command with this advice and exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        stderr.print(f"Stopped. {advice}", markup=False, soft_wrap=True)
        raise typer.Exit(130) from None


def print_json(value: object) -> None:
    """Print a value as JSON, for other programs."""
    import json

    typer.echo(json.dumps(value, indent=2, default=str))


def run_settings() -> dict[str, Setting]:
    """The settings of a run that are options of the command line, by name."""
    optimisers = read_classes(PACKAGE / "train.py")
    classes = [read_classes(PACKAGE / "experiment.py")["Experiment"], *(optimisers[name] for name in OPTIMISERS)]
    settings: dict[str, Setting] = {}
    for source in classes:
        settings |= {name: setting for name, setting in source.settings.items() if name not in settings}
    return {name: setting for name, setting in settings.items() if name not in ("settings", "local", "name")}


def experiment_options(
    command: Command, only: Collection[str] | None = None, leave_out: Collection[str] = ()
) -> Command:
    """Give a command one option for every setting of a run, or `only` for these, with its type, default and help text."""
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    wanted = [s for name, s in run_settings().items() if (only is None or name in only) and name not in leave_out]
    parameters = [*own, *map(_parameter, wanted)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _parameter(setting: Setting) -> inspect.Parameter:
    text = setting.option.help
    if setting.choices:
        text = f"{text.removesuffix('.')} ({', '.join(filter(None, setting.choices))})."
    if setting.default not in ("", False):
        text = f"{text} Default: {setting.default}."
    option = typer.Option(f"--{setting.name.replace('_', '-')}", help=text, show_default=False)
    # The default None means "not given": a value in a file is only overridden by one that was typed.
    return inspect.Parameter(
        setting.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[type(setting.default) | None, option],
    )


def assemble(file: Path | None, pairs: list[str] | None, options: Mapping[str, Any]) -> Experiment:
    """An experiment from a file and from options; options win."""
    from dataclasses import fields

    from kilter.experiment import Experiment
    from kilter.records.toml_file import read_toml
    from kilter.train import plan_class

    values: dict[str, Any] = dict(read_toml(file)) if file else {}
    typed = typed_options(options)
    plan = plan_class(typed.get("optimiser", values.get("optimiser", "sgd")))
    planned = {f.name for f in fields(plan)}
    names = {f.name for f in fields(Experiment)}
    for name in typed:
        if name not in names and name not in planned:
            raise Mistake(f"--{name.replace('_', '-')} is not an option of this optimiser: see --optimiser.")
    values["local"] = _merged(values, "local", {k: v for k, v in typed.items() if k in planned})
    values["settings"] = _merged(values, "settings", dict(name_and_value(text) for text in pairs or []))
    return Experiment.of({**values, **{k: v for k, v in typed.items() if k in names}})


def typed_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were typed."""
    return {name: value for name, value in options.items() if value is not None}


def _merged(values: Mapping[str, Any], name: str, typed: Mapping[str, Any]) -> dict[str, Any]:
    table = values.get(name, {})
    if not isinstance(table, Mapping):
        raise Mistake(f"{name} of the experiment is a table of fields, not {table!r}: write a section [{name}].")
    return {**table, **typed}


def name_and_value(text: str) -> tuple[str, str]:
    """NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise Mistake(f"--set takes NAME=VALUE, such as mu=0.1, not '{text}'.")
    return name.strip(), value.strip()


def ray_cluster(runtime: str, address: str) -> MakeSimulation | None:
    """How to simulate on Ray; None: on this machine without Ray."""
    if runtime not in ("simulation", "ray"):
        raise unknown("runtime", runtime, ["simulation", "ray"])
    if address and runtime != "ray":
        raise Mistake("--ray-address is the address of a Ray cluster: add --runtime ray.")
    if runtime == "simulation":
        return None
    from kilter.runtimes.ray import simulate_at

    return simulate_at(address)


def worker_count(text: str) -> int | Literal["auto"]:
    """The number of worker processes, or auto."""
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise Mistake(f"--workers takes a number of processes or auto, not '{text}'.")
    return int(text)
