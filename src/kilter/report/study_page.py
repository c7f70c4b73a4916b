"""What a study publishes in its folder.

study.toml      the study, with preset and typed options merged
runs/           every run as an ordinary run folder
table.md, .csv  the tables
results.json    every number, with every seed's curves
results.md      the tables, the figures, and how they were made
figures/        PNG and SVG
"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from kilter.records.run_folder import write
from kilter.records.versions import commit, versions
from kilter.report.study_figures import StudyFigure, draw
from kilter.study.results import Results, Run
from kilter.study.tables import NAMES, comma_separated, markdown, numbers


def publish(results: Results, path: Path, command: str, origin: dict[str, Any] | None = None) -> None:
    """Write a study's tables and figures, and where they come from, into its folder."""
    origin = origin or provenance(results, command)
    write(path / "table.md", f"# {results.study.name}\n\n{markdown(results)}")
    write(path / "table.csv", comma_separated(results))
    text = msgspec.json.format(msgspec.json.encode(as_json(results, origin)), indent=1)  # NaN becomes null
    write(path / "results.json", text + b"\n")
    figures = draw(results, path / "figures")
    write(path / "results.md", page(results, origin, figures, path))


def provenance(results: Results, command: str) -> dict[str, Any]:
    """Command, commit, date, versions and machine."""
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


def page(results: Results, origin: dict[str, Any], figures: list[StudyFigure], path: Path) -> str:
    """The text of results.md."""
    study = results.study
    about = f"{study.about.strip()}\n\n" if study.about else ""
    of = len(study.cells) * len(study.entries) * len(study.seeds)
    words = {
        "curves-global": "Global accuracy by round: mean over seeds, band of one standard deviation",
        "curves-client": "Mean client accuracy by round: mean over seeds, band of one standard deviation",
        "curves-local": "Local accuracy by round: mean over seeds, band of one standard deviation",
        "bytes": f"{NAMES[study.measure]} against bytes sent",
        "clients": "Clients of all seeds: quartiles, median, mean (cross)",
    }
    pictures = []
    for figure in figures:
        text = words.get(figure.kind) or f"{figure.title}: mean over seeds, band of one standard deviation"
        pictures.append(f"![{text}]({figure.path.relative_to(path).as_posix()}.png)\n\n{text}.\n")
    libraries = ", ".join(f"{k} {v}" for k, v in origin["versions"].items())
    facts = [
        f"command: `{origin['command']}`",
        f"commit of the runs: {origin['commit']}",
        f"date: {origin['date']}",
        f"versions: {libraries}",
        f"machine: {origin['machine']}",
        f"runs: {origin['runs']} of {of}, {origin['minutes']} minutes of one core's training and evaluation",
    ]
    head = f"# {study.name}" + (f", preset {study.preset}" if study.preset else "")
    listed = "\n".join(f"- {fact}" for fact in facts)
    return f"{head}\n\n{about}{listed}\n\n{markdown(results)}\n## Figures\n\n" + "\n".join(pictures)


def as_json(results: Results, origin: dict[str, Any]) -> dict[str, Any]:
    """Every number, with the curves of every seed: enough to draw the figures again."""

    def run(r: Run) -> dict[str, Any]:
        curves = {m: {t: round(a, 6) for t, a in c.items()} for m, c in r.curves.items()}
        return {**asdict(r), "curves": curves, "clients": [round(a, 6) for a in r.clients]}

    return {
        "study": results.study.name,
        **origin,
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
