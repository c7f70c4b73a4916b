"""Laws of every method that averages models."""

from __future__ import annotations

import pytest
import torch
from acting import FULL, run
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.core import Data, Node, Params, Replies, Rows
from small import (
    digits,
    method,
    mlp_task,
    near,
    same,
    skewed,
)

AVERAGING = ["fedavg", "fedprox", "fedbn"]


def combine(name: str, replies: dict[str, tuple[Params, int]]) -> Params:
    run = method(name, mlp_task())
    return run.combine(Node("server", skewed()["c0"]), {}, Replies(replies, of=len(replies)))  # type: ignore[attr-defined]


def replies_of(*seeds: int) -> dict[str, tuple[Params, int]]:
    return {f"c{s}": (mlp_task().init(s), 10 + 7 * s) for s in seeds}


@pytest.mark.parametrize("name", AVERAGING)
def test_identical_models_come_back_bit_for_bit(name: str) -> None:
    one = mlp_task().init(1)
    assert same(combine(name, {f"c{k}": (one, 3 * k + 1) for k in range(7)}), one)


@pytest.mark.parametrize("name", AVERAGING)
@settings(max_examples=10)
@given(st.permutations(range(5)))
def test_the_order_of_clients_does_not_matter(name: str, order: list[int]) -> None:
    assert near(combine(name, replies_of(*range(5))), combine(name, replies_of(*order)), 1e-6)


@pytest.mark.parametrize("name", AVERAGING)
def test_an_average_lies_in_the_hull(name: str) -> None:
    replies = replies_of(*range(5))
    for k, v in combine(name, replies).items():
        stack = torch.stack([w[k] for w, _ in replies.values()])
        assert (v >= stack.min(0).values - 1e-7).all()
        assert (v <= stack.max(0).values + 1e-7).all()


@pytest.mark.parametrize("name", ["fedavg", "fedprox"])
def test_a_client_in_two_equal_halves_counts_as_one(name: str) -> None:
    """One full-batch epoch; weighing by n_k makes halves and whole the same."""
    clients = skewed()
    d = clients["c3"]
    half = len(d.train) // 2
    index = d.train.index[: 2 * half]
    clients["c3"] = Data(Rows(digits().tables, index), d.valid, d.test)
    whole = run(name, clients, 2, local=FULL).state
    halves = {k: v for k, v in clients.items() if k != "c3"} | {
        f"half{k}": Data(Rows(digits().tables, part), d.valid, d.test) for k, part in enumerate(index.split(half))
    }
    assert near(whole, run(name, halves, 2, local=FULL).state, 1e-5)
