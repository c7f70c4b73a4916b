"""3x3 convolutions in fewer multiplications are convolutions, to rounding no worse than torch's."""

from __future__ import annotations

from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kilter.core import Fit, Rows
from kilter.fast import single, winograd
from kilter.models import build
from kilter.tasks import Task
from kilter.train import SGD, run_one


def layer(rows: int, inputs: int, outputs: int, size: tuple[int, int], padding: tuple[int, int]) -> list[Tensor]:
    """Input, filters, and the gradient of the output."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inputs, *size, generator=rng)
    w = torch.randn(outputs, inputs, 3, 3, generator=rng)
    high, wide = (s + 2 * p - 2 for s, p in zip(size, padding, strict=True))
    return [x, w, torch.randn(rows, outputs, high, wide, generator=rng)]


def exact(x: Tensor, w: Tensor, grad: Tensor, padding: tuple[int, int]) -> list[Tensor]:
    """Output and both gradients, in float64."""
    x, w = x.double().requires_grad_(), w.double().requires_grad_()
    out = torch.conv2d(x, w, padding=padding)
    return [out.detach(), *torch.autograd.grad(out, [x, w], grad.double())]


def ours(x: Tensor, w: Tensor, grad: Tensor, padding: tuple[int, int], m: int) -> list[Tensor]:
    return [
        winograd.convolve(x, w, padding, m),
        winograd.input_gradient(grad, w, padding, m),
        winograd.weights_gradient(x, grad, padding, m),
    ]


def error(actual: Tensor, true: Tensor) -> float:
    return float((actual - true).norm() / true.norm())


@given(
    m=st.sampled_from([2, 4]),
    rows=st.integers(1, 5),
    channels=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    size=st.tuples(st.integers(3, 11), st.integers(3, 11)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    block=st.sampled_from([1, 2000, 1 << 20]),
    inside=st.booleans(),
)
def test_it_is_a_convolution_and_its_gradients(m, rows, channels, size, padding, block, inside) -> None:  # type: ignore[no-untyped-def]
    x, w, grad = layer(rows, *channels, size, padding)
    true = exact(x, w, grad, padding)
    if inside:
        x, w, grad = (a.contiguous(memory_format=torch.channels_last) for a in (x, w, grad))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(winograd, "BLOCK", block)
        actual = ours(x, w, grad, padding, m)
    for a, b in zip(actual, true, strict=True):
        assert a.shape == b.shape
        assert torch.allclose(a.double(), b, atol=2e-5 * float(b.abs().max()) + 1e-6)


@pytest.mark.parametrize(("m", "bound"), [(2, 6e-7), (4, 1.5e-6)])
def test_its_rounding_is_of_the_order_of_torchs(m, bound) -> None:  # type: ignore[no-untyped-def]
    x, w, grad = layer(8, 128, 128, (16, 16), (1, 1))
    true = exact(x, w, grad, (1, 1))
    assert max(map(error, ours(x, w, grad, (1, 1), m), true)) < bound


def test_it_is_chosen_where_it_pays() -> None:
    assert winograd.tile(32, 32, 32, 64, 64) == 4
    assert winograd.tile(32, 8, 8, 256, 256) == 4
    assert winograd.tile(32, 4, 4, 512, 512) == 2  # one tile a row: to transform the filters costs more than it saves
    assert winograd.tile(4, 4, 4, 512, 512) == 0
    assert winograd.tile(32, 32, 32, 8, 8) == 0  # few channels: to transform the tiles does
    assert winograd.tile(2, 512, 512, 64, 64) == 0  # a large picture, transformed, takes too much memory


def test_the_known_matrices_for_two_outputs() -> None:
    """Winograd's own F(2, 3), Kronecker squared."""
    g, b, a = winograd.matrices(2)
    filters = torch.tensor([[-1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
    assert torch.allclose(g, torch.kron(filters, filters))
    outs = torch.tensor([[1.0, 1, 1, 0], [0, 1, -1, 1]])
    assert torch.allclose(a, torch.kron(outs, outs))
    tiles = torch.tensor([[-1.0, 0, 1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, -1, 0, 1]])
    assert torch.allclose(b, torch.kron(tiles, tiles), atol=1e-6)


@pytest.mark.slow
def test_resnet_comes_out_about_as_far_from_float64_as_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps, distances beside the length of the way; medians of three starts, for which rectifiers flip is chance."""
    task = Task(lambda: build("resnet18:gn", (3, 32, 32), 10))

    def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
        return float(torch.stack([(a[k].double() - b[k].double()).norm() for k in a]).norm())

    def trained(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
        rng = torch.Generator().manual_seed(seed)
        x, y = torch.rand(32, 3, 32, 32, generator=rng), torch.randint(0, 10, (32,), generator=rng)
        params = {k: v.to(dtype) for k, v in task.init(seed).items()}
        rows, plan = Rows.of(x=x.to(dtype), y=y), SGD(lr=0.01, batch=16)
        return run_one(Fit(lambda w, b, _: task.loss(w, b), params, rows, plan, seed=0)).params

    exact = [trained(seed, torch.float64) for seed in range(3)]
    way = [distance(e, task.init(seed)) for seed, e in enumerate(exact)]

    def far() -> float:
        return median(distance(trained(k, torch.float32), exact[k]) / way[k] for k in range(3))

    winograds = far()
    monkeypatch.setattr(single, "CHANNELS", 10**9)
    torchs = far()
    assert winograds != torchs
    assert winograds < 2 * torchs < 0.05
