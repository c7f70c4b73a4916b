"""Repeat one cheap run of every published study and say whether this machine gives the same bits: `make reproduce-check`."""

from __future__ import annotations

import sys
from pathlib import Path

from kilter.study.grid import Study
from kilter.study.repeat import repeat

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


def main(names: list[str]) -> None:
    """Repeat these studies; all of them without names."""
    for stored in sorted(EXPERIMENTS.glob("*/results/*/results.json")):
        folder, file = stored.parent, stored.parent.parent.parent / "study.toml"
        if names and file.parent.name not in names:
            continue
        preset = "" if folder.name == "default" else folder.name
        print(repeat(Study.read(file, preset), folder), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
