"""MADE. Germain, Gregor, Murray, Larochelle: Masked Autoencoder for Distribution Estimation (ICML 2015)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, softplus

from kilter.core import Params
from kilter.seeds import generator
from kilter.tasks import Task

Kind = Literal["bernoulli", "gaussian"]
NARROW, WIDE = math.log(1e-2), math.log(1e2)  # bounds of ln variance: a constant column would have none


class MADE(nn.Module):
    """p(x) = prod_d p(x_d | x_<d): a network whose d-th output depends only on the inputs before the d-th.

    Hidden unit j has a degree m(j) in 1..D-1 and sees inputs d <= m(j); output d sees units with m(j) < d. Degrees come from
    `seed`, so that the same weights are the same function at every node. `x` is (N, ...), flattened to (N, D):
    bernoulli   u = sigmoid(c + V relu(b + W x)), ln p_d = x_d ln u_d + (1 - x_d) ln(1 - u_d), for values in 0..1
    gaussian    (mu, s) = c + V relu(b + W x),    ln p_d = ln N(x_d; mu_d, e^{s_d}), for standardised tables

    With several `layers`, a unit sees units of the layer below with a degree of at most its own. With several `orderings`, the same
    weights serve different orders of the inputs (the first is the natural one), and ln p is the mean over them.

    >>> made = MADE(4, hidden=8)
    >>> made(torch.tensor([[0.0, 1.0, 1.0, 0.0]])).shape
    torch.Size([1, 4])
    """

    def __init__(
        self,
        inputs: int,
        hidden: int = 30,
        kind: Kind = "bernoulli",
        seed: int = 0,
        degrees: Sequence[int] | None = None,
        layers: int = 1,
        orderings: int = 1,
    ) -> None:
        super().__init__()
        self.inputs, self.kind, self.orderings = inputs, kind, orderings
        rng = generator(seed, "degrees")
        top = max(inputs, 2)
        drawn = torch.randint(1, top, (hidden,), generator=rng) if degrees is None else torch.tensor(degrees)
        heads = 2 if kind == "gaussian" else 1
        self.sees = nn.Linear(inputs, len(drawn))  # W, b
        self.deeper = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers - 1))
        self.says = nn.Linear(len(drawn), heads * inputs)  # V, c; gaussian: means, then log-variances
        # The masks follow from the seed, so they are neither stored nor sent.
        for at in range(orderings):
            order = torch.arange(1, inputs + 1)
            if at:
                order = 1 + torch.randperm(inputs, generator=generator(seed, "ordering", at))
                drawn = torch.randint(1, top, (hidden,), generator=generator(seed, "degrees", at))
            last = drawn
            self._mask(at, "sees", drawn[:, None] >= order)
            for layer in range(layers - 1):
                low = int(last.min())  # a unit below that of every unit it could see would see nothing
                units = torch.randint(low, top, (hidden,), generator=generator(seed, "degrees", at, layer))
                self._mask(at, f"deeper{layer}", units[:, None] >= last)
                last = units
            self._mask(at, "says", (order[:, None] > last).repeat(heads, 1))

    def _mask(self, ordering: int, name: str, mask: Tensor) -> None:
        suffix = f"_{ordering}" if ordering else ""
        self.register_buffer(f"{name}_mask{suffix}", mask.float(), persistent=False)

    def mask(self, name: str, ordering: int = 0) -> Tensor:
        """The mask of a layer under an ordering."""
        buffer = getattr(self, f"{name}_mask" + (f"_{ordering}" if ordering else ""))
        assert isinstance(buffer, Tensor)
        return buffer

    def outputs(self, x: Tensor, ordering: int = 0) -> Tensor:
        """Outputs for x (N, D): logits, or means followed by log-variances."""
        hidden = linear(x, self.sees.weight * self.mask("sees", ordering), self.sees.bias).relu()
        for at, layer in enumerate(self.deeper):
            assert isinstance(layer, nn.Linear)
            hidden = linear(hidden, layer.weight * self.mask(f"deeper{at}", ordering), layer.bias).relu()
        return linear(hidden, self.says.weight * self.mask("says", ordering), self.says.bias)

    def forward(self, x: Tensor) -> Tensor:
        """ln p(x_d | x_<d), (N, D); their sum is ln p(x)."""
        x = x.flatten(1)
        total = self.log_density(x, self.outputs(x))
        for at in range(1, self.orderings):
            total = total + self.log_density(x, self.outputs(x, at))
        return total / self.orderings if self.orderings > 1 else total

    def log_density(self, x: Tensor, outputs: Tensor) -> Tensor:
        """The log-density of each value of x under these outputs."""
        if self.kind == "bernoulli":
            return x * outputs - softplus(outputs)
        mean, spread = outputs.chunk(2, dim=1)
        spread = spread.clamp(NARROW, WIDE)
        return -((x - mean).square() * torch.exp(-spread) + spread + math.log(2 * math.pi)) / 2

    @torch.no_grad()
    def means(self, x: Tensor) -> Tensor:
        """E[x_d | x_<d], (N, D): the reconstruction of x."""
        outputs = self.outputs(x.flatten(1))
        return outputs.sigmoid() if self.kind == "bernoulli" else outputs.chunk(2, dim=1)[0]

    @torch.no_grad()
    def sample(self, rows: int, rng: torch.Generator) -> Tensor:
        """Ancestral samples (rows, D) in the natural ordering, column by column."""
        if len(self.deeper):
            return self._sample_deep(rows, rng)
        # The inputs of the hidden units are updated along the way.
        sees, says = (self.sees.weight * self.mask("sees")).T, self.says.weight * self.mask("says")
        hidden = self.sees.bias.repeat(rows, 1)
        drawn = torch.empty(rows, self.inputs)
        for d in range(self.inputs):
            output = hidden.relu() @ says[d :: self.inputs].T + self.says.bias[d :: self.inputs]  # (rows, 1 or 2)
            drawn[:, d] = self._draw(output, rng)
            hidden += drawn[:, d, None] * sees[d]
        return drawn

    def _sample_deep(self, rows: int, rng: torch.Generator) -> Tensor:
        drawn = torch.zeros(rows, self.inputs)
        for d in range(self.inputs):
            drawn[:, d] = self._draw(self.outputs(drawn)[:, d :: self.inputs], rng)
        return drawn

    def _draw(self, output: Tensor, rng: torch.Generator) -> Tensor:
        """One column from its outputs (rows, 1 or 2)."""
        if self.kind == "bernoulli":
            return torch.bernoulli(output[:, 0].sigmoid(), generator=rng)
        width = torch.exp(output[:, 1].clamp(NARROW, WIDE) / 2)
        return output[:, 0] + width * torch.randn(len(output), generator=rng)


def nll(log_density: Tensor, _: Tensor) -> Tensor:
    """-ln p(x) of each row: the loss of a MADE. Labels are ignored."""
    return -log_density.sum(1)


@lru_cache(maxsize=8)
def density_task(inputs: int, hidden: int, kind: Kind, seed: int, layers: int = 1, orderings: int = 1) -> Task:
    """A MADE as a Task: it trains like any network, and `task.predict` gives ln p(x_d | x_<d).

    All nodes share one object, so that their fits can be stacked.
    """

    def made() -> MADE:
        return MADE(inputs, hidden, kind, seed, layers=layers, orderings=orderings)

    return Task(made, loss=nll, metrics={})


def made_with(task: Task, w: Params) -> MADE:
    """The MADE with these weights."""
    module = task.load(w)
    assert isinstance(module, MADE)
    return module
