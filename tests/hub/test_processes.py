"""Processes of hubs and agents end with their parent, whatever ends it, and say why they failed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kilter.errors import Mistake
from kilter.hub.child import exit_code
from kilter.hub.client import inside
from kilter.hub.processes import ChildProcess, last_message
from kilter.net.approvals import NotApproved
from kilter.net.policy import PolicyViolation

CHILD = """
import os, time
from kilter.hub.child import end_with_parent
end_with_parent()
print(os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE)
time.sleep(60)
"""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


def test_a_child_ends_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert is_alive(child)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    until = time.monotonic() + 20
    while is_alive(child) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_alive(child)


def test_the_exit_code_and_the_last_line_say_why(tmp_path: Path) -> None:
    async def run() -> int:
        child = await ChildProcess.start(["serve", "nothing.toml"], tmp_path / "log.txt")
        return await child.wait()

    assert asyncio.run(run()) == 2
    assert "TLS" in last_message(tmp_path / "log.txt") or "nothing.toml" in last_message(tmp_path / "log.txt")


def test_refusals_have_exit_codes_of_their_own() -> None:
    assert [exit_code(e) for e in (Mistake("x"), PolicyViolation("x"), NotApproved("0" * 32))] == [2, 10, 11]


def test_the_last_message_of_a_log(tmp_path: Path) -> None:
    assert last_message(tmp_path / "none") == ""
    (tmp_path / "log").write_text("info: began\nkilter: The disk is full.\ninfo: later\n")
    assert last_message(tmp_path / "log") == "The disk is full."


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "", "a\\b"])
def test_a_fetched_file_stays_in_its_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(Mistake, match="impossible name"):
        inside(tmp_path, name)


def test_a_fetched_file_may_have_folders(tmp_path: Path) -> None:
    assert inside(tmp_path, "runs/x/summary.json") == tmp_path / "runs/x/summary.json"
