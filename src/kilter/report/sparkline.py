"""A curve in one line of text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from kilter.records.display import metric
from kilter.records.types import Round

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 30  # characters


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """Values as blocks of growing height; more values than characters are averaged.

    >>> sparkline([0, 1, 2, 3]), sparkline([5, 5]), sparkline([])
    ('▁▃▆█', '▁▁', '')
    """
    if len(values) > width:
        edges = [round(k * len(values) / width) for k in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    if not values:
        return ""
    low, high = min(values), max(values)
    unit = (high - low) / (len(BLOCKS) - 1) or 1.0
    return "".join(BLOCKS[round((v - low) / unit)] for v in values)


def curve_lines(rounds: Sequence[Round], main: str = "accuracy") -> list[str]:
    """The main metric and the training loss by round, a line each."""
    overall = [v for r in rounds if (v := (r.global_metrics or {}).get(main)) is not None]
    clients = [r.client[main].mean for r in rounds if main in r.client]
    losses = [r.loss for r in rounds if r.round > 0 and r.loss is not None]
    lines = []
    for name, values in ((f"global {main}", overall), (f"clients' {main}", clients)):
        if len(values) > 1:
            lines.append((name, values, f"{metric(main, values[0])} to {metric(main, values[-1])}"))
    if len(losses) > 1:
        lines.append(("training loss", losses, f"{losses[0]:.3g} to {losses[-1]:.3g}"))
    wide = max((len(name) for name, _, _ in lines), default=0)
    return [f"{name:<{wide}}  {sparkline(values)}  {text}" for name, values, text in lines]
