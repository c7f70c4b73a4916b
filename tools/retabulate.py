"""Draw the tables and figures of published studies again, from their results.json: `python tools/retabulate.py [NAME ...]`."""

from __future__ import annotations

import sys
from pathlib import Path

from kilter.report.study_page import publish
from kilter.study.grid import Study
from kilter.study.stored import restore

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


def main(names: list[str]) -> None:
    """Draw these studies; all of them without names."""
    for stored in sorted(EXPERIMENTS.glob("*/results/*/results.json")):
        folder, file = stored.parent, stored.parent.parent.parent / "study.toml"
        if names and file.parent.name not in names:
            continue
        preset = "" if folder.name == "default" else folder.name
        results, origin = restore(folder, Study.read(file, preset))
        publish(results, folder, origin["command"], origin)
        print(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
