"""Layout and order of layers change speed, not numbers."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from kilter.fast.memory_layout import channels_last, keep_memory, pool_before_relu
from kilter.models import build
from kilter.params import count


def grads(net: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(net(x).square().sum(), list(net.parameters())))


def test_pooling_before_relu_is_the_same_to_the_bit() -> None:
    net = build("bench-cnn", (1, 28, 28), 10)
    other = pool_before_relu(copy.deepcopy(net))
    kinds = [type(part) for part in other.body]
    assert kinds[:6] == [nn.Conv2d, nn.MaxPool2d, nn.ReLU] * 2
    assert other.state_dict().keys() == net.state_dict().keys()
    x = torch.randn(8, 1, 28, 28)
    x[:, :, :14] = 0  # ties
    assert torch.equal(net(x), other(x))
    assert all(torch.equal(a, b) for a, b in zip(grads(net, x), grads(other, x), strict=True))


def test_other_orders_and_kinds_stay() -> None:
    layers = [
        nn.Conv2d(1, 2, 3),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.MaxPool2d(1),
        nn.LeakyReLU(),
    ]
    assert list(pool_before_relu(nn.Sequential(*layers))) == layers


def test_channels_inside_holds_the_same_numbers() -> None:
    w = {"one": torch.randn(4, 1, 5, 5), "many": torch.randn(4, 3, 5, 5), "dense": torch.randn(3, 2)}
    actual = channels_last(w)
    assert all(torch.equal(actual[k], v) for k, v in w.items())
    assert actual["one"].stride() == (25, 1, 5, 1)
    assert actual["many"].is_contiguous(memory_format=torch.channels_last)
    assert actual["dense"] is w["dense"]
    assert count(actual) == count(w)


def test_memory_can_be_kept_anywhere() -> None:
    keep_memory()
    assert torch.ones(10).sum() == 10
