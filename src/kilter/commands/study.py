"""kilter compare, reproduce and demo."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kilter.commands.experiment_options import Log, experiment_options, stdout, stops_with
from kilter.errors import Mistake, unknown

if TYPE_CHECKING:
    from kilter.study.grid import Study
    from kilter.study.results import Results

LISTS = ("data", "partition", "topology", "model")  # options that may name several, with commas
Jobs = Annotated[str, typer.Option(help="Runs at once. auto: one for each core.")]
Preset = Annotated[str, typer.Option(help="One of the study's presets.", show_default=False)]
Plain = str | bool | int | float  # a value that was typed


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(experiment_options(compare, leave_out=("method", "seed")))
    app.command()(reproduce)
    app.command()(demo)


def compare(
    file: Annotated[
        Path | None, typer.Argument(help="A study file. Typed options win over it.", show_default=False)
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Names, separated by commas; settings follow after colons: fedprox:mu=0.1.", show_default=False
        ),
    ] = "",
    seeds: Annotated[str, typer.Option(help="How many seeds, or which: 0,1,2. Default: 5.", show_default=False)] = "",
    reference: Annotated[
        str, typer.Option(help="The method to compare with. Default: the first.", show_default=False)
    ] = "",
    target: Annotated[
        str, typer.Option(help="The accuracy to reach, or: reference (the default).", show_default=False)
    ] = "",
    measure: Annotated[
        str,
        typer.Option(
            help="The accuracy that the target is about: global (the default), client or local.", show_default=False
        ),
    ] = "",
    tune: Annotated[
        list[str] | None,
        typer.Option(help="Values to try, NAME=V1,V2,...; chosen on validation rows. May be repeated."),
    ] = None,
    preset: Preset = "",
    out: Annotated[str, typer.Option(help="The study's folder. Default: studies/NAME.", show_default=False)] = "",
    jobs: Jobs = "auto",
    log: Log = "",
    **fields: Any,
) -> None:
    """Compare methods over seeds: a grid of runs, then tables. Data, partition, topology and model may be lists: a,b."""
    from kilter.study.grid import Study, slug

    typed: dict[str, Any] = {k: several(k, v) for k, v in fields.items() if v is not None}
    if methods:
        typed["methods"] = [one_method(text) for text in methods.split(",")]
    if seeds:
        numbers = [whole(text, "--seeds") for text in seeds.split(",")]
        typed["seeds"] = numbers if "," in seeds else numbers[0]
    if target:
        typed["target"] = value(target)
    if tune:
        typed["tune"] = dict(candidates(text) for text in tune)
    typed |= {k: v for k, v in (("reference", reference), ("measure", measure)) if v}
    if file is None and not methods:
        raise Mistake("Nothing to compare: name a study file, or methods such as --methods fedavg,fedprox,scaffold.")
    if file is not None:
        study = Study.read(file, preset, typed)
    else:
        words = [typed.get("data", "digits"), typed.get("partition", "dirichlet:0.5")]
        name = slug("-".join(w if isinstance(w, str) else "-".join(w) for w in words))[:40]
        study = Study.of({"name": name}, preset, typed)
    carry_on(study, Path(out or f"studies/{slug(study.name)}"), jobs, log)


def reproduce(
    name: Annotated[str, typer.Argument(help="A folder of experiments/, or a path to one.")],
    preset: Annotated[str, typer.Option(help="One of the study's presets. Default: laptop.", show_default=False)] = "",
    jobs: Jobs = "auto",
    log: Log = "",
) -> None:
    """Run a published experiment and write its results, with the paper's numbers, next to its study file."""
    from kilter.records.toml_file import read_toml
    from kilter.study.grid import Study

    file = find_experiment(name)
    which = preset or ("laptop" if "laptop" in read_toml(file).get("presets", {}) else "")
    study = Study.read(file, which)
    carry_on(study, file.parent / "results" / (which or "default"), jobs, log)


def demo(
    out: Annotated[str, typer.Option(help="The study's folder.")] = "runs/demo",
    jobs: Jobs = "auto",
) -> None:
    """Compare the five methods with FedAvg, SOLO and pooled training on skewed digits. Nothing is downloaded."""
    import kilter.study
    from kilter.report.demo import EXPLANATION, demo_table
    from kilter.report.html_report import write_report
    from kilter.study.grid import Study

    results = run_study(Study.read(Path(kilter.study.__file__).with_name("demo.toml")), Path(out), jobs)
    stdout.print(demo_table(results))
    stdout.print(EXPLANATION)
    write_report([Path(out)], Path(out) / "report.html", "The five methods on skewed digits")
    stdout.print(
        f"\nCurves, clients and what each method does: open {Path(out) / 'report.html'} in a browser.", markup=False
    )
    finish(results, Path(out))


def carry_on(study: Study, path: Path, jobs: str, log: str = "") -> None:
    """Run a study to its end, show its tables, and say where its files are; or stop cleanly."""
    from kilter.report.trackers import check_names, log_study
    from kilter.study.tables import show

    check_names(log)
    results = run_study(study, path, jobs)
    show(results, stdout)
    for problem in log_study(log, results, path):
        stdout.print(problem, markup=False, soft_wrap=True)
    finish(results, path)


def run_study(study: Study, path: Path, jobs: str) -> Results:
    """Run what is missing of a study and write its results; or stop cleanly."""
    from kilter.report.study_page import publish
    from kilter.runtimes.autotune import cores
    from kilter.runtimes.interrupts import stoppable
    from kilter.study.folder import Folder
    from kilter.study.pipeline import conduct

    at_once = cores() if jobs == "auto" else whole(jobs, "--jobs", least=1)
    with stops_with(f"Nothing is lost in '{path}': repeat the command to resume."), stoppable(), Folder(path) as folder:
        results = conduct(study, folder, at_once, stdout)
        publish(results, path, f"kilter {shlex.join(sys.argv[1:])}")
    return results


def finish(results: Results, path: Path) -> None:
    """Say where the files are; exit with 1 if runs failed."""
    stdout.print(f"\nFiles: {path} (results.md, table.md, table.csv, results.json, figures/, runs/)", markup=False)
    if results.failures:
        stdout.print("Repeat the command to try the failed runs again.", markup=False)
        raise typer.Exit(1)


def find_experiment(name: str) -> Path:
    """Find a study file by its path, its folder's path, or its folder's name in experiments/."""
    installed = Path(sys.prefix) / "share" / "kilter" / "experiments"  # where a wheel puts them
    for file in (Path(name), Path(name) / "study.toml", Path("experiments") / name / "study.toml"):
        if file.is_file():
            return file
    if (installed / name / "study.toml").is_file():
        return _copied(installed / name / "study.toml")
    homes = [Path("experiments"), installed]
    there = sorted({p.parent.name for home in homes for p in home.glob("*/study.toml")})
    if not there:
        raise Mistake(
            f"No experiment '{name}': there is no experiments/ folder here. Change to where it is, or give a path."
        )
    raise unknown("experiment", name, there)


def _copied(file: Path) -> Path:
    """A copy of an installed study, with its data, in experiments/ here: its results are written next to it."""
    from kilter.records.run_folder import write

    target = Path("experiments") / file.parent.name / "study.toml"
    target.parent.mkdir(parents=True, exist_ok=True)
    for part in (p for p in file.parent.iterdir() if p.is_file()):
        write(target.with_name(part.name), part.read_bytes())
    return target


# Typed values ------------------------------------------------------------------------------------------------------


def several(name: str, text: object) -> object:
    """Split the value of an option that may be a list at its commas."""
    if name not in LISTS or not isinstance(text, str) or "," not in text or Path(text).exists():
        return text
    return [part.strip() for part in text.split(",")]


def one_method(text: str) -> str | dict[str, Plain]:
    """Parse a method with settings, `fedprox:mu=0.1:lr=0.05`. The colon of `my.py:Mine` stays."""
    words = text.strip().split(":")
    plain = [w for w in words if "=" not in w]
    pairs = [w.partition("=") for w in words if "=" in w]
    if not pairs:
        return text.strip()
    return {"method": ":".join(plain), **{key: value(typed) for key, _, typed in pairs}}


def candidates(text: str) -> tuple[str, list[Plain]]:
    """Parse a field and the values to try, `mu=0.01,0.1`."""
    name, equals, values = text.partition("=")
    if not equals or not name.strip() or not values.strip():
        raise Mistake(f"--tune takes NAME=VALUE,VALUE,..., such as mu=0.01,0.1, not '{text}'.")
    return name.strip(), [value(v) for v in values.split(",")]


def value(text: str) -> Plain:
    """Parse a number, true or false; other text stays text."""
    words = {"true": True, "false": False}
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return words.get(text.strip(), text.strip())


def whole(text: str, option: str, least: int = 0) -> int:
    """Parse a whole number."""
    if not text.strip().isdecimal() or int(text) < least:
        raise Mistake(f"{option} takes whole numbers of at least {least}, not '{text}'.")
    return int(text)
