"""What `--precision bf16` gains and costs on the CPU: ResNet-18 (W4 with fewer images), fp32 and bf16 in turns.

python benchmarks/precision.py [--images 64] [--rounds 3] [--repetitions 3] [--threads 2] [--out FILE]
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
from work import convert

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=64, help="of each of the ten clients")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    times: dict[str, list[float]] = {"fp32": [], "bf16": []}
    losses: dict[str, list[float]] = {"fp32": [], "bf16": []}
    with tempfile.TemporaryDirectory() as data:
        convert(Path(os.environ["KILTER_DATA"]), Path(data), "cifar10")
        for _ in range(a.repetitions):
            for precision in times:
                command = [sys.executable, "run_kilter.py", "--work=W4", f"--threads={a.threads}", f"--data={data}"]
                command += [f"--images={a.images}", f"--rounds={a.rounds}", f"--precision={precision}"]
                output = subprocess.run(command, cwd=HERE, check=True, capture_output=True, text=True).stdout
                rounds = [json.loads(line) for line in output.splitlines() if line.startswith('{"round"')]
                times[precision].append(median([r["seconds"] for r in rounds]))
                losses[precision].append(rounds[-1]["loss"])
    result = {
        "cpu": cpu(),
        "seconds_per_round": {p: median(some) for p, some in times.items()},
        "bf16_divided_by_fp32": median(b / f for f, b in zip(times["fp32"], times["bf16"], strict=True)),
        "last_training_loss": {p: median(some) for p, some in losses.items()},
    }
    print(json.dumps(result, indent=2))
    if a.out:
        a.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
