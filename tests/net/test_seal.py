"""A relay can neither read, alter, replay nor misdeliver a letter unnoticed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kilter.errors import Mistake
from kilter.net import tls
from kilter.net.messages import Card, Order
from kilter.net.seal import Seal
from kilter.records import wire
from kilter.runtimes.step_names import StepName

PLACE = Order("0" * 32, "1" * 32, 1, 3, 2, StepName.spread("train"))
OTHER: dict[str, Any] = {"run": "2" * 32, "session": "2" * 32, "round": 4, "seq": 4, "step": StepName("train")}
LETTER = {"w": torch.arange(1000.0)}


@pytest.fixture(scope="module")
def seals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seal]:
    folder = tmp_path_factory.mktemp("seals")
    tls.new(folder, ["a", "b", "c"])
    return {name: Seal(name, tls.Identity.read(folder / name), folder / name) for name in "abc"}


@pytest.fixture
def cards(seals: dict[str, Seal]) -> dict[str, Card]:
    return {name: seal.card() for name, seal in seals.items()}


def test_the_receiver_reads_it_and_nobody_else(seals: dict[str, Seal], cards: dict[str, Card]) -> None:
    sealed = seals["a"].close(LETTER, "b", cards, PLACE)
    assert torch.equal(seals["b"].open(sealed, "a", cards, PLACE)["w"], LETTER["w"])
    plain = wire.encode(LETTER)
    assert plain[100:140] not in sealed.numpy().tobytes()
    with pytest.raises(wire.Malformed, match="misdelivered"):
        seals["c"].open(sealed, "a", cards, PLACE)
    again = seals["a"].close(LETTER, "b", cards, PLACE)
    assert not torch.equal(sealed, again)  # the same letter twice looks like two letters


@pytest.mark.parametrize("part", OTHER)
def test_it_counts_only_in_its_place(seals: dict[str, Seal], cards: dict[str, Card], part: str) -> None:
    sealed = seals["a"].close(LETTER, "b", cards, PLACE)
    with pytest.raises(wire.Malformed, match="replayed"):
        seals["b"].open(sealed, "a", cards, replace(PLACE, **{part: OTHER[part]}))


def test_it_counts_only_from_its_sender(seals: dict[str, Seal], cards: dict[str, Card]) -> None:
    sealed = seals["a"].close(LETTER, "b", cards, PLACE)
    with pytest.raises(wire.Malformed):
        seals["b"].open(sealed, "c", cards, PLACE)
    back = seals["b"].close(LETTER, "a", cards, PLACE)
    with pytest.raises(wire.Malformed):
        seals["b"].open(back, "a", cards, PLACE)  # my own letter, reflected


def test_every_bit_counts(seals: dict[str, Seal], cards: dict[str, Card]) -> None:
    sealed = seals["a"].close({"n": 1}, "b", cards, PLACE)
    for at in range(len(sealed)):
        changed = sealed.clone()
        changed[at] ^= 1
        with pytest.raises(wire.Malformed):
            seals["b"].open(changed, "a", cards, PLACE)
    for short in (sealed[:-1], sealed[:10], sealed.float(), None, {"x": 1}):
        with pytest.raises(wire.Malformed):
            seals["b"].open(short, "a", cards, PLACE)


def test_a_relay_cannot_put_its_own_key_in_between(
    seals: dict[str, Seal], cards: dict[str, Card], tmp_path: Path
) -> None:
    tls.new(tmp_path / "own", ["b"])
    false = Seal("b", tls.Identity.read(tmp_path / "own/b"), tmp_path / "own/b")  # its own authority
    for card in (
        false.card(),
        replace(cards["b"], public=false.card().public),
        cards["c"],
        Card(false.card().public),
        Card(""),
        None,
        replace(cards["b"], signature="!"),
    ):
        with pytest.raises(wire.Malformed, match="trusted"):
            seals["a"].close(LETTER, "b", {**cards, "b": card}, PLACE)


def test_the_key_outlives_a_restart(tmp_path: Path) -> None:
    tls.new(tmp_path, ["a"])
    me = tls.Identity.read(tmp_path / "a")
    assert Seal("a", me, tmp_path / "s").card().public == Seal("a", me, tmp_path / "s").card().public
    assert (tmp_path / "s/seal.key").stat().st_mode & 0o077 == 0
    (tmp_path / "s/seal.key").chmod(0o644)
    with pytest.raises(Mistake, match="chmod 600"):
        Seal("a", me, tmp_path / "s")
