"""Secure sums: known answers S5 and S8, nodes that vanish, and requests that would reveal a model."""

import pytest
import torch

from kilter.blocks.secure_sum import SCHEMES, Rules, limited, quantised, scratch
from kilter.core import Node, Post


def three(share="ring"):
    """B, C and D of S5, and the requester A, as nodes that know each other."""
    names = ["A", "B", "C", "D"]
    nodes = {n: Node(n, None, round=1, step="split", peers=tuple(m for m in names if m != n)) for n in names}
    w = {"B": [1.0, 2, -1], "C": [0.0, 4, 2], "D": [-2.0, 1, 3]}
    return (
        nodes,
        {n: {"w": torch.tensor(v)} for n, v in w.items()},
        {"B": 0.5, "C": 0.3, "D": 0.2},
        SCHEMES[share](Rules(fewest=2)),
    )


def post(letters):
    """{sender: Post} -> {receiver: {sender: letter}}."""
    boxes = {}
    for sender, box in letters.items():
        for receiver, letter in box.items():
            boxes.setdefault(receiver, {})[sender] = letter
    return boxes


def protocol(share, lose=lambda stage, sender: False):
    nodes, models_, sigma, scheme = three(share)
    sigma = {c: quantised(s) for c, s in sigma.items()}
    scratch(nodes["A"])["asked"] = sigma
    boxes = post({"A": scheme.request(nodes["A"], sigma)})
    holders = nodes if share == "once" else {n: nodes[n] for n in "BCD"}
    zero = {"w": torch.zeros(3)}
    sent = {
        n: scheme.split(node, models_.get(n, zero), boxes.get(n, {}))
        for n, node in holders.items()
        if not lose("split", n)
    }
    boxes = post(sent)
    sums = {n: scheme.add_up(node, boxes.get(n, {})) for n, node in holders.items() if not lose("add_up", n)}
    return scheme.join(nodes["A"], zero, post(sums).get("A", {})), sent, sums


@pytest.mark.parametrize("share", SCHEMES)
def test_s5_the_requester_gets_the_sum(share):
    (total, sigma), _, _ = protocol(share)
    assert torch.allclose(total["w"], torch.tensor([0.1, 2.4, 0.7]).double(), atol=2e-4)  # sigma has 16 bits
    pam = (torch.ones(3) + total["w"]) / (1 + sum(sigma.values()))
    assert torch.allclose(pam, torch.tensor([0.55, 1.7, 0.85]).double(), atol=1e-4)


@pytest.mark.parametrize("share", ["ring", "scalar", "threshold"])
def test_s8_traffic_is_n_squared_models_a_requester(share):
    _, sent, sums = protocol(share)
    assert sum(len(letters) for post_ in sent.values() for letters in post_.values()) == 6  # n (n - 1) shares
    assert sum(len(post_) for post_ in sums.values()) == 3  # n sums


def test_the_requester_is_never_sent_a_share_in_the_printed_protocol():
    for share in ("ring", "threshold"):
        assert all("A" not in post_ for post_ in protocol(share)[1].values())


@pytest.mark.parametrize("share", ["ring", "scalar"])
@pytest.mark.parametrize("stage", ["split", "add_up"])
def test_when_a_node_vanishes_the_requester_gets_nothing(share, stage):
    actual, _, _ = protocol(share, lambda s, n: (s, n) == (stage, "C"))
    assert actual is None


@pytest.mark.parametrize("share", ["threshold", "once"])
def test_threshold_sums_survive_a_node_that_vanishes(share):
    joined, _, _ = protocol(share, lambda s, n: (s, n) == ("add_up", "C"))  # its shares are with the others
    assert torch.allclose(joined[0]["w"], torch.tensor([0.1, 2.4, 0.7]).double(), atol=2e-4)


@pytest.mark.parametrize("share", ["threshold", "once"])
def test_threshold_sums_leave_out_a_node_that_was_gone_from_the_start(share):
    nodes, models_, sigma, _ = three(share)
    scheme = SCHEMES[share](Rules(fewest=2, largest_share=1.0))
    scratch(nodes["A"])["asked"] = sigma = {c: quantised(s) for c, s in sigma.items()}
    boxes = post({"A": scheme.request(nodes["A"], sigma)})
    here = [n for n in (nodes if share == "once" else "BD") if n != "C"]
    zero = {"w": torch.zeros(3)}
    boxes = post({n: scheme.split(nodes[n], models_.get(n, zero), boxes.get(n, {})) for n in here})
    boxes = post({n: scheme.add_up(nodes[n], boxes.get(n, {})) for n in here})
    total, weights = scheme.join(nodes["A"], zero, boxes["A"])
    assert set(weights) == {"B", "D"}
    expected = 0.5 * models_["B"]["w"].double() + 0.2 * models_["D"]["w"].double()
    assert torch.allclose(total["w"], expected, atol=1e-4)


def test_what_is_left_after_a_loss_must_hide_each_model_too():
    """B, C and D hide each other; without C, B would have 5/7 of the sum: B does not send it."""
    _, _, sums = protocol("threshold", lambda s, n: n == "C")
    assert sums["B"]["A"] == {"lost": ["C"]}


BAD_WEIGHTS = [
    {"B": 0.5},
    {"B": 0.5, "C": 0.5},  # shorter than three
    {"B": 1.0, "C": 2**-16, "D": 2**-16},  # the sum is B's model
    {"B": 7.7e-6, "C": 7.5e-6, "D": 7.5e-6},  # in `once`, they would count as 1, 0 and 0
    {"B": 0.3, "C": 0.3, "D": 0.3},  # not multiples of 2^-16
    {"A": 0.5, "B": 0.5, "C": 0.5},  # the requester itself
    {"B": 0.5, "C": 0.5, "stranger": 0.5},
    {"B": 1e9, "C": 1e9, "D": 1e9},
    {"B": -0.5, "C": 0.5, "D": 0.5},
    {"B": float("nan"), "C": 0.5, "D": 0.5},
    {"B": "all", "C": 0.5, "D": 0.5},
    {},
    "BCD",
    None,
]


@pytest.mark.parametrize("share", SCHEMES)
@pytest.mark.parametrize("weights", BAD_WEIGHTS)
def test_a_request_that_would_reveal_a_model_is_not_answered(share, weights):
    nodes, models_, _, _ = three()
    scheme = SCHEMES[share]()
    letters = scheme.split(nodes["B"], models_["B"], {"A": {"weights": weights}})
    assert scheme.add_up(nodes["B"], post({"B": letters}).get("B", {})) == Post()
    assert {"notice": "a request to contribute was not valid: it is not answered"} in nodes["B"].notes


SEEDS = range(6)


def asked_for(share, told):
    """The sums that six peers return to A, which sent them these weights, and the peers."""
    names = ["A", "B", "C", "D", "E", "F"]
    nodes = {n: Node(n, None, round=1, step="split", peers=tuple(m for m in names if m != n)) for n in names}
    models_ = {
        n: {"w": torch.randn(4, generator=torch.Generator().manual_seed(k))} for n, k in zip(names, SEEDS, strict=True)
    }
    scheme = SCHEMES[share]()
    boxes = {n: {"A": {"weights": weights}} for n, weights in told.items()}
    here = names if share == "once" else list(told)
    boxes = post({n: scheme.split(nodes[n], models_[n], boxes.get(n, {})) for n in here})
    return post({n: scheme.add_up(nodes[n], boxes.get(n, {})) for n in here}).get("A", {}), nodes


LEAST = 2**-16
EACH_OTHERWISE = {  # every request is allowed, but B contributes with 1/2 and the others with almost nothing
    "B": {"B": 0.5, "C": 0.25, "D": 0.25},
    "C": {"B": 0.25, "C": LEAST, "D": 0.25},
    "D": {"B": 0.25, "C": 0.25, "D": LEAST},
}


@pytest.mark.parametrize("share", ["ring", "threshold", "scalar"])
def test_a_requester_that_sends_each_contributor_other_weights_gets_no_sum(share):
    sums, nodes = asked_for(share, EACH_OTHERWISE)
    assert not any("sum" in letter for letter in sums.values())
    assert "A sent C other weights than me: the share of C is not used" in nodes["B"].notes
    same, _ = asked_for(share, dict.fromkeys("BCD", EACH_OTHERWISE["B"]))
    assert all("sum" in letter for letter in same.values())


def test_holders_that_were_sent_different_weights_return_no_sum():
    """`once`: with weights (2, h, h) at holder number h, sums at enough holders are points of a polynomial that is 2 M_B at 0."""
    told = {n: {"B": 128 * LEAST, "C": 64 * LEAST * h, "D": 64 * LEAST * h} for h, n in enumerate("ABCDEF", 1)}
    assert asked_for("once", told)[0] == {}
    honest = dict.fromkeys("ABCDEF", told["B"])
    assert all("sum" in letter for letter in asked_for("once", honest)[0].values())
    few = honest | {"F": told["F"]}  # one peer that was sent, or says, something else stops nobody but itself
    sums, nodes = asked_for("once", few)
    assert set(sums) == {"A", "B", "C", "D", "E"}
    assert any("same weights" in str(note) for note in nodes["F"].notes)


def test_a_requester_limits_the_largest_weight_so_that_its_request_is_answered():
    rules = Rules()
    weights = limited({"B": 0.9, "C": quantised(0.2), "D": quantised(0.3)}, rules.largest_share)
    assert weights["B"] == pytest.approx(0.5, abs=1e-4)
    assert rules.allow(weights)
    fair = {"B": 0.25, "C": 0.25, "D": 0.25}
    assert limited(fair, 0.5) == fair


@pytest.mark.parametrize("holders", range(2, 60))
def test_a_threshold_is_more_than_half_so_that_two_groups_of_holders_overlap(holders):
    assert holders >= Rules(trust=0.51).needed(holders) > holders / 2


@pytest.mark.parametrize("share", SCHEMES)
def test_a_malformed_sum_is_its_senders_failure(share):
    nodes, models_, sigma, scheme = three(share)
    scratch(nodes["A"])["asked"] = sigma
    bad = {"sum": {"w": torch.zeros(2)}, "of": ["B", "C", "D"]}
    assert scheme.join(nodes["A"], models_["B"], dict.fromkeys("BCD", bad)) is None
    assert "the sum of C is malformed: it is not used" in nodes["A"].notes


def test_scalar_fractions_come_from_the_nodes_own_seed():
    """With the public seed alone, nobody can compute the fractions and divide a share by them."""
    shares = []
    for private in (None, None, 12345):
        nodes, models_, _, scheme = three("scalar")
        nodes["B"].private_seed = private
        shares.append(scheme.make_shares(nodes["B"], models_["B"], ["B", "C", "D"])["C"]["w"])
    assert torch.equal(shares[0], shares[1])
    assert not torch.allclose(shares[0], shares[2])
