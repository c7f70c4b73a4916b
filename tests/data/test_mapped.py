"""Mapped arrays: what was read is released, so that data larger than memory can be used."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from kilter.data import mapped


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_thread_releases_what_was_read_and_the_array_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "x.npy", np.arange(2**24, dtype=np.uint8).reshape(-1, 1024))  # 16 MB
    monkeypatch.setattr(mapped, "WATCHED", 2**20)
    monkeypatch.setattr(mapped, "GROWTH", 2**22)
    monkeypatch.setattr(mapped, "_watching", False)
    monkeypatch.setattr(mapped.os, "register_at_fork", lambda **_: None)
    x = torch.from_numpy(mapped.open_mapped(tmp_path / "x.npy"))
    before = mapped._shared_bytes()
    total = int(x.sum(dtype=torch.int64))
    end = time.monotonic() + 20
    while mapped._shared_bytes() - before > 2**23 and time.monotonic() < end:
        time.sleep(0.02)
    assert mapped._shared_bytes() - before <= 2**23
    assert int(x.sum(dtype=torch.int64)) == total == 2**16 * (255 * 128)
