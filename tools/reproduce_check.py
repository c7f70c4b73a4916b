"""Repeat one cheap run of every published study and say whether this machine gives the same bits: `make reproduce-check`."""

from __future__ import annotations

import sys
from pathlib import Path

from kilter.errors import Mistake
from kilter.records.versions import cpu
from kilter.study.grid import Study
from kilter.study.repeat import repeat

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


def main(names: list[str]) -> None:
    """Repeat these studies; all of them without names. A study that cannot be repeated here is named; the others go on."""
    stored = sorted(EXPERIMENTS.glob("*/results/*/results.json"))
    published = {file.parents[2].name for file in stored}
    if unknown := [name for name in names if name not in published]:
        raise Mistake(f"There is no published study '{unknown[0]}'. There are: {', '.join(sorted(published))}.")
    failed = False
    print(f"This machine: {cpu()}")
    for file in stored:
        study, preset = file.parents[2], file.parent.name
        if names and study.name not in names:
            continue
        try:
            print(
                repeat(Study.read(study / "study.toml", "" if preset == "default" else preset), file.parent), flush=True
            )
        except Mistake as e:
            print(f"{study.name}, {preset}: cannot be repeated here: {e}", flush=True)
            failed = True
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Mistake as e:
        print(e, file=sys.stderr)
        sys.exit(2)
