"""A whole study: tune, run, gather, and write everything down beside the runs.

study.toml      what was asked for, presets and typed options merged
runs/           every run as an ordinary run folder
table.md, .csv  the tables
results.json    every number, with every seed's curves
results.md      the tables, the figures, and what they were made with
figures/        PNG and SVG
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Console

from kilter.experiment import commit, versions
from kilter.records.run_folder import write
from kilter.study import tuning
from kilter.study.grid import Study
from kilter.study.progress import Board
from kilter.study.results import Results, Run, gather
from kilter.study.runner import Folder, carry_out
from kilter.study.tables import NAMES, markdown
from kilter.study.tables import comma_separated as as_csv


def conduct(study: Study, path: Path, at_once: int, console: Console, command: str = "") -> Results:
    """Run what is missing of a study and write its results."""
    trials = tuning.trials(study)
    commit()  # asked now, and inherited by the runs: the files may change while a study runs, its code does not
    with Folder(path) as folder:
        write(path / "study.toml", tomli_w.dumps(_plain(study.source)))
        failures = []
        with Board(console, f"{study.name}: tuning") as board:
            if trials:
                failures += carry_out(trials, folder, at_once, board)
        choices = tuning.choose(study, trials, folder)
        jobs = study.jobs({key: choice.settings for key, choice in choices.items()})
        with Board(console, study.name) as board:
            failures += carry_out(jobs, folder, at_once, board)
        results = gather(study, folder, jobs, failures, choices, tuning.budget(study) if choices else 0)
        publish(results, path, command)
    return results


def publish(results: Results, path: Path, command: str) -> None:
    """Tables, figures and where they come from."""
    from kilter.report.study_figures import draw

    made = provenance(results, command)
    write(path / "table.md", f"# {results.study.name}\n\n{markdown(results)}")
    write(path / "table.csv", as_csv(results))
    write(path / "results.json", json.dumps(as_json(results, made), indent=1) + "\n")
    figures = draw(results, path / "figures")
    write(path / "results.md", page(results, made, [f.relative_to(path) for f in figures]))


def provenance(results: Results, command: str) -> dict[str, Any]:
    """Command, commit, date, versions, machine."""
    runs = [r for c in results.cells for line in c.lines for r in line.runs]
    return {
        "command": command,
        "preset": results.study.preset,
        "commit": ", ".join(sorted({r.versions.get("commit", "unknown") for r in runs})) or commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": {k: v for k, v in versions().items() if k != "commit"},
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "runs": len({r.folder for r in runs}),
        "minutes": round(sum({r.folder: r.seconds for r in runs}.values()) / 60, 1),
    }


def page(results: Results, made: dict[str, Any], figures: list[Path]) -> str:
    """results.md."""
    study = results.study
    about = f"{study.about.strip()}\n\n" if study.about else ""
    of = len(study.cells) * len(study.entries) * len(study.seeds)
    words = {
        "curves-global": "Global accuracy by round: mean over seeds, band of one standard deviation",
        "curves-client": "Mean client accuracy by round: mean over seeds, band of one standard deviation",
        "curves-uncertainty": "Peers' uncertainty about each other by round: mean over seeds, band of one standard deviation",
        "curves-chosen": "How many others a peer asks by round: mean over seeds, band of one standard deviation",
        "curves-density": "Loss of the federated density model on validation rows, by round of the density phase",
        "curves-local": "Local accuracy by round: mean over seeds, band of one standard deviation",
        "bytes": f"{NAMES[study.measure]} against bytes sent",
        "clients": "Clients of all seeds: quartiles, median, mean (cross)",
    }
    pictures = []
    for f in figures:
        kind = f.name if f.name in words else f.name.rpartition("-")[0]
        pictures.append(f"![{words[kind]}]({f.as_posix()}.png)\n\n{words[kind]}.\n")
    libraries = ", ".join(f"{k} {v}" for k, v in made["versions"].items())
    facts = [
        f"command: `{made['command']}`",
        f"commit of the runs: {made['commit']}",
        f"date: {made['date']}",
        f"versions: {libraries}",
        f"machine: {made['machine']}",
        f"runs: {made['runs']} of {of}, {made['minutes']} minutes of one core's training and evaluation",
    ]
    head = f"# {study.name}" + (f", preset {study.preset}" if study.preset else "")
    made_with = "\n".join(f"- {fact}" for fact in facts)
    return f"{head}\n\n{about}{made_with}\n\n{markdown(results)}\n## Figures\n\n" + "\n".join(pictures)


def as_json(results: Results, made: dict[str, Any]) -> dict[str, Any]:
    """Every number, with every seed's curves: enough to draw the figures again."""
    from kilter.study.tables import numbers

    def run(r: Run) -> dict[str, Any]:
        curves = {m: {t: round(a, 6) for t, a in c.items()} for m, c in r.curves.items()}
        return {**asdict(r), "curves": curves, "clients": [round(a, 6) for a in r.clients]}

    return {
        "study": results.study.name,
        **made,
        "reference": results.study.reference,
        "seeds": list(results.study.seeds),
        "lines": [
            {**numbers(results, cell, line), "runs": [run(r) for r in line.runs]}
            for cell in results.cells
            for line in cell.lines
        ],
        "tuning": [asdict(c) for c in results.choices],
        "failures": [{"run": f.job.folder, "title": f.job.title, "reason": f.reason} for f in results.failures],
    }


def _plain(values: Any) -> Any:
    """Tuples and paths as TOML has them."""
    if isinstance(values, dict):
        return {k: _plain(v) for k, v in values.items()}
    if isinstance(values, list | tuple):
        return [_plain(v) for v in values]
    return values if isinstance(values, str | int | float | bool) else str(values)
