"""A node's mail is checked before it is read, as replies are."""

from __future__ import annotations

import torch

from kilter.core import Federation, Method, Node, Tree, step
from kilter.runtimes.reply_checks import checked
from kilter.runtimes.step_names import StepName
from kilter.train import SGD


class Writes(Method):
    def setup(self, fed: Federation) -> None:
        return None

    def round(self, fed: Federation, state: Tree) -> None:
        return None

    @step
    def train(self, node: Node, _: Tree) -> Tree:
        return None

    @step(alike=False)
    def tell(self, node: Node, _: Tree) -> Tree:
        return None


METHOD = Writes(task=None, local=SGD())  # type: ignore[arg-type]
BOX = {"a": torch.ones(2), "b": torch.ones(3), "c": torch.tensor([1.0, float("nan")]), "d": torch.ones(2)}


def test_what_is_pooled_looks_like_mine_or_like_most() -> None:
    assert set(checked(BOX, METHOD, StepName.spread("train"), "b")[0]) == {"b"}
    fine, notes = checked(BOX, METHOD, StepName.spread("train"), "z")
    assert set(fine) == {"a", "d"}
    assert len(notes) == 2


def test_what_is_absurdly_large_is_not_pooled() -> None:
    box = {"a": torch.ones(2), "b": torch.full((2,), 1e9), "c": torch.full((2,), 50.0)}
    fine, notes = checked(box, METHOD, StepName.spread("train"), "a")
    assert set(fine) == {"a", "c"}
    assert notes == ["the letter of b is far too large"]
    assert set(checked(box, METHOD, StepName.spread("train"), "z")[0]) == {
        "a",
        "c",
    }  # one of three, to one who wrote none
    assert set(checked({k: box[k] for k in "ab"}, METHOD, StepName.spread("train"), "z")[0]) == {
        "a",
        "b",
    }  # who of two is it?
    assert set(checked({"a": torch.zeros(2), "b": torch.ones(2)}, METHOD, StepName.spread("train"), "a")[0]) == {
        "a",
        "b",
    }


def test_where_letters_differ_by_nature_only_numbers_are_looked_at() -> None:
    for written in ("spread:tell", "judge"):
        assert set(checked(BOX, METHOD, StepName.parse(written), "a")[0]) == {"a", "b", "d"}


def test_the_simulator_looks_at_letters_as_the_network_does() -> None:
    """Peers that pool leave out whoever writes another shape, and say so."""
    from kilter import federate
    from kilter.core import Post
    from kilter.runtimes.simulation import Simulation
    from small import bench, method, skewed

    class Liars(Simulation):
        def deliver(self, posts, name):  # type: ignore[no-untyped-def]
            lie = {to: ({"w": torch.ones(3)}, 5) for to in posts["c1"] if to != "c1"}
            return super().deliver({**posts, "c1": Post({**posts["c1"], **lie})}, name)

    with Liars(skewed(4), bench=bench(), topology="full") as fed:
        actual = federate(method("fedavg"), fed, 2)
    said = {n.node: n.text for n in actual.rounds[-1].notes}
    assert said == dict.fromkeys(["c0", "c2", "c3"], "the letter of c1 differs in shape from mine")
