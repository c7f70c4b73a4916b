"""Prototypes: class means, their consensus, and prediction by similarity."""

from __future__ import annotations

import torch

from kilter.blocks.prototypes import NEVER, class_means, consensus, similarity


def test_class_means() -> None:
    z = torch.tensor([[1.0, 0], [3, 0], [0, 5]])
    classes, means = class_means(z, torch.tensor([4, 4, 2]))
    assert classes.tolist() == [2, 4]
    assert means.tolist() == [[0, 5], [2, 0]]


def test_the_consensus_is_over_clients_that_have_the_class() -> None:
    a = torch.tensor([0, 1]), torch.tensor([[1.0], [2.0]])
    b = torch.tensor([1]), torch.tensor([[6.0]])
    centre, has, sets = consensus([a, b], classes=3)
    assert centre[:, 0].tolist() == [1, 4, 0]
    assert has.tolist() == [True, True, False]
    assert sets[:, :, 0].tolist() == [[1, 2, 0], [1, 6, 0]]


def test_a_class_nobody_has_is_never_predicted() -> None:
    out = similarity(torch.tensor([[0.0, -1.0]]), torch.zeros(3, 2), torch.tensor([True, True, False]), 0.07)
    assert out.tolist() == [[0, 0, NEVER]]
