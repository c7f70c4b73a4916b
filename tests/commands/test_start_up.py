"""How fast the command line starts, and what it needs to start."""

import os
import resource
import subprocess
import sys

import pytest

MAIN = "import sys; from kilter.cli import main; sys.argv = ['kilter', *{words!r}]"
RUN = """
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""
NO_TORCH = "assert 'torch' not in sys.modules"
# As on Windows: no fcntl, no fork.
HIDE = """
import os, sys
sys.modules["fcntl"] = None
for name in ("fork", "register_at_fork", "forkpty"):
    delattr(os, name)
"""


def cpu_seconds(*words: str) -> float:
    """The CPU time of one command; the least of three, for other work on the machine only adds to it."""
    least = float("inf")
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        code = "\n".join([MAIN.format(words=words), RUN])
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        least = min(least, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return least


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["compare", "--help"], ["methods"], ["version"]])
def test_no_torch_for_help_and_lists(words):
    code = "\n".join([MAIN.format(words=words), RUN, NO_TORCH])
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_help_and_methods_are_fast():
    assert cpu_seconds("--help") < 1.0  # the target is 0.5 s; twice that, for slow machines
    assert cpu_seconds("methods") < 2.0  # the target is 1 s


@pytest.mark.processes
def test_a_run_with_one_worker_needs_neither_fcntl_nor_fork(tmp_path):
    words = ["run", "--rows", "200", "--clients", "2", "--model", "linear", "--rounds", "1", "--workers", "1"]
    for command, first in (
        (["--help"], ""),
        (words, "import torch, sklearn.datasets"),
    ):  # they use fork if there is one
        code = "\n".join([first, HIDE, MAIN.format(words=command), RUN])
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=os.environ, check=False
        )
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/fedavg-digits-0/summary.json").exists()


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "kilter", "version"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([sys.executable, "-m", "kilter", "resume", "nothing-here"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
