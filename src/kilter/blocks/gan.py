"""A small GAN (Goodfellow et al. 2014). Its samples stand in for a node's data."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import softplus

from kilter.core import Batch, Params, Tree
from kilter.seeds import derive, generator

LATENT = 32
COMPARED = 200, 2000  # samples and rows that `closeness` looks at, at most


class GAN:
    """Generator and discriminator as one flat dict, trained together with one pure loss, so that training is an ordinary `Fit`.

    The generator ends in a sigmoid for images (C, H, W) in 0..1, and is linear for tables (F,). Both networks have one hidden
    layer: samples must show the mix of classes, not look good, and must cost less than the classifier.
    """

    def __init__(self, shape: tuple[int, ...], width: int = 64) -> None:
        self.shape = shape
        self.is_image = len(shape) == 3
        size = int(torch.tensor(shape).prod())
        last = [nn.Sigmoid()] if self.is_image else []
        self._nets = nn.ModuleDict(
            {
                "g": nn.Sequential(nn.Linear(LATENT, width), nn.ReLU(), nn.Linear(width, size), *last),
                "d": nn.Sequential(nn.Linear(size, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)),
            }
        )

    def init(self, seed: int) -> Params:
        """Initial weights from this seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, "gan"))
            for layer in self._nets.modules():
                if isinstance(layer, nn.Linear):
                    layer.reset_parameters()
        return {k: v.detach().clone() for k, v in self._nets.state_dict().items()}

    def _run(self, part: str, params: Params, x: Tensor) -> Tensor:
        own = {k.removeprefix(part + "."): v for k, v in params.items() if k.startswith(part + ".")}
        out: Tensor = functional_call(self._nets[part], own, (x,))
        return out

    def noise(self, rows: int, *purpose: int | str) -> Tensor:
        """Latent vectors, one for each row: the column `z` of a fit."""
        return torch.randn(rows, LATENT, generator=generator(*purpose, "latent"))

    def loss(self, params: Params, batch: Batch, _: Tree = None) -> Tensor:
        """The sum of both losses, each with the other network fixed: -ln D(x) - ln(1 - D(G(z))) and -ln D(G(z))."""
        real, fake = batch["x"].flatten(1), self._run("g", params, batch["z"])
        fixed = {k: v.detach() for k, v in params.items() if k.startswith("d.")}
        discriminator = softplus(-self._run("d", params, real)) + softplus(self._run("d", params, fake.detach()))
        generator_ = softplus(-self._run("d", fixed, fake))
        return (discriminator + generator_).mean()

    @torch.no_grad()
    def sample(self, params: Params, count: int, *purpose: int | str) -> Tensor:
        """Images as bytes (N, C, H, W), or rows of a table as floats (N, F)."""
        rows = self._run("g", params, self.noise(count, *purpose)).reshape(count, *self.shape)
        return (rows * 255).round().to(torch.uint8) if self.is_image else rows

    def random(self, count: int, *purpose: int | str) -> Tensor:
        """Noise in the form of samples: uniform bytes, or normal numbers for tables. It shows nothing of any data."""
        rng = generator(*purpose, "noise")
        if self.is_image:
            return torch.randint(0, 256, (count, *self.shape), generator=rng, dtype=torch.uint8)
        return torch.randn(count, *self.shape, generator=rng)


@torch.no_grad()
def closeness(samples: Tensor, rows: Tensor, fresh: Tensor) -> float | None:
    """How close samples come to the rows that a GAN learnt from, compared with fresh rows of the same kind; None without rows.

    The mean distance of a sample to its nearest row, divided by that of a fresh row. Near 0, samples repeat rows. Above 1, they are
    further from the rows than fresh rows are.
    """
    if not (len(samples) and len(rows) and len(fresh)):
        return None
    few, many = COMPARED
    sample, other = (torch.cdist(_flat(x[:few]), _flat(rows[:many])).min(1).values.mean() for x in (samples, fresh))
    return round(float(sample / other), 4) if other > 0 else None


def _flat(x: Tensor) -> Tensor:
    return (x.float() / 255 if x.dtype == torch.uint8 else x.float()).flatten(1)
