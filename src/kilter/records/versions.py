"""The versions of the software and the processor, for the record of a run."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

import kilter

BEGAN_WITH = "began with"  # among the versions of a run that was extended under others


def versions(earlier: Mapping[str, str] | None = None) -> dict[str, str]:
    """The versions of the software, for the record of a run. `earlier`: those that began it, of which all others are kept."""
    packages = {name: version(name) for name in ("kilter", "torch", "numpy", "scikit-learn")}
    now = {"python": platform.python_version(), **packages, "commit": commit(), "cpu": cpu()}
    changed = [f"{k} {v}" for k, v in (earlier or {}).items() if k != BEGAN_WITH and v != now.get(k)]
    before = [*filter(None, [(earlier or {}).get(BEGAN_WITH)]), *filter(None, [", ".join(changed)])]
    return now | ({BEGAN_WITH: "; ".join(before)} if before else {})


@cache
def cpu() -> str:
    """The processor and the instruction set that torch uses on it: float results depend on it."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}"


@cache
def commit() -> str:
    """The commit of the code when this process started, and whether there were uncommitted changes."""
    home = Path(kilter.__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(home), *words], capture_output=True, text=True, timeout=10, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        head = git("rev-parse", "HEAD")
        changed = git("status", "--porcelain", "--", str(home))
    except (OSError, subprocess.SubprocessError):
        head = changed = ""
    return (head + (" with changes not committed" if changed else "")) if head else "unknown (not a git checkout)"
