"""Kilter's speed on a GPU beside Flower, pfl, fluke and a hand-written loop, each at its best setting: `make bench-gpu`.

    python benchmarks/gpu.py [--device cuda] [--works W1,W2,W3,W4] [--repetitions 3]

Every peer keeps its rows and its network on the GPU, and no step waits for the value of the loss. Settings that are tried: 1, 2,
4 and 8 processes that share the GPU for Flower (Ray actors) and Kilter (workers); one process for pfl, fluke and the loop. The
fastest setting of a first repetition is repeated; peers take turns. The page is benchmarks/results/gpu.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from pathlib import Path
from statistics import median

import torch

from speed import HERE, PEERS, commit, machine, measure, now, python, version
from work import WORKS, convert

SETTINGS = {"kilter": (1, 2, 4, 8), "flwr": (1, 2, 4, 8)}  # processes that share the GPU
PAGE = HERE / "results" / "gpu.md"


def seconds(peer: str, work: str, processes: int, data: Path, device: str) -> float:
    """The median of the seconds a round takes, without the first round (W4 has only one)."""
    rounds = [line["seconds"] for line in measure(peer, work, processes, data, {}, device)["rounds"]]
    return median(rounds[1:] or rounds)


def best_setting(peer: str, work: str, data: Path, device: str) -> int:
    tried = {n: seconds(peer, work, n, data, device) for n in SETTINGS.get(peer, (1,))}
    return min(tried, key=lambda n: tried[n])


def compare(work: str, peers: list[str], repetitions: int, data: Path, device: str) -> list[str]:
    """One row of the table for each peer."""
    peers = [p for p in peers if WORKS[work].method in PEERS[p].methods]
    settings = {peer: best_setting(peer, work, data, device) for peer in peers}
    times: dict[str, list[float]] = {peer: [] for peer in peers}
    for _ in range(repetitions):
        for peer in peers:
            times[peer].append(seconds(peer, work, settings[peer], data, device))
    mine = median(times["kilter"])
    return [
        f"| {work} | {peer} | {settings[peer]} | {median(some):.4g} | {min(some):.4g} - {max(some):.4g} "
        f"| {median(some) / mine:.2f}x |"
        for peer, some in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: only to try the program out")
    parser.add_argument("--works", default="W1,W2,W3,W4")
    parser.add_argument("--peers", default="kilter,flwr,pfl,fluke,hand")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, default=PAGE)
    a = parser.parse_args()
    if a.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device here (torch sees none), so nothing was measured.")
    peers, works = a.peers.split(","), a.works.split(",")
    for peer in peers:
        python(peer, a.device)
    rows = []
    with tempfile.TemporaryDirectory() as data:
        for name in sorted({WORKS[work].data for work in works}):
            convert(Path(os.environ.get("KILTER_DATA") or ""), Path(data), name)
        for work in works:
            rows += compare(work, peers, a.repetitions, Path(data), a.device)
            print("\n".join(rows[-len(peers) :]), flush=True)
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    gpu = (
        subprocess.run(query, capture_output=True, text=True).stdout.strip()
        if a.device == "cuda"
        else "no GPU: a trial"
    )
    text = [
        "# Speed on a GPU",
        f"`make bench-gpu` at {commit()}, {now()}, on {gpu}; {machine()}. "
        + "; ".join(f"{p}: {version(p)}" for p in peers)
        + ".",
        "Seconds of a steady round: the median over repetitions of each run's median, and the least and most of these.",
        "| work | peer | processes | s a round | least - most | / Kilter |\n| --- | --- | --- | --- | --- | --- |\n"
        + "\n".join(rows),
    ]
    a.out.write_text("\n\n".join(text) + "\n")
    print(f"written: {a.out}")


if __name__ == "__main__":
    main()
