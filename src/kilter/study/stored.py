"""A study's published results, read back from results.json: enough to draw its tables again, or to compare a new run with them."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from kilter.errors import Mistake
from kilter.records.types import Notice, Spread
from kilter.study.grid import Study
from kilter.study.results import Results, Run, tabulate
from kilter.study.schema import MEASURES
from kilter.study.tuning import Choice, budget

SERIES = {  # names of series in results of version 0.1, which were curves
    "density": "validation loss of the density model",
    "uncertainty": "mean uncertainty about known peers",
    "chosen": "peers asked",
}
ORIGIN = ("command", "preset", "commit", "date", "versions", "machine", "runs", "minutes")


def restore(folder: Path, study: Study) -> tuple[Results, dict[str, Any]]:
    """The results in a study's folder, and where they come from."""
    try:
        stored = json.loads((folder / "results.json").read_text())
    except (OSError, ValueError) as e:
        raise Mistake(f"'{folder / 'results.json'}' cannot be read: {e}.") from None
    if stored["failures"]:
        raise Mistake(f"'{folder}' has failed runs: repeat the study to draw its tables again.")
    runs = {(line["cell"], line["method"]): [as_run(r) for r in line["runs"]] for line in stored["lines"]}
    choices = {(c["cell"], c["label"]): Choice(**c) for c in stored["tuning"]}
    results = tabulate(study, runs, chosen=choices, budget=budget(study) if choices else 0)
    return results, {key: stored[key] for key in ORIGIN}


def as_run(plain: dict[str, Any]) -> Run:
    """A run as results.json has it."""
    known = {f.name for f in fields(Run)}
    values = {k: v for k, v in plain.items() if k in known}
    curves = {name: numbered(curve) for name, curve in plain["curves"].items()}
    old = {SERIES[name]: curve for name, curve in curves.items() if name in SERIES and curve}
    series = {name: numbered(curve) for name, curve in plain.get("series", {}).items()}
    return Run(
        **values
        | {
            "curves": {m: curves.get(m, {}) for m in (*MEASURES, "loss")},
            "spent": numbered(plain["spent"]),
            "bench": {part: Spread(**over) for part, over in plain.get("bench", {}).items()},
            "series": old | series,
            "setup_series": plain.get("setup_series", [SERIES["density"]] if SERIES["density"] in old else []),
            "notices": [Notice(**notice) for notice in plain.get("notices", [])],
        }
    )


def numbered(curve: dict[str, Any]) -> dict[int, Any]:
    """A curve by round: JSON has texts as keys."""
    return {int(t): value for t, value in curve.items()}
