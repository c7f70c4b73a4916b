"""Lying members against an honest server: two thousand strange replies, and the honest members' result every time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from mutate import mutate_bytes, mutate_head, strange, strange_tree
from raw import letter, reply_head
from test_enemies import NAMES, Camp
from test_peer_transport import until

from kilter.net import tls
from kilter.net.frames import to_frames
from kilter.records import wire
from kilter.runtimes.step_names import EVALUATE, StepName
from small import method

REPORT = {"n_test": 5, "n_valid": 5, "test": {"loss": 0.5}, "valid": None}


@pytest.fixture
def camp(tmp_path: Path) -> Iterator[Camp]:
    tls.new(tmp_path, ["server", *NAMES, "stranger"])
    made = Camp(tmp_path, deadline=20.0)
    made.runtime.bind(method("fedavg"))
    made.runtime.round = 1
    made.honest("a", "b")
    yield made
    made.end()


@pytest.mark.parametrize("seed", range(4))
def test_strange_replies_are_their_senders_failure(camp: Camp, seed: int) -> None:
    rng = Random(seed)
    honest = {"w": torch.ones(3)}
    for _ in range(250):
        enemy = camp.enemy()
        camp.here("c")

        def lie(enemy: object = enemy) -> None:
            order = enemy.order()[0]  # type: ignore[attr-defined]
            head, body = reply_head("c", order), letter(strange_tree(rng, honest))
            match rng.randrange(5):
                case 0:
                    head = mutate_head(rng, head)
                case 1:
                    body = mutate_bytes(rng, body)
                case 2:
                    result = {"reply": honest, "fits": [], "seconds": 0.0, "notes": [strange(rng)]}
                    body = wire.encode({**result, rng.choice(list(result)): strange(rng)})
                case 3:
                    head["letters"] = True
            try:
                frames = list(to_frames(head, body))
            except (TypeError, ValueError):
                frames = [b"H{"]
            for frame in frames if rng.random() < 0.9 else [mutate_bytes(rng, f) for f in frames]:
                enemy.frame(frame)  # type: ignore[attr-defined]
            enemy.send({"kind": "refusal", "why": "done", "later": False})  # type: ignore[attr-defined]

        thread = threading.Thread(target=lie)
        thread.start()
        camp.runtime.round += 1
        replies = camp.ask()
        thread.join(30)
        camp.runtime.ledger.close()
        until(lambda: "c" not in camp.server.sites)  # it refused the terms at the end
        enemy.close()
        for name in ("a", "b"):
            assert torch.equal(replies[name]["w"], torch.ones(3))
        if "c" in replies:
            reply = replies["c"]
            assert set(reply) == {"w"}
            assert bool(torch.isfinite(reply["w"]).all())


def test_strange_evaluations_are_their_senders_failure(camp: Camp) -> None:
    rng = Random(7)
    camp.runtime.enough = 1
    for _ in range(200):
        enemy = camp.enemy()
        camp.here("c")

        def lie(enemy: object = enemy) -> None:
            order = enemy.order()[0]  # type: ignore[attr-defined]
            report = strange_tree(rng, {**REPORT, rng.choice([*REPORT, "local"]): strange(rng)})
            enemy.send(reply_head("c", order), letter(report))  # type: ignore[attr-defined]

        thread = threading.Thread(target=lie)
        thread.start()
        replies = camp.runtime.call(EVALUATE, {"w": torch.zeros(3)}, ["c"], training=False)
        thread.join(30)
        enemy.close()
        until(lambda: "c" not in camp.server.sites)
        assert set(replies) <= {"c"}
        for report in replies.values():
            assert 0 <= report["n_test"] <= 100
    assert set(camp.runtime.call(StepName("train"), {"w": torch.zeros(3)}, ["a", "b"])) == {"a", "b"}
