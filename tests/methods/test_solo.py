"""SOLO: nothing leaves a node, and nothing comes in."""

from __future__ import annotations

from acting import states

from small import (
    near,
    normed_task,
    same,
    skewed,
)


def test_a_node_does_not_depend_on_the_data_of_others() -> None:
    clients, others = skewed(seed=0), skewed(seed=9)
    _, one = states("solo", clients, 2, normed_task())
    _, two = states("solo", {"c0": clients["c0"]} | {i: others[i] for i in ("c1", "c2")}, 2, normed_task())
    _, three = states("solo", {"x": others["c1"], "c0": clients["c0"]}, 2, normed_task())
    assert same(one["c0"], two["c0"])
    assert same(one["c0"], three["c0"])
    assert not near(one["c1"]["w"], two["c1"]["w"], 1e-3)
