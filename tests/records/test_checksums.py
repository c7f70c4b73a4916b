"""Altered checkpoints, node states and records are refused in one sentence (finding 6)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kilter.errors import Mistake
from kilter.records import wire
from kilter.records.codec import to_json
from kilter.records.run_folder import Saved, Store, read_rounds, read_summary
from kilter.records.types import Checkpoint, Clients, ClientsAt, Evaluation, Round, Summary

LAST = Evaluation(2, "global", None)
SUMMARY = Summary(method="fedavg", rounds=2, seed=0, clients=2, topology="star", global_accuracy=0.5, last=LAST)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = Store(tmp_path)
    for round in range(3):
        store.append(Round(round=round, loss=0.5))
        states = {name: {"c": torch.full((4,), float(k + round))} for k, name in enumerate("ab")}
        store.save(Saved(Checkpoint(round=round), {"w": torch.arange(4.0)}, "", None, states), "ab")
    store.finish(SUMMARY, Clients(ClientsAt(2, {})))
    store.close()
    return tmp_path


def load(folder: Path) -> object:
    store = Store(folder)
    try:
        return store.load()
    finally:
        store.close()


def test_an_unaltered_run_loads(folder: Path) -> None:
    assert load(folder)
    assert len(read_rounds(folder)) == 3
    assert read_summary(folder) == SUMMARY


@pytest.mark.parametrize("name", ["checkpoint.safetensors", "nodes/a@2.safetensors"])
def test_a_flipped_bit_in_a_checkpoint_or_node_state_is_noticed(folder: Path, name: str) -> None:
    path = folder / name
    good = path.read_bytes()
    for at in range(0, len(good), 3):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(Mistake):
            load(folder)
    path.write_bytes(good)
    assert load(folder)


def test_exchanged_node_states_are_noticed(folder: Path) -> None:
    a, b = folder / "nodes/a@2.safetensors", folder / "nodes/b@2.safetensors"
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    with pytest.raises(Mistake, match="altered"):
        load(folder)


@pytest.mark.parametrize("change", [("0.5", "0.9"), (to_json(Round(round=1, loss=0.5)) + "\n", "")])
def test_edited_records_are_noticed(folder: Path, change: tuple[str, str]) -> None:
    path = folder / "rounds.jsonl"
    path.write_text(path.read_text().replace(*change, 1))
    with pytest.raises(Mistake, match="altered"):
        read_rounds(folder)
    (folder / "checksums.json").unlink()  # a run that is not finished is protected by its checkpoint
    with pytest.raises(Mistake, match="altered"):
        load(folder)


def test_an_edited_summary_is_noticed(folder: Path) -> None:
    path = folder / "summary.json"
    path.write_text(path.read_text().replace("0.5", "0.99"))
    with pytest.raises(Mistake, match="altered"):
        read_summary(folder)


def test_a_checked_tree_is_an_ordinary_file_with_a_checksum() -> None:
    tree = {"w": torch.arange(6.0).reshape(2, 3), "n": 3, "empty": torch.empty(0)}
    data = wire.encode(tree, checked=True)
    assert torch.equal(wire.decode(data)["w"], tree["w"])
    for at in range(len(data)):
        with pytest.raises(wire.Malformed):
            wire.decode(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
