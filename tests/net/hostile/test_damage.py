"""Flipped bits in every file that a run or a site depends on: refused in one sentence, or without effect; never a wrong result."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import pytest
from mutate import flip_bit

from kilter.errors import Mistake
from kilter.federate import federate
from kilter.records.run_folder import Store
from small import federation, method, same


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of SCAFFOLD, stopped after two of four rounds."""
    folder = tmp_path_factory.mktemp("run")
    store = Store(folder)
    with federation() as fed:
        federate(method("scaffold"), fed, 2, store=store, checkpoint_seconds=0.0)
    store.close()
    (folder / "summary.json").unlink()
    (folder / "checksums.json").unlink()
    return folder


def resume(folder: Path) -> object:
    store = Store(folder)
    try:
        with federation() as fed:
            return federate(method("scaffold"), fed, 4, store=store).state
    finally:
        store.close()


@pytest.mark.parametrize("part", ["checkpoint.safetensors", "nodes", "rounds.jsonl"])
def test_a_run_is_never_resumed_from_damaged_files(stopped: Path, part: str, tmp_path: Path) -> None:
    rng = Random(part)
    shutil.copytree(stopped, tmp_path / "good")
    straight = resume(tmp_path / "good")
    refused = 0
    for k in range(40):
        folder = tmp_path / str(k)
        shutil.copytree(stopped, folder)
        files = sorted((folder / part).glob("*@*")) if part == "nodes" else [folder / part]
        path = rng.choice(files)
        path.write_bytes(flip_bit(rng, path.read_bytes()))
        try:
            state = resume(folder)
        except Mistake as e:
            refused += 1
            assert "\n" not in str(e)  # noqa: PT017 - one sentence
        else:
            assert same(state, straight)
        shutil.rmtree(folder)
    assert refused >= 38


def test_a_finished_run_is_not_extended_with_a_damaged_best_model(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with federation() as fed:
        federate(method("scaffold"), fed, 2, store=store)
    store.close()
    kept = tmp_path / "nodes" / "best.safetensors"
    kept.write_bytes(flip_bit(Random(0), kept.read_bytes()))
    store = Store(tmp_path)
    with pytest.raises(Mistake, match="altered or damaged"), federation() as fed:
        federate(method("scaffold"), fed, 4, store=store, extend=lambda: None)
    store.close()
