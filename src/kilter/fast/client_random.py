"""Random numbers inside a loss (dropout, noise) come from the client's own generator: the same alone and in a stack."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torch.overrides import TorchFunctionMode

TorchFunction = Callable[..., Any]
Arguments = Sequence[Any]  # of a function of torch
NamedArguments = Mapping[str, Any]
Device = torch.device | str | None
Recipe = Callable[[Generator], Tensor]
FACTORIES = (torch.rand, torch.randn, torch.randint, torch.randperm)
LIKE = {torch.rand_like: torch.rand, torch.randn_like: torch.randn}
FEATURES = {F.dropout1d: 1, F.dropout2d: 2, F.dropout3d: 3}  # dropout of whole channels -> dimensions of a channel


class ClientRandom:
    """A client's random generator, created on first use: most losses need none."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    @cached_property
    def generator(self) -> Generator:
        return Generator().manual_seed(self._seed)


class _Drawn(torch.autograd.Function):
    """`_Drawn.apply(me, draw)` inside `vmap` returns `draw()`, with the clients in the first dimension."""

    @staticmethod
    def forward(*_: object) -> Tensor:
        raise NotImplementedError("random numbers under a torch.func transform inside the loss")

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: object) -> None:
        pass

    @staticmethod
    def vmap(info: object, in_dims: object, me: Tensor, draw: Callable[[], Tensor]) -> tuple[Tensor, int]:
        return draw(), 0


class Draws(TorchFunctionMode):
    """Inside this context, torch's random functions draw from these generators, one for each client.

    `me` is any number that differs by client inside `vmap`; None means a single client.
    """

    def __init__(self, me: Tensor | None, randoms: Sequence[ClientRandom]) -> None:
        super().__init__()
        self.me, self.randoms = me, randoms
        self.own: dict[TorchFunction, TorchFunction] = {F.dropout: self.dropout}
        self.own |= {f: self._factory(f) for f in FACTORIES}
        self.own |= {f: self._like(f, make) for f, make in LIKE.items()}
        self.own |= {f: self._feature_dropout(k) for f, k in FEATURES.items()}

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Arguments = (), kwargs: NamedArguments | None = None
    ) -> object:
        return self.own.get(func, func)(*args, **(kwargs or {}))

    def draw(self, recipe: Recipe, device: Device = None) -> Tensor:
        """Draw for each client from its own generator, on the CPU: the same numbers on every device."""
        if self.me is None:
            return recipe(self.randoms[0].generator).to(device or "cpu")

        def stacked() -> Tensor:
            return torch.stack([recipe(r.generator) for r in self.randoms]).to(device or "cpu")

        out: Tensor = _Drawn.apply(self.me, stacked)  # type: ignore[no-untyped-call]
        return out

    def _factory(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def drawn(*args: Any, **kwargs: Any) -> Tensor:
            if kwargs.get("generator") is not None:
                return function(*args, **kwargs)
            device = kwargs.pop("device", None)
            return self.draw(lambda g: function(*args, **{**kwargs, "generator": g}), device)

        return drawn

    def _like(self, function: Callable[..., Tensor], make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def drawn(input: Tensor, **kwargs: Any) -> Tensor:
            shape, dtype = input.shape, kwargs.get("dtype") or input.dtype
            if kwargs.get("generator") is not None:
                return function(input, **kwargs)
            return self.draw(lambda g: make(shape, dtype=dtype, generator=g), kwargs.get("device") or input.device)

        return drawn

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return self._drop(input, input.shape, p) if training and p else input

    def _feature_dropout(self, space: int) -> Callable[..., Tensor]:
        def dropped(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
            shape = (*input.shape[: input.dim() - space], *[1] * space)
            return self._drop(input, torch.Size(shape), p) if training and p else input

        return dropped

    def _drop(self, input: Tensor, shape: torch.Size, p: float) -> Tensor:
        if p == 1:
            return input * 0
        # The mask is drawn in index order, whatever the memory layout of the input.
        dtype = input.dtype
        mask = self.draw(lambda g: torch.empty(shape, dtype=dtype).bernoulli_(1 - p, generator=g), input.device)
        return input * mask.div(1 - p)
