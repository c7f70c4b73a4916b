"""Kilter's speed beside Flower, pfl, fluke and a hand-written loop: the same work, taken in turns, each in its own venv.

    make bench                                                        # everything
    python benchmarks/speed.py --works W1,W3 --peers kilter,hand      # a part of it; the rest is kept from before
    python benchmarks/speed.py --images 64 --rounds 3 --reps 1        # to try it out: a smaller work, written elsewhere

Every measurement is kept in a file of its own, so a run that was broken off goes on where it was; `--again` measures anew. What
there is is written to `benchmarks/results/` (speed.md, speed.json, speed.png, growth.png).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pictures
import table
from page import page
from work import GROWTH, SLOWER, TRIAL, WORKS, convert

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
VENVS = HERE / ".venvs"
LIMIT = 1800  # seconds after which a run is broken off


@dataclass(frozen=True)
class Peer:
    """Who is measured: a runner, what its venv holds, which methods it has."""

    script: str
    needs: tuple[str, ...] = ()  # packages; none: the venv of this process
    bare: tuple[str, ...] = ()  # packages without what they ask for
    form: str = ""
    methods: tuple[str, ...] = ("fedavg", "fedprox", "scaffold", "feddisk")
    torchrun: bool = False  # two processes are started by torchrun
    threads: str = "torch threads"  # what the setting 2 means


FLUKE = ("pandas", "scikit-learn", "torchmetrics", "rich", "diskcache", "omegaconf", "cerberus", "psutil", "matplotlib")
PEERS = {
    "kilter": Peer("run_kilter.py", threads="processes"),
    "flwr": Peer(
        "run_flwr.py", ("flwr[simulation]==1.41.0",), methods=("fedavg", "fedprox", "feddisk"), threads="Ray actors"
    ),
    "pfl": Peer("run_pfl.py", ("pfl[pytorch]==0.6.0",), torchrun=True, threads="processes (torchrun)"),
    "fluke": Peer("run_fluke.py", (*FLUKE, "seaborn"), ("fluke-fl==0.8.1",), methods=("fedavg", "fedprox", "scaffold")),
    "hand": Peer("run_hand.py"),
    "hand-cl": Peer("run_hand.py", form="channels_last"),
}


# ---- venvs ----


def python(name: str, device: str = "cpu") -> Path:
    """The peer's interpreter; its venv is made if it is not there, and must hold the one pinned torch."""
    peer = PEERS[name]
    if not peer.needs:
        return Path(sys.executable)
    venv = VENVS / name
    interpreter, ready = venv / "bin" / "python", venv / "ready"
    wanted = "\n".join([*peer.needs, *peer.bare])
    if not ready.is_file() or ready.read_text() != wanted:
        print(f"making the venv of {name}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        pip = [interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if peer.bare:
            subprocess.run([*pip, "--no-deps", *peer.bare], check=True)
        subprocess.run([*pip, "--constraint", ROOT / "constraints.txt", "torch", "numpy", *peer.needs], check=True)
        ready.write_text(wanted)
    if device != "cpu":  # the torch that pip finds for the GPU
        return interpreter
    pinned = (ROOT / "constraints.txt").read_text().split("torch==")[1].split()[0]
    code = "import torch; print(torch.__version__.split('+')[0], torch.version.cuda)"
    installed = subprocess.run([interpreter, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    if installed != [pinned, "None"]:
        raise SystemExit(
            f"The venv of {name} has torch {installed[0]} (CUDA {installed[1]}), not the CPU build of {pinned}."
        )
    return interpreter


def version(name: str) -> str:
    """The versions of what a peer runs on."""
    peer = PEERS[name]
    wanted = [n.split("[")[0].split("==")[0] for n in (*peer.bare, *peer.needs[:1])] if peer.needs else []
    wanted = wanted[:1] + (["ray"] if name == "flwr" else []) + ["torch"]
    code = f"from importlib.metadata import version; print(*[f'{{n}} {{version(n)}}' for n in {wanted}], sep=', ')"
    return subprocess.run([python(name), "-c", code], check=True, capture_output=True, text=True).stdout.strip()


# ---- one measurement ----


def family(root: int) -> list[int]:
    """A process and all that descend from it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
    pids = [root]
    for pid in pids:
        pids += [child for child, parent in parents.items() if parent == pid]
    return pids


def resident(pids: Sequence[int], shared: bool) -> int:
    """Bytes in memory: RSS summed, or (`shared`) PSS, where pages that several share are counted once."""
    total = 0
    for pid in pids:
        try:
            if shared:
                text = Path(f"/proc/{pid}/smaps_rollup").read_text()
                total += 1024 * int(text.split("\nPss:")[1].split()[0])
            else:
                total += os.sysconf("SC_PAGE_SIZE") * int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (OSError, IndexError):  # it has ended
            continue
    return total


def command(name: str, work: str, threads: int, data: Path, smaller: dict[str, int], device: str) -> list[str]:
    peer = PEERS[name]
    start = [str(python(name, device))]
    if peer.torchrun and threads > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={threads}"]
    options = [f"--{k}={v}" for k, v in smaller.items() if v] + ([f"--form={peer.form}"] if peer.form else [])
    return [
        *start,
        str(HERE / peer.script),
        f"--work={work}",
        f"--threads={threads}",
        f"--data={data}",
        f"--device={device}",
        *options,
    ]


def measure(
    name: str, work: str, threads: int, data: Path, smaller: dict[str, int], device: str = "cpu"
) -> dict[str, Any]:
    """Run a peer once: its rounds, seconds from its start to the end of the first, peak memory of all its processes."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    environment["PYTHONPATH"] = str(ROOT / "src") if name == "kilter" else ""
    if name not in ("flwr", "kilter"):  # Ray says it to its actors, Kilter to its workers
        environment["OMP_NUM_THREADS"] = "1" if PEERS[name].torchrun else str(threads)
    order = command(name, work, threads, data, smaller, device)
    lines: list[dict[str, Any]] = []
    first: list[float] = []
    with tempfile.TemporaryFile("w+") as errors:
        began = time.perf_counter()
        process = subprocess.Popen(order, cwd=HERE, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)

        def listen() -> None:
            for text in process.stdout or ():
                if text.startswith("{"):
                    lines.append(json.loads(text))
                    if len(lines) == 1:
                        first.append(time.perf_counter() - began)

        listener = threading.Thread(target=listen)
        listener.start()
        rss = pss = beat = 0
        pids = [process.pid]
        try:
            while process.poll() is None and time.perf_counter() - began < LIMIT:
                pids = family(process.pid)
                rss = max(rss, resident(pids, shared=False))
                if beat % 5 == 0:
                    pss = max(pss, resident(pids, shared=True))
                beat += 1
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                for pid in pids:
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        continue
            process.wait()
            listener.join(10)
        errors.seek(0)
        if process.returncode or not lines or "accuracy" not in lines[-1]:
            raise RuntimeError(f"{' '.join(order)}\n{errors.read()[-3000:]}")
    return {
        "work": work,
        "peer": name,
        "threads": threads,
        "rounds": lines[:-1],
        "accuracy": lines[-1]["accuracy"],
        "startup": first[0],
        "rss": rss,
        "pss": pss,
    }


# ---- all of them ----


def settings(name: str, label: str, rep: int, data: Path, measured: Path) -> list[int]:
    """Thread settings to measure: both, unless one is clearly slower the first time; where that would take long, the one that was
    faster on like work: W5 and the growth curve go by W1 and W3 where these have been measured, the ResNet by a short trial.
    """
    if label.startswith(("W5", "G")):
        like = "W1" if label.startswith("W5") else "W3"
        runs = [json.loads(f.read_text()) for f in measured.glob(f"{like}-{name}-[12]-*.json")]
        return [table.best(table.lines(runs))[name].threads if runs else 2]
    if WORKS[label].model != "resnet":
        first = [measured / f"{label}-{name}-{threads}-1.json" for threads in (1, 2)]
        if rep == 1 or not all(file.is_file() for file in first):
            return [1, 2]
        took = [table.steady(json.loads(file.read_text())) for file in first]
        return [threads for threads, t in zip((1, 2), took, strict=True) if t <= SLOWER * min(took)]
    seconds = {}
    for threads in (1, 2):
        file = measured / f"{label}-{name}-{threads}-trial.json"
        if not file.is_file():
            kept(file, measure(name, label, threads, data, {"images": TRIAL, "rounds": 1}))
        seconds[threads] = table.steady(json.loads(file.read_text()))
    return [min(seconds, key=lambda t: seconds[t])]


def kept(file: Path, run: dict[str, Any]) -> None:
    run |= {"commit": commit(), "at": now()}
    partial = file.with_suffix(".new")
    partial.write_text(json.dumps(run))
    partial.rename(file)


def turns(a: argparse.Namespace, works: Sequence[str]) -> Iterator[tuple[str, int, str]]:
    """(work, repetition, peer), peers in turns within each repetition."""
    for work in works:
        for rep in range(1, (1 if work in GROWTH else a.reps) + 1):
            for peer in a.peers:
                same = peer == "hand-cl" and WORKS[work].model == "mlp"  # no layout to choose
                if WORKS[work].method in PEERS[peer].methods and not same:
                    yield work, rep, peer


def commit() -> str:
    """What is measured; the page that this program writes is no change of it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    return (git("describe", "--always") or "unknown") + ("-dirty" if changed else "")


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def machine() -> str:
    models = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    memory = int(Path("/proc/meminfo").read_text().split()[1]) / 2**20
    return f"{len(models)} x {models[0] if models else platform.processor()}, {memory:.0f} GB, {platform.platform()}"


def write(folder: Path, measured: Path, smaller: dict[str, int]) -> None:
    """Tables and pictures of all that has been measured."""
    runs = [json.loads(f.read_text()) for f in sorted(measured.glob("*.json")) if not f.name.endswith("-trial.json")]
    order = {peer: k for k, peer in enumerate(PEERS)}
    lines_by_work: dict[str, list[table.Line]] = {}
    when: dict[str, str] = {}
    notes: list[str] = []
    for label, named in WORKS.items():
        some = [r for r in runs if r["work"] == label]
        if not some:
            continue
        work = replace(named, **{k: v for k, v in smaller.items() if v})
        table.check(some, work.steps, work.rounds)
        lines_by_work[label] = table.lines(sorted(some, key=lambda r: (order[r["peer"]], r["threads"])))
        notes += [f"{label}: {text}" for text in table.strangers(lines_by_work[label])]
        commits, hours = sorted({r["commit"] for r in some}), sorted(r["at"] for r in some)
        when[label] = f"At {', '.join(commits)}, {hours[0]} to {hours[-1]}."
    if not lines_by_work:
        return
    peers = [p for p in PEERS if any(r["peer"] == p for r in runs)]
    versions = {p: version(p) for p in peers}
    about = {
        "machine": machine(),
        "command": "make bench" if len(sys.argv) == 1 else " ".join(["python", *sys.argv]),
        "commit": sorted({r["commit"] for r in runs}),
        "measured": [min(r["at"] for r in runs), max(r["at"] for r in runs)],
        "python": platform.python_version(),
        "versions": versions,
        "threads": {p: PEERS[p].threads for p in peers},
        "smaller": smaller,
    }
    folder.mkdir(parents=True, exist_ok=True)
    summary = {
        w: {"verdict": table.verdict(w, some), "lines": [asdict(x) for x in some]} for w, some in lines_by_work.items()
    }
    (folder / "speed.json").write_text(json.dumps({"about": about, "works": summary, "runs": runs}, indent=1) + "\n")
    (folder / "speed.md").write_text(page(about, lines_by_work, when, notes))
    pictures.speed({w: s for w, s in lines_by_work.items() if w not in GROWTH}, folder / "speed.png")
    if any(w in GROWTH for w in lines_by_work):
        pictures.growth({WORKS[w].clients: s for w, s in lines_by_work.items() if w in GROWTH}, folder / "growth.png")
    print(f"written: {folder}/speed.md", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = lambda text: [part for part in text.split(",") if part]  # noqa: E731
    parser.add_argument(
        "--works", "--workloads", type=names, default=list(WORKS), help="e.g. W1,W3; W5 and G stand for all of theirs"
    )
    parser.add_argument("--peers", type=names, default=list(PEERS), help=f"of {','.join(PEERS)}")
    parser.add_argument("--reps", type=int, default=3, help="repetitions")
    parser.add_argument("--images", type=int, default=0, help="fewer images a client, to try the harness out")
    parser.add_argument("--rounds", type=int, default=0, help="fewer rounds, to try the harness out")
    parser.add_argument("--again", action="store_true", help="measure anew what has been measured")
    parser.add_argument("--write", action="store_true", help="measure nothing, write the page of what there is")
    parser.add_argument("--out", type=Path, default=None, help="folder of the results")
    a = parser.parse_args()
    a.works = [w for w in WORKS if any(w == name or (name in ("W5", "G") and w.startswith(name)) for name in a.works)]
    if unknown := [p for p in a.peers if p not in PEERS] or ([] if a.works else ["workloads"]):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(PEERS)} and {', '.join(WORKS)}")
    return a


def main() -> None:
    a = arguments()
    smaller = {"images": a.images, "rounds": a.rounds}
    folder = a.out or (
        Path(tempfile.gettempdir()) / "kilter-bench-trial" if any(smaller.values()) else HERE / "results"
    )
    measured = (folder if any(smaller.values()) else HERE) / ".measured"
    measured.mkdir(parents=True, exist_ok=True)
    if not a.write:
        source = Path(os.environ.get("KILTER_DATA") or "")
        with tempfile.TemporaryDirectory() as data:
            for name in {WORKS[w].data for w in a.works}:
                convert(source, Path(data), name)
            for peer in a.peers:
                python(peer)
            for work, rep, peer in turns(a, a.works):
                for threads in settings(peer, work, rep, Path(data), measured):
                    file = measured / f"{work}-{peer}-{threads}-{rep}.json"
                    if file.is_file() and not a.again and json.loads(file.read_text())["commit"] == commit():
                        continue
                    run = measure(peer, work, threads, Path(data), smaller)
                    kept(file, run)
                    print(f"{work} {rep}/{a.reps} {peer} x{threads}: {table.steady(run):.3f} s a round", flush=True)
    write(folder, measured, smaller)


if __name__ == "__main__":
    main()
