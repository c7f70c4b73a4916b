"""What tests of commands share."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kilter import cli


@pytest.fixture
def kilter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs the command in this process: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger("kilter.net"), "handlers", [])  # a command may set a handler of its own
    monkeypatch.setattr(logging.getLogger("kilter.net"), "propagate", True)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kilter", *words])
        code = 0
        try:
            cli.main()
        except SystemExit as e:
            code = int(e.code or 0)
        return (code, *capfd.readouterr())

    return run
