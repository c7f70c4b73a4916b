"""Compare the speed of the working tree with that of an earlier commit: the same work, measured in turns.

    python benchmarks/commits.py df49574 [--works W1 W2 W3] [--repetitions 5] [--threads 2] [--rounds 60] [--out FILE]

Each side trains in a process of its own. The ratio is the median over repetitions of (median seconds per round now) divided by
(median seconds per round at the commit). The first round of a run belongs to its start-up and is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from kilter.records.versions import cpu
from work import WORKS, convert

HERE = Path(__file__).resolve().parent


def seconds_per_round(tree: Path, work: str, threads: int, rounds: int, data: Path) -> float:
    """Run `run_kilter.py` of a source tree once; the median of its rounds' seconds, without the first round."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment["PYTHONPATH"] = str(tree / "src")
    command = [sys.executable, "run_kilter.py", f"--work={work}", f"--threads={threads}", f"--data={data}"]
    command += [f"--rounds={rounds}"] if rounds else []
    output = subprocess.run(
        command, cwd=tree / "benchmarks", env=environment, check=True, capture_output=True, text=True
    )
    lines = [json.loads(line) for line in output.stdout.splitlines() if line.startswith("{")]
    return median([line["seconds"] for line in lines if "seconds" in line][1:])


def compare(earlier: Path, work: str, repetitions: int, threads: int, rounds: int, data: Path) -> dict[str, object]:
    """Both trees in turns; which one goes first alternates."""
    now, before = [], []
    for repetition in range(repetitions):
        sides = [(HERE.parent, now), (earlier, before)]
        for tree, times in sides if repetition % 2 else sides[::-1]:
            times.append(seconds_per_round(tree, work, threads, rounds, data))
    ratios = [a / b for a, b in zip(now, before, strict=True)]
    return {"work": work, "ratio": median(ratios), "ratios": ratios, "seconds_now": now, "seconds_before": before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--works", nargs="+", choices=WORKS, default=["W1", "W2", "W3"])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=0, help="rounds of a run; default: those of the work")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data, earlier = Path(folder) / "data", Path(folder) / "earlier"
        data.mkdir()
        for name in sorted({WORKS[work].data for work in arguments.works}):
            convert(Path(os.environ["KILTER_DATA"]), data, name)
        subprocess.run(
            ["git", "worktree", "add", "--detach", "--quiet", earlier, arguments.commit], cwd=HERE, check=True
        )
        try:
            results = [
                compare(earlier, work, arguments.repetitions, arguments.threads, arguments.rounds, data)
                for work in arguments.works
            ]
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", earlier], cwd=HERE, check=True)
    text = json.dumps({"commit": arguments.commit, "cpu": cpu(), "results": results}, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
