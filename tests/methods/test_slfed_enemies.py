"""SLFed: peers that lie about counts, opinions, models and letters."""

import pytest
import torch
from slfed_peers import PEERS, chosen, method, models

from kilter import federate
from kilter.blocks.commitment import commitment
from kilter.blocks.secure_sum import SCHEMES, scratch
from kilter.core import Node, Post
from kilter.runtimes.simulation import Simulation
from small import bench, skewed


def test_counts_that_differ_from_the_commitment_are_not_used():
    node = Node("A", None, round=1, step="opine", peers=("B",))
    mine, true, echo = torch.tensor([3, 4]), torch.tensor([9, 0]), torch.tensor([3, 4])
    scratch(node).update(mine=mine, heard={"B": mine}, yours={"B": mine}, committed={"B": commitment(true, 7, "B")})
    assert method().opine(node, {"B": {"counts": echo, "nonce": 7}}) == Post()
    assert node.state["evidence"] == {}
    assert any("not those committed to" in str(note) for note in node.notes)


def test_a_copied_commitment_is_worth_nothing():
    """B repeats A's own commitment, and later the counts and the nonce that A revealed."""
    node = Node("A", None, round=1, step="opine", peers=("B",))
    mine = torch.tensor([3, 4])
    copied = commitment(mine, 7, "A")
    scratch(node).update(mine=mine, heard={"B": mine}, yours={"B": mine}, committed={"B": copied})
    assert method().opine(node, {"B": {"counts": mine, "nonce": 7}}) == Post()
    assert node.state["evidence"] == {}


def test_counts_repeated_from_an_earlier_round_are_not_noticed():
    """What remains possible (docs/methods/slfed.md): B commits to what A said of its pictures last time, and repeats A's counts."""
    node = Node("A", None, round=2, step="opine", peers=("B",))
    mine, of_b = torch.tensor([3, 4]), torch.tensor([7, 0])
    scratch(node).update(mine=mine, heard={"B": mine}, yours={"B": of_b}, committed={"B": commitment(of_b, 7, "B")})
    method(prior=0.0).opine(node, {"B": {"counts": of_b, "nonce": 7}})
    assert node.state["evidence"]["B"] == pytest.approx((1.0, 0.0))


def test_counts_are_hidden_until_both_sides_have_committed():
    """The letter with the pictures has no counts; they follow once the partner's counts have arrived."""
    seen = {}

    class Spy(Simulation):
        def deliver(self, posts, name):
            seen[str(name)] = posts
            return super().deliver(posts, name)

    with Spy(skewed(PEERS), bench=bench(), topology="full") as fed:
        federate(method(), fed, 1)
    for letter in seen["train"]["c0"].values():
        assert set(letter) == {"painted", "commitment", "pictures"}
    for letter in seen["reveal"]["c0"].values():
        assert set(letter) == {"counts", "nonce"}


def test_a_peer_cannot_recommend_itself():
    node = Node("A", None, round=1, peers=("B", "C"))
    scratch(node)["news"] = ["B"]
    node.state["evidence"] = {"B": (2.0, 1.0)}
    honest = chosen(node, {"B": {"C": (0.2, 0.2, 0.6)}})["B"]
    node.state.pop("known")
    assert chosen(node, {"B": {"C": (0.2, 0.2, 0.6), "B": (1.0, 0.0, 0.0)}})["B"] == honest


NONSENSE = {
    "train": {"painted": 1, "commitment": "", "pictures": torch.zeros(3, 1, 2, 2)},
    "judge": {"counts": torch.zeros(7, dtype=torch.int64), "kept": True},
    "reveal": {"counts": torch.zeros(10, dtype=torch.int64), "nonce": "none"},
    "opine": {"c2": (5.0, -4.5, 0.5), "c3": "trust me", "c4": None},
    "choose": "all of you",
    "split": {f"c{k}": {"layer": torch.zeros(2)} for k in range(PEERS)},
    "add_up": {"sum": {"layer": torch.zeros(2)}, "of": [1, 2]},
}


@pytest.mark.parametrize("share", SCHEMES)
def test_invalid_letters_are_ignored(share):
    """Whatever it writes, others go on without it, as if it were silent."""

    class Liars(Simulation):
        stage = ""

        def deliver(self, posts, name):
            if name == self.stage:
                posts = {**posts, "c1": Post(dict.fromkeys((i for i in self.ids if i != "c1"), NONSENSE[name]))}
            return super().deliver(posts, name)

    for stage in NONSENSE:
        with Liars(skewed(PEERS), bench=bench(), topology="full") as fed:
            fed.stage = stage
            federate(method(share=share), fed, 1)
            for w in models(fed.states).values():
                assert all(torch.isfinite(v).all() and v.abs().max() < 20 for v in w.values())


@pytest.mark.parametrize("share", ["ring", "threshold"])
def test_a_lying_contributor_does_not_ruin_the_others(share):
    """It adds 1e6 to every sum that it returns, in one round; nobody adopts such a model."""

    class Liars(Simulation):
        def deliver(self, posts, name):
            if str(name) == "add_up":
                for letter in posts.get("c1", {}).values():
                    letter["sum"] = {k: v + 10**6 * 2**32 for k, v in letter["sum"].items()}
            return super().deliver(posts, name)

    with Liars(skewed(PEERS), bench=bench(), topology="full") as fed:
        result = federate(method(share=share), fed, 2)
        for w in models(fed.states).values():
            assert all(v.abs().max() < 20 for v in w.values())
    assert any("implausible" in notice.what for notice in result.summary.notices)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_an_aggregate_of_the_right_size_that_predicts_nonsense_is_rolled_back(scale):
    m = method()
    data = skewed(PEERS)["c0"]
    node = Node("c0", data, round=1, step="adopt")
    w = m.task.init(0)
    assert m.is_plausible(node, w, w)
    noise = {k: scale * 10 * torch.randn(v.shape, generator=torch.Generator().manual_seed(0)) for k, v in w.items()}
    assert not m.is_plausible(node, w, noise)
    assert not method(bound=1e9).is_plausible(node, w, noise)  # by its loss alone


def test_the_gans_noise_comes_from_the_nodes_own_seed():
    from kilter.runtimes.step_runner import run_step

    pictures = []
    for private in (None, 99):
        node = Node("c0", skewed(PEERS)["c0"], round=1, step="paint", private_seed=private)
        run_step(method().paint, [node], [None])
        pictures.append(node.state["pictures"])
    assert not torch.equal(*pictures)
