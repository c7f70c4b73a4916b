"""A weak vanilla GAN (Goodfellow et al. 2014), whose pictures stand in for a node's data without being any of its rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import softplus

from kilter.core import Batch, Params, Tree
from kilter.seeds import derive, generator

LATENT = 32
PICTURES, ROWS = "image", "table"


class GAN:
    """Generator and discriminator as one flat dict, trained together by one pure loss, so it is an ordinary `Fit`.

    Images (C, H, W) in 0..1 end in a sigmoid; tables (F,) of real values do not. Both networks have one hidden layer: what is
    wanted is the mix of classes and styles, not beauty, at less than the classifier's cost.
    """

    def __init__(self, shape: tuple[int, ...], width: int = 64) -> None:
        self.shape = shape
        self.kind = PICTURES if len(shape) == 3 else ROWS
        size = int(torch.tensor(shape).prod())
        last = [nn.Sigmoid()] if self.kind == PICTURES else []
        self._nets = nn.ModuleDict(
            {
                "g": nn.Sequential(nn.Linear(LATENT, width), nn.ReLU(), nn.Linear(width, size), *last),
                "d": nn.Sequential(nn.Linear(size, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)),
            }
        )

    def init(self, seed: int) -> Params:
        """Fresh networks from this seed."""
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
        """Latent points, one a row: the column `z` of a fit."""
        return torch.randn(rows, LATENT, generator=generator(*purpose, "latent"))

    def loss(self, params: Params, batch: Batch, _: Tree = None) -> Tensor:
        """Both players' losses, each with the other held still: -ln D(x) - ln(1 - D(G(z))) and -ln D(G(z))."""
        real, fake = batch["x"].flatten(1), self._run("g", params, batch["z"])
        still = {k: v.detach() for k, v in params.items() if k.startswith("d.")}
        judge = softplus(-self._run("d", params, real)) + softplus(self._run("d", params, fake.detach()))
        forge = softplus(-self._run("d", still, fake))
        return (judge + forge).mean()

    @torch.no_grad()
    def paint(self, params: Params, count: int, *purpose: int | str) -> Tensor:
        """Pictures as bytes (N, C, H, W), or rows of a table as floats (N, F)."""
        made = self._run("g", params, self.noise(count, *purpose)).reshape(count, *self.shape)
        return (made * 255).round().to(torch.uint8) if self.kind == PICTURES else made
