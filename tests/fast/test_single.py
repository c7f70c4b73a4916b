"""A client by itself: large convolutions learn the same, only faster."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from kilter.core import Fit, Rows
from kilter.fast import single, winograd
from kilter.fast.client_random import ClientRandom
from kilter.fast.single import Single, weights_gradient
from kilter.tasks import Task
from kilter.train import SGD, run_one


@given(
    rows=st.integers(1, 3),
    channels=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    size=st.tuples(st.integers(5, 9), st.integers(5, 9)),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
)
def test_the_gradient_of_a_convolutions_weights(rows, channels, size, kernel, stride, padding) -> None:  # type: ignore[no-untyped-def]
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(rows, channels[0], *size, generator=rng, dtype=torch.float64)
    w = torch.randn(channels[1], channels[0], *kernel, generator=rng, dtype=torch.float64, requires_grad=True)
    out = torch.conv2d(x, w, None, stride, padding)
    grad = torch.randn(out.shape, generator=rng, dtype=torch.float64)
    (expected,) = torch.autograd.grad(out, [w], grad)
    assert torch.allclose(weights_gradient(x, grad, kernel, stride, padding), expected)


NET = nn.Sequential(
    nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 5, 3, stride=2), nn.Flatten(), nn.Linear(5 * 3 * 3, 2)
)


def small_fit() -> Fit:
    rng = torch.Generator().manual_seed(0)
    rows = Rows.of(x=torch.randn(40, 2, 8, 8, generator=rng), y=torch.randint(0, 2, (40,), generator=rng))
    task = Task(NET)
    return Fit(lambda w, b, _: task.loss(w, b), task.init(0), rows, SGD(lr=0.1, batch=8), seed=1)


def test_a_wide_convolution_trains_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The large way, forced on small layers, beside torch's own."""
    fit = small_fit()
    plain = run_one(fit).params
    used: list[Tensor] = []
    real = single.weights_gradient
    monkeypatch.setattr(single, "WIDE", 1)
    monkeypatch.setattr(single, "weights_gradient", lambda x, *more: used.append(x) or real(x, *more))
    wide = run_one(fit).params
    assert len(used) == 2 * 5  # both layers in every step
    assert all(torch.allclose(wide[k], v, atol=1e-6) for k, v in plain.items())


def test_winograds_way_trains_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forced on a small layer, which has a bias, beside torch's own."""
    fit = small_fit()
    plain = run_one(fit).params
    used: list[int] = []
    real = winograd.weights_gradient
    monkeypatch.setattr(single, "CHANNELS", 1)
    monkeypatch.setattr(winograd, "tile", lambda *_: 4)
    monkeypatch.setattr(winograd, "weights_gradient", lambda *given: used.append(1) or real(*given))
    other = run_one(fit).params
    assert len(used) == 5  # the layer without a stride
    assert all(torch.allclose(other[k], v, atol=1e-5) for k, v in plain.items())


@pytest.mark.parametrize("m", [0, 4])
def test_a_gradient_has_a_gradient(m: int) -> None:
    """A loss may hold a gradient (FedMix's does)."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 6, 6, generator=rng, requires_grad=True)
    w = torch.randn(4, 3, 3, 3, generator=rng, requires_grad=True)
    b = torch.randn(4, generator=rng, requires_grad=True)

    def twice(out: Tensor) -> list[Tensor]:
        (inner,) = torch.autograd.grad(out.pow(3).sum(), [x], create_graph=True)
        return list(torch.autograd.grad(inner.pow(2).sum(), [x, w, b]))

    actual = twice(single._Large.apply(x, w, b, (1, 1), (1, 1), m))
    expected = twice(torch.conv2d(x, w, b, padding=1))
    assert all(torch.allclose(f, e, rtol=1e-3) for f, e in zip(actual, expected, strict=True))


def test_a_loss_may_use_transforms_of_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single, "CHANNELS", 1)
    monkeypatch.setattr(winograd, "tile", lambda *_: 2)
    x, w = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3)

    def gradient() -> Tensor:
        actual: Tensor = torch.func.grad(lambda v: torch.nn.functional.conv2d(x, v).pow(2).sum())(w)
        return actual

    expected = gradient()
    with Single(ClientRandom(0)):
        assert torch.equal(gradient(), expected)


def test_a_model_that_is_looked_at_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    task, rng = Task(NET), torch.Generator().manual_seed(0)
    x, params = torch.randn(9, 2, 8, 8, generator=rng), task.init(0)
    plain = task.predict(params, x)
    monkeypatch.setattr(single, "CHANNELS", 1)
    monkeypatch.setattr(winograd, "tile", lambda *_: 4)
    quick = task.predict(params, x)
    assert not torch.equal(quick, plain)
    assert torch.allclose(quick, plain, atol=1e-5)


@given(
    channels=st.integers(1, 5),
    size=st.tuples(st.integers(3, 9), st.integers(3, 9)),
    window=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    stride=st.one_of(st.none(), st.tuples(st.integers(1, 4), st.integers(1, 4))),
    inside=st.booleans(),
    gone=st.booleans(),
)
def test_pooling_for_evaluation_is_pooling(channels, size, window, stride, inside, gone) -> None:  # type: ignore[no-untyped-def]
    """The same bits in the same memory layout, so that the next layer computes the same, too."""
    x = torch.randn(2, channels, *size, generator=torch.Generator().manual_seed(0))
    x = x.contiguous(memory_format=torch.channels_last) if inside else x
    if gone:
        x[0, 0, 0, 0] = torch.nan
    if window[0] > size[0]:
        with pytest.raises(RuntimeError, match="too small"):
            single.quick_max_pool2d(x, window, stride)
        return
    actual, expected = single.quick_max_pool2d(x, window, stride), torch.nn.functional.max_pool2d(x, window, stride)
    assert isinstance(actual, Tensor)
    assert torch.equal(actual.nan_to_num(99), expected.nan_to_num(99))
    if min(actual.shape) > 1:  # where a size is one, a stride means nothing
        assert actual.stride() == expected.stride()


def test_evaluation_pools_by_strips_and_training_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    real = single._maxima
    monkeypatch.setattr(single, "_maxima", lambda *given: used.append(1) or real(*given))
    task = Task(nn.Sequential(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3 * 3 * 3, 2)))
    x, params = torch.randn(9, 2, 8, 8), task.init(0)
    task.predict(params, x)
    assert len(used) == 2
    rows = Rows.of(x=x, y=torch.zeros(9, dtype=torch.int64))
    run_one(Fit(lambda w, b, _: task.loss(w, b), params, rows, SGD(lr=0.1, batch=8), seed=1))
    with single.Quick():
        leaf = x.clone().requires_grad_()
        torch.nn.functional.max_pool2d(leaf, 2).sum().backward()
        for more in ({"padding": 1}, {"dilation": 2}, {"ceil_mode": True}, {"return_indices": True}):
            torch.nn.functional.max_pool2d(x, 2, **more)
        with pytest.raises(RuntimeError, match="stride should not be zero"):
            torch.nn.functional.max_pool2d(x, 2, 0)
    assert len(used) == 2


def test_only_large_plain_convolutions_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(1, 4, 6, 6), torch.randn(4, 2, 3, 3, requires_grad=True)
    monkeypatch.setattr(single, "WIDE", 1)
    monkeypatch.setattr(single._Large, "apply", None)
    with Single(ClientRandom(0)):
        torch.nn.functional.conv2d(x, w, groups=2)
        torch.nn.functional.conv2d(x[:, :2], w, dilation=2)
        torch.nn.functional.conv2d(x[:, :2], w, padding="same")
        torch.nn.functional.conv2d(x[0, :2], w)
        torch.nn.functional.conv2d(x[:, :2], w.detach())
        torch.nn.functional.conv2d(x[:, :2].double(), w.double())
