"""CM: HDBSCAN's known labels, noise that trains alone, and who is absent."""

from __future__ import annotations

from typing import Any

import torch
from acting import hub, models

from kilter.core import Data, Replies, Rows
from kilter.federate import federate
from kilter.methods.cm import CM
from kilter.params import average
from kilter.train import SGD
from small import digits, federation, method, mlp_task, near, normed_task, same

VECTORS = [
    (1, 0.02, 0),
    (1, -0.03, 0.01),
    (1, 0.05, 0.02),
    (0.02, 1, 0),
    (-0.01, 1, 0.03),
    (0.04, 1, -0.02),
    (-1, -1, 0),
]
NAMES = [f"c{k}" for k in range(7)]


def cm(**settings: Any) -> CM:
    return CM(task=mlp_task(), local=SGD(lr=0.1, batch=16), **settings)


def played(run: CM, who: list[str], round: int = 2) -> tuple[Any, Any, dict[str, Any]]:
    """One round in which the output layer's first three weights move as VECTORS say."""
    state = run.setup(type("Fed", (), {"seed": 0, "ids": tuple(NAMES)})())
    start, replies = state[0]["w"], {}
    for i in who:
        moved = {k: v.clone() for k, v in start.items()}
        moved["head.weight"][0, :3] += torch.tensor(VECTORS[NAMES.index(i)])
        moved["body.1.weight"] += 0.01 * NAMES.index(i)  # which must not count
        replies[i] = moved, 10 + NAMES.index(i)
    return state, run.combine(hub(round), state, Replies(replies, 7)), replies


def test_clusters_are_averaged_and_noise_continues_alone() -> None:
    _, after, replies = played(cm(), NAMES)
    assert [c["ids"] for c in after] == [["c0", "c1", "c2"], ["c3", "c4", "c5"], ["c6"]]
    assert same(after[0]["w"], average(replies[i] for i in ("c0", "c1", "c2")))
    assert same(after[2]["w"], replies["c6"][0])


def test_the_first_round_is_fedavg() -> None:
    _, after, replies = played(cm(), NAMES, round=1)
    assert [c["ids"] for c in after] == [NAMES]
    assert same(after[0]["w"], average(replies.values()))
    task = normed_task()
    with federation(stack=False) as fed:
        (one,) = federate(method("cm", task), fed, 1).state
    assert same(one["w"], models("fedavg", 1, task=task))


def test_an_absent_client_keeps_its_last_model() -> None:
    before, after, _ = played(cm(), ["c0", "c1", "c2", "c4", "c5"])
    assert [c["ids"] for c in after] == [["c0", "c1", "c2"], ["c4", "c5"], ["c3", "c6"]]
    assert same(after[2]["w"], before[0]["w"])


def test_once_clusters_only_one_time() -> None:
    run = cm(once=True)
    _, clusters, replies = played(run, NAMES, round=2)
    moved = {i: replies[NAMES[6 - k]] for k, i in enumerate(NAMES)}  # everyone turns elsewhere
    for again, same_ids in ((run, True), (cm(), False)):
        after = again.combine(hub(3), clusters, Replies(moved, 7))
        assert ([c["ids"] for c in after] == [c["ids"] for c in clusters]) == same_ids


def test_two_groups_of_clients_are_separated() -> None:
    table, made = digits(), {}
    for k in range(6):
        part = table.take(torch.arange(200 * k, 200 * k + 200))
        rows = Rows.of(x=part["x"], y=part["y"] if k < 3 else 9 - part["y"])
        made[f"c{k}"] = Data(*(rows.take(torch.arange(a, b)) for a, b in ((0, 150), (150, 170), (170, 200))))
    with federation(made, bench=None) as fed:
        result = federate(method("cm", local=SGD(lr=0.2, batch=32)), fed, 8)
    groups = [set(c["ids"]) for c in result.state]
    assert all(g <= {"c0", "c1", "c2"} or g <= {"c3", "c4", "c5"} for g in groups)
    assert result.summary.client_accuracy.mean > 0.6
    assert result.model is None


def test_only_the_output_layer_is_clustered() -> None:
    run = cm()
    state, _, replies = played(run, NAMES)
    moves = torch.stack([(r[0]["head.weight"] - state[0]["w"]["head.weight"])[0, :3] for r in replies.values()])
    assert near({"a": moves}, {"a": torch.tensor(VECTORS)}, 1e-5)
