"""A run folder: written whole or not at all, by one process at a time, and foreign things are left alone."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from kilter.core import AtNodes
from kilter.errors import Mistake
from kilter.federate import federate
from kilter.records import run_folder as module
from kilter.records import wire
from kilter.records.run_folder import CHECKPOINT, Saved, Store, read_rounds, write
from kilter.records.types import Checkpoint, Round
from small import federation, method, same


def failing(code: int) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    return fail


# One file ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["replace", "fsync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, code: int
) -> None:
    path = tmp_path / "summary.json"
    write(path, "old")
    monkeypatch.setattr(module.os, where, failing(code))
    with pytest.raises(Mistake) as actual:
        write(path, "new" * 1000)
    assert ("disk is full" in str(actual.value)) == (code in (errno.ENOSPC, errno.EDQUOT))
    assert str(path) in str(actual.value)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["summary.json"]


def test_a_disk_that_fills_in_the_middle(tmp_path: Path) -> None:
    """A real full disk: /dev/full takes nothing."""
    path = tmp_path / "x"
    (tmp_path / "x.new").symlink_to("/dev/full")
    write(tmp_path / "y", "fine")
    with pytest.raises(Mistake, match="disk is full"):
        write(path, b"0" * 100_000)
    assert not path.exists()


def test_nobody_sees_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    write(path, "old")
    seen: list[str] = []
    real = os.replace

    def replace(a: Any, b: Any) -> None:
        seen.extend([path.read_text(), Path(a).read_text()])
        real(a, b)

    monkeypatch.setattr(module.os, "replace", replace)
    write(path, "new")
    assert seen == ["old", "new"]
    assert path.read_text() == "new"


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(Mistake, match="could not be written"):
            Store(folder)
    with pytest.raises(Mistake, match="could not be written"):
        write(tmp_path / "file" / "x", "text")
    assert (tmp_path / "file").read_text() == "mine"


# Rounds --------------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.integers(0, 400))
def test_a_torn_line_does_not_count(cut: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        for k in range(5):
            store.append(Round(round=k, participants=["é" * 10]))
        path = store.path("rounds.jsonl")
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) - cut % len(whole)])
        kept = store.rounds()
        assert [r.round for r in kept] == list(range(len(kept)))
        assert len(kept) >= (len(whole) - cut % len(whole)) // (len(whole) // 5) - 1
        assert store.rewind(1) == kept[:2]
        store.append(Round(round=9))
        assert [r.round for r in store.rounds()] == [r.round for r in kept[:2]] + [9]
        store.close()


def test_a_line_of_rubbish_ends_the_reading(tmp_path: Path) -> None:
    (tmp_path / "rounds.jsonl").write_bytes(b'{"round": 0, "format": 2}\n\xff\xfe\n{"round": 2, "format": 2}\n')
    assert read_rounds(tmp_path) == [Round(round=0)]
    assert read_rounds(tmp_path / "nowhere") == []


def test_a_full_disk_while_appending(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.path("rounds.jsonl").symlink_to("/dev/full")
    with pytest.raises(Mistake, match="disk is full"):
        store.append(Round(round=1, participants=["x" * 100_000]))


# Checkpoints ---------------------------------------------------------------------------------------------------------

STATES = {"a/b é": {"c": torch.arange(3.0)}, "b": {"n": (1, [None, "x"]), "bn": {"~m": torch.tensor(3)}}}


def save(store: Store, round: int, nodes: dict[str, Any], changed: Any) -> None:
    store.save(Saved(Checkpoint(round=round), None, "", None, nodes), changed)


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.load() is None
    at = Checkpoint(round=3, stale=2, score=0.5)
    store.save(Saved(at, (AtNodes(), torch.ones(2)), "b", {"seed": 7}, STATES), STATES)
    store.close()
    back = Store(tmp_path).load()
    assert back is not None
    assert (back.at, back.role, back.experiment) == (at, "b", {"seed": 7})
    assert isinstance(back.state[0], AtNodes)
    assert same((back.state[1], back.nodes), (torch.ones(2), STATES))


def test_only_what_changed_is_written_and_the_old_goes(tmp_path: Path) -> None:
    store = Store(tmp_path)
    save(store, 1, STATES, STATES)
    files = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "nodes").iterdir()}
    assert set(files) == {"a%2Fb%20%C3%A9@1.safetensors", "b@1.safetensors"}
    changed = STATES | {"b": {"n": 2}}
    save(store, 2, changed, ["b"])
    assert {p.name for p in (tmp_path / "nodes").iterdir()} == {"a%2Fb%20%C3%A9@1.safetensors", "b@2.safetensors"}
    store.close()
    actual = Store(tmp_path).load()
    assert actual is not None
    assert same(actual.nodes, changed)


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_save_that_fails_anywhere_leaves_the_last_checkpoint_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    store = Store(tmp_path)
    save(store, 1, STATES, STATES)
    calls = 0
    real = os.replace

    def replace(a: Any, b: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise OSError(errno.ENOSPC, "no space")
        real(a, b)

    monkeypatch.setattr(module.os, "replace", replace)
    with pytest.raises(Mistake, match="try again; nothing is lost"):
        save(store, 2, {k: {"new": 1} for k in STATES}, STATES)
    store.close()
    monkeypatch.undo()
    actual = Store(tmp_path).load()
    assert actual is not None
    assert same((actual.at.round, actual.nodes), (1, STATES))
    assert len(list((tmp_path / "nodes").iterdir())) == 2  # what the failed save left is gone


def test_a_full_disk_in_a_run_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = method("scaffold")
    straight = federate(run, federation(), 4)
    real, calls = os.replace, 0

    def replace(a: Any, b: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 17:
            raise OSError(errno.ENOSPC, "no space")
        real(a, b)

    store = Store(tmp_path)
    monkeypatch.setattr(module.os, "replace", replace)
    with pytest.raises(Mistake, match="disk is full"):
        federate(run, federation(), 4, store=store, checkpoint_seconds=0)
    assert not (tmp_path / "summary.json").exists()
    store.close()
    resumed = federate(run, federation(), 4, store=Store(tmp_path))
    assert same(resumed.state, straight.state)


# Foreign and damaged folders -----------------------------------------------------------------------------------------


def damaged(tmp_path: Path, data: bytes, name: str = CHECKPOINT) -> None:
    store = Store(tmp_path)
    save(store, 1, {"a": {"x": 1}}, ["a"])
    store.path(name).write_bytes(data)
    store.close()
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(Mistake, match=f"'{tmp_path}.*(cannot be read|was altered)"):
        Store(tmp_path).load()
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"rubbish",
        wire.encode({"round": 1}),
        wire.encode(3),
        wire.encode([1]),
        wire.encode(torch.ones(3)),
        wire.encode({"round": 1, "nodes": [1], "progress": {}}),
        wire.encode({"round": 1, "nodes": {"b": 7}, "progress": {}}),
    ],
)
def test_a_checkpoint_that_is_none_of_ours_is_one_sentence_and_stays(tmp_path: Path, content: bytes) -> None:
    damaged(tmp_path, content)


def test_a_node_that_is_damaged_or_gone(tmp_path: Path) -> None:
    damaged(tmp_path, b"\0" * 20, "nodes/a@1.safetensors")
    (tmp_path / "nodes" / "a@1.safetensors").unlink()
    with pytest.raises(Mistake, match="cannot be read"):
        Store(tmp_path).load()


def test_someone_elses_safetensors_is_not_a_checkpoint(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / CHECKPOINT)
    with pytest.raises(Mistake, match="damaged or from another program"):
        federate(method("fedavg"), federation(), 1, store=Store(tmp_path))


def test_what_is_not_ours_in_the_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "nodes" / "mine").mkdir(parents=True)
    for name in ("nodes/thesis.tex", "nodes/mine/data.csv", "notes.md"):
        (tmp_path / name).write_text("precious")
    federate(method("scaffold"), federation(), 2, store=Store(tmp_path), checkpoint_seconds=0)
    for name in ("nodes/thesis.tex", "nodes/mine/data.csv", "notes.md"):
        assert (tmp_path / name).read_text() == "precious"


def test_summary_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    real = os.replace

    def replace(a: Any, b: Any) -> None:
        written.append(Path(b).name)
        real(a, b)

    monkeypatch.setattr(module.os, "replace", replace)
    federate(method("fedavg"), federation(), 1, store=Store(tmp_path))
    assert written[-1] == "summary.json"
    assert written.index(CHECKPOINT) < written.index("model.safetensors") < written.index("clients.json")
    assert json.loads((tmp_path / "summary.json").read_text())["rounds"] == 1


# One at a time -------------------------------------------------------------------------------------------------------


def test_one_process_at_a_time(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(Mistake, match="Another process is working"):
        Store(tmp_path)
    code = f"from kilter import Store, Mistake\ntry: Store({str(tmp_path)!r})\nexcept Mistake as e: print(e)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "Another process is working" in said
    store.close()
    Store(tmp_path).close()


def test_a_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    store = Store(tmp_path)
    read, wrote = os.pipe()
    child = os.fork()
    if not child:
        os.read(read, 1)
        os._exit(0)
    try:
        with pytest.raises(Mistake):
            Store(tmp_path)
        store.close()
        until = time.monotonic() + 20  # the child may not have run yet
        while True:
            try:
                Store(tmp_path).close()
                break
            except Mistake:
                assert time.monotonic() < until, "the child holds the lock"
                time.sleep(0.01)
    finally:
        os.write(wrote, b"x")
        os.waitpid(child, 0)
