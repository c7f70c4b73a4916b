"""Chance within a loss (dropout, noise): drawn from the client's own generator, so that it is the same alone and in a stack."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torch.overrides import TorchFunctionMode

Recipe = Callable[[Generator], Tensor]
FACTORIES = (torch.rand, torch.randn, torch.randint, torch.randperm)
LIKE = {torch.rand_like: torch.rand, torch.randn_like: torch.randn}
FEATURES = {F.dropout1d: 1, F.dropout2d: 2, F.dropout3d: 3}  # dropout of whole channels: how many dimensions each has


class Dice:
    """A client's generator, made when it is first used: most losses know no chance."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    @cached_property
    def generator(self) -> Generator:
        return Generator().manual_seed(self._seed)


class _Drawn(torch.autograd.Function):
    """`_Drawn.apply(me, draw)` inside `vmap`: what `draw()` gives, first dimension the clients. It makes chance itself, outside."""

    @staticmethod
    def forward(*_: Any) -> Tensor:
        raise NotImplementedError("chance under a transform within the loss")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, me: Tensor, draw: Callable[[], Tensor]) -> tuple[Tensor, int]:
        return draw(), 0


class Draws(TorchFunctionMode):
    """While this is on, random functions of torch draw from these dice, one a client.

    `me` is any number that differs by client within `vmap`; None: a single client, not stacked.
    """

    def __init__(self, me: Tensor | None, dice: Sequence[Dice]) -> None:
        super().__init__()
        self.me, self.dice = me, dice
        self.own: dict[Any, Callable[..., Any]] = {F.dropout: self.dropout}
        self.own |= {f: self._factory(f) for f in FACTORIES}
        self.own |= {f: self._like(f, make) for f, make in LIKE.items()}
        self.own |= {f: self._feature_dropout(k) for f, k in FEATURES.items()}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self.own.get(func, func)(*args, **(kwargs or {}))

    def draw(self, recipe: Recipe) -> Tensor:
        """Each client's own draw."""
        if self.me is None:
            return recipe(self.dice[0].generator)
        out: Tensor = _Drawn.apply(self.me, lambda: torch.stack([recipe(d.generator) for d in self.dice]))  # type: ignore[no-untyped-call]
        return out

    def _factory(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            if kwargs.get("generator") is not None:
                return function(*args, **kwargs)
            return self.draw(lambda g: function(*args, **{**kwargs, "generator": g}))

        return made

    def _like(self, function: Callable[..., Tensor], make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(input: Tensor, **kwargs: Any) -> Tensor:
            shape, dtype = input.shape, kwargs.get("dtype") or input.dtype
            if kwargs.get("generator") is not None:
                return function(input, **kwargs)
            return self.draw(lambda g: make(shape, dtype=dtype, generator=g))

        return made

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
        # The mask is drawn in the order of the indices whatever the input's place in memory.
        dtype = input.dtype
        mask = self.draw(lambda g: torch.empty(shape, dtype=dtype).bernoulli_(1 - p, generator=g))
        return input * mask.div(1 - p)
