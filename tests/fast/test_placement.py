"""Devices. The tests themselves are in on_mock_device.py.

They run in processes of their own: autograd starts threads for a device, and a process with such threads cannot fork workers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).with_name("on_mock_device.py")


LONG = "killed and (feddisk or slfed)"


@pytest.mark.parametrize(
    "part",
    [
        pytest.param("every_method and True", marks=pytest.mark.slow),
        pytest.param("every_method and False", marks=pytest.mark.slow),
        pytest.param(f"not every_method and not ({LONG})", marks=pytest.mark.slow),
        pytest.param(LONG, marks=pytest.mark.slow),
    ],
)
def test_on_a_device_that_exists_only_in_python(part: str) -> None:
    words = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-k", part, str(TESTS)]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTEST_ADDOPTS": ""})
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
