"""A hundred thousand mutated messages: parsed into something of the right type, or refused as malformed; nothing else."""

from __future__ import annotations

import json
from random import Random

import pytest
import torch
from mutate import mutate_bytes, mutate_head
from raw import letter
from test_messages import MESSAGES

from kilter.net.frames import parse_head, to_frames, unpack_letter
from kilter.net.results import StepResult
from kilter.records import wire

TREE = {"w": torch.ones(3, 2), "n": 5, "t": (1, [None, 2.5, "x"], b"y"), "deep": {"a": {"b": torch.tensor(1)}}}
LETTERS = [
    wire.encode(TREE),
    letter(TREE),
    wire.encode([]),
    wire.encode({"d": {"t": "x"}}),
    wire.encode(TREE, checked=True),
]
FRAMES = [next(to_frames(message.head())) for message in MESSAGES]


@pytest.mark.parametrize("seed", range(4))
def test_thirty_thousand_mutated_messages(seed: int) -> None:
    rng = Random(seed)
    refused = 0
    for k in range(30_000):
        try:
            if k % 3 == 0:
                StepResult.parse(wire.decode(mutate_bytes(rng, rng.choice(LETTERS))))
            elif k % 3 == 1:
                at = rng.randrange(len(MESSAGES))
                head, _ = parse_head(mutate_bytes(rng, FRAMES[at]), 2**24)
                type(MESSAGES[at]).parse(head)
            else:
                message = rng.choice(MESSAGES)
                parsed = type(message).parse(mutate_head(rng, message.head()))
                json.dumps(parsed.head(), allow_nan=False)
        except wire.Malformed:
            refused += 1
    assert refused > 15_000


def test_mutated_letters_in_one_piece() -> None:
    rng = Random(9)
    whole = [len(f).to_bytes(4, "little") + f for f in FRAMES]
    for _ in range(10_000):
        try:
            unpack_letter(mutate_bytes(rng, rng.choice(whole)))
        except wire.Malformed:
            continue
