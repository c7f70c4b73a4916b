"""One operation on a list of tensors: torch's private `_foreach` functions, or a loop where this torch has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Operand = Any  # a list of tensors, or one number for all


def _operation(name: str) -> Callable[..., Any]:
    together = getattr(torch, f"_foreach_{name}", None)
    if together is not None:
        return together
    single: Callable[..., Tensor] = getattr(Tensor, name)

    def loop(tensors: Sequence[Tensor], *others: Operand, **options: float) -> list[Tensor]:
        columns = [o if isinstance(o, list | tuple) else [o] * len(tensors) for o in others]
        if name in ("addcdiv_", "addcmul_"):  # (tensors, firsts, seconds, factor of their quotient or product)
            columns, options = columns[:2], {"value": others[2]}
        return [single(t, *row, **options) for t, *row in zip(tensors, *columns, strict=True)]

    return loop


add = _operation("add")
add_ = _operation("add_")
addcdiv_ = _operation("addcdiv_")
addcmul_ = _operation("addcmul_")
copy_ = _operation("copy_")
div_ = _operation("div_")
lerp_ = _operation("lerp_")
mul_ = _operation("mul_")
norm = _operation("norm")
sqrt = _operation("sqrt")
