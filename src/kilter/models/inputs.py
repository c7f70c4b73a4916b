"""The inputs of a network by name: columns of a table, or arrays of different shapes, which lie side by side in a prepared row.

A category that is to be embedded is one number of a row, the place of its value: 0 is a gap, and the last place is "other".
`EmbedColumns` turns it into a vector that is learned. A network of a user whose `forward` takes several arguments, or a dict,
receives the inputs by name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import get_origin

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from kilter.errors import Mistake
from kilter.plugins import is_file_spec

PlainInput = tuple[str, tuple[int, ...], int, int]  # the fields of Input, as they travel and are saved


@dataclass(frozen=True)
class Input:
    """One input of a network."""

    name: str
    shape: tuple[int, ...]  # of one sample
    values: int = 0  # of a category that is embedded: how many places there are, with the gap and "other"
    width: int = 0  # of a category that is embedded: numbers of its vector

    @property
    def size(self) -> int:
        """How many numbers of a row belong to it."""
        return prod(self.shape)

    @property
    def embedded_size(self) -> int:
        """The same after categories are embedded."""
        return self.width if self.values else self.size

    @staticmethod
    def parse(plain: Sequence[PlainInput]) -> list[Input]:
        """Inputs from their fields, also as TOML gives them back."""
        return [
            Input(str(name), tuple(int(n) for n in shape), int(values), int(width))
            for name, shape, values, width in plain
        ]


def needed_inputs(model: str, inputs: Sequence[PlainInput]) -> tuple[PlainInput, ...]:
    """The inputs that a saved model has to know: all, if it takes them by name or embeds some; else none."""
    return tuple(inputs) if is_file_spec(model) or any(i.values for i in Input.parse(inputs)) else ()


class EmbedColumns(nn.Module):
    """A row with a vector in place of each embedded category."""

    def __init__(self, inputs: Sequence[Input]) -> None:
        super().__init__()
        self.inputs = tuple(inputs)
        tables = [torch.randn(i.values, i.width) * 0.1 for i in inputs if i.values]
        self.tables = nn.ParameterList(nn.Parameter(table) for table in tables)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, features), in the order of the columns."""
        parts: list[Tensor] = []
        tables = iter(self.tables)
        for column, cells in zip(self.inputs, x.split([i.size for i in self.inputs], -1), strict=True):
            if column.values:
                places = cells.squeeze(-1).round().clamp(0, column.values - 1).long()
                parts.append(embedding(places, next(tables)))
            else:
                parts.append(cells)
        return torch.cat(parts, -1)


class EmbeddedNetwork(nn.Module):
    """A network with embedded categories in front of its body."""

    def __init__(self, inputs: Sequence[Input], net: nn.Module) -> None:
        super().__init__()
        body, head = getattr(net, "body", None), getattr(net, "head", None)
        if isinstance(body, nn.Module) and isinstance(head, nn.Module):
            self.body: nn.Module = nn.Sequential(EmbedColumns(inputs), body)
            self.head: nn.Module = head
        else:
            self.body, self.head = EmbedColumns(inputs), net

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.body(x))
        return outputs


def takes_names(net: nn.Module) -> bool:
    """Whether `forward` takes several arguments, or one that is a dict."""
    needed = _arguments(net)
    if len(needed) != 1:
        return len(needed) > 1
    kind = needed[0].annotation
    plain = kind if isinstance(kind, str) else getattr(get_origin(kind) or kind, "__name__", "")
    return bool(re.match(r"(typing\.|collections\.abc\.)?(dict|Dict|Mapping)\b", plain))


def _arguments(net: nn.Module) -> list[inspect.Parameter]:
    parameters = inspect.signature(net.forward).parameters.values()
    return [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def with_names(net: nn.Module, spec: str, inputs: Sequence[Input]) -> nn.Module:
    """The network as a function of whole rows, which calls the user's `forward` with the inputs by name.

    Names of parameters stay as they are. Characters that Python does not allow in names become underscores.
    """
    argument_names = [p.name for p in _arguments(net)]
    known = {re.sub(r"\W|^(?=\d)", "_", i.name): i for i in inputs}
    as_dict = len(argument_names) == 1
    if not known:
        raise Mistake(
            f"`forward` of {spec} takes {', '.join(argument_names)}, and the data has no inputs by name: use a table, or "
            "arrays called x.NAME."
        )
    foreign = [] if as_dict else [name for name in argument_names if name not in known]
    if foreign:
        raise Mistake(
            f"`forward` of {spec} takes '{foreign[0]}', and the data has no input of this name: it has "
            f"{', '.join(list(known)[:8])}{', ...' if len(known) > 8 else ''}."
        )
    kind = type(net)

    class ByName(kind):  # type: ignore[misc, valid-type]
        """The user's class, called with one tensor of rows."""

        def forward(self, x: Tensor) -> Tensor:
            parts = split_inputs(x, inputs)
            named: Mapping[str, Tensor] = dict(zip(known, parts.values(), strict=True))
            outputs: Tensor
            outputs = kind.forward(self, parts) if as_dict else kind.forward(self, *(named[n] for n in argument_names))
            return outputs

    ByName.__name__ = kind.__name__
    net.__class__ = ByName
    return net


def split_inputs(x: Tensor, inputs: Sequence[Input]) -> dict[str, Tensor]:
    """The parts of rows by name, each in its shape."""
    parts = x.split([i.size for i in inputs], -1)
    return {i.name: part.reshape(*part.shape[:-1], *i.shape) for i, part in zip(inputs, parts, strict=True)}
