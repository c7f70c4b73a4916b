"""Secure sums: known answers S5 and S8, nodes that vanish, and requests that would reveal a model."""

import pytest
import torch

from kilter.blocks.secure_sum import SCHEMES, quantised, scratch
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
        SCHEMES[share](0.6),
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
    return scheme.join(nodes["A"], post(sums).get("A", {})), sent, sums


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


@pytest.mark.parametrize("share", ["ring", "scalar", "once"])
@pytest.mark.parametrize("stage", ["split", "add_up"])
def test_when_a_node_vanishes_the_requester_gets_nothing(share, stage):
    found, _, _ = protocol(share, lambda s, n: (s, n) == (stage, "C"))
    assert found is None


def test_threshold_sums_survive_a_node_that_vanishes():
    found, _, _ = protocol("threshold", lambda s, n: (s, n) == ("add_up", "C"))  # its shares are with the others
    assert torch.allclose(found[0]["w"], torch.tensor([0.1, 2.4, 0.7]).double(), atol=2e-4)
    found, _, _ = protocol("threshold", lambda s, n: (s, n) in {("split", "C"), ("add_up", "C")})  # gone from the start
    assert set(found[1]) == {"B", "D"}
    assert torch.allclose(
        found[0]["w"], 0.5 * torch.tensor([1.0, 2, -1]).double() + 0.2 * torch.tensor([-2.0, 1, 3]).double(), atol=1e-4
    )


@pytest.mark.parametrize(
    "wish",
    [
        {"sigma": 0.5, "list": ["B"]},
        {"sigma": 0.5, "list": ["B", "B"]},
        {"sigma": 0.5, "list": ["C", "D"]},
        {"sigma": 0.5, "list": ["A", "B"]},
        {"sigma": 0.5, "list": ["B", "stranger"]},
        {"sigma": 1e9, "list": ["B", "C"]},
        {"sigma": -0.5, "list": ["B", "C"]},
        {"sigma": 0.5, "list": "BC"},
        {},
    ],
)
def test_a_request_that_would_reveal_a_model_is_not_answered(wish):
    nodes, models_, _, scheme = three()
    assert scheme.split(nodes["B"], models_["B"], {"A": wish}) == Post()
    assert nodes["B"].notes
