"""Show a split in the terminal and as a figure: how many rows of each class each client holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

from kilter.data.skew import Skew, counts, measure
from kilter.data.split import Split
from kilter.errors import Mistake

Counts = NDArray[np.int64]  # (clients, classes)

WIDE = 12  # most classes that a terminal shows as numbers; beyond, each class is a shaded cell
SHADES = " ░▒▓█"
CELLS = 36  # most shaded cells; with more classes, neighbouring classes share one


def table(split: Split, skew: Skew | None = None, cells: Counts | None = None) -> Table:
    """Counts of clients by classes, then the measures of skew; by default those of the split itself."""
    skew = measure(split) if skew is None else skew
    cells = counts(split) if cells is None else cells
    whole = Table.grid()
    whole.add_row(clients_table(split, skew, cells))
    whole.add_row("")
    sums = Table(title="Skew", title_justify="left", box=None, show_header=False, pad_edge=False)
    for name, value in skew.lines():
        sums.add_row(name, value)
    whole.add_row(sums)
    return whole


def clients_table(split: Split, skew: Skew, cells: Counts) -> Table:
    """One row for each client."""
    top = max(1, int(cells.max()))
    names = split.dataset.classes
    out = Table(title=heading(split), title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    out.add_column("client", no_wrap=True)
    if len(names) <= WIDE:
        for name in names:
            out.add_column(name[:8], justify="right", no_wrap=True)
    else:
        out.add_column(f"{len(names)} classes, {names[0]} to {names[-1]}", no_wrap=True)
        cells = np.add.reduceat(cells, range(0, len(names), -(-len(names) // CELLS)), axis=1)
        top = max(1, int(cells.max()))
    for name in ("rows", "classes", "KL", "JS"):
        out.add_column(name, justify="right", no_wrap=True)
    for client, row in zip(skew.clients, cells, strict=True):
        strength = np.sqrt(row / top)
        if len(names) <= WIDE:
            shown = [
                Text(short(int(v)) if v else "·", style=shade(float(s))) for v, s in zip(row, strength, strict=True)
            ]
        else:
            levels = np.ceil(strength * (len(SHADES) - 1)).astype(int)
            shown = [Text("".join(SHADES[level] for level in levels))]
        numbers = (str(client.classes), f"{client.kl:.2f}", f"{client.js:.2f}")
        out.add_row(client.id, *shown, short(client.n), *numbers)
    return out


def short(n: int) -> str:
    """A count in at most four characters, so that ten classes fit a terminal of eighty.

    >>> short(999), short(5197), short(12345)
    ('999', '5.2k', '12k')
    """
    return str(n) if n < 1000 else f"{n / 1000:.1f}k" if n < 9950 else f"{n / 1000:.0f}k"


def shade(strength: float) -> str:
    """The style of text on blue; 1 is the deepest blue."""
    if strength == 0:
        return "dim"
    red, green, blue = (round(255 + (dark - 255) * strength) for dark in (8, 48, 107))
    return f"{'white' if strength > 0.5 else 'black'} on rgb({red},{green},{blue})"


def heading(split: Split) -> str:
    """The data, the partition and the number of clients."""
    return f"{split.dataset.name}, {split.partition}, {len(split.clients)} clients"


def draw(split: Split, path: Path | str, cells: Counts | None = None) -> None:
    """Draw a heat map of counts, clients by classes, and each client's total; PNG or SVG by the path's suffix."""
    path = Path(path)
    if path.suffix.lower() not in (".png", ".svg"):
        raise Mistake(f"'{path}' is neither .png nor .svg: choose one of these suffixes.")
    cells = counts(split) if cells is None else cells
    ids, names = list(split.clients), split.dataset.classes
    clients, classes = cells.shape
    numbered = clients <= 25 and classes <= 20
    cell = (0.62, 0.30) if numbered else (max(0.16, min(0.5, 8 / classes)), max(0.12, min(0.30, 9 / clients)))  # inches
    wide, high = max(3.0, cell[0] * classes), max(1.6, cell[1] * clients)
    names = tuple(name if len(name) <= 20 else name[:19] + "…" for name in names)
    longest = max(map(len, names))
    turned = longest * 0.085 > wide / classes * 0.95
    left, right, top = 0.45 + 0.075 * max(map(len, ids)), 2.2, 0.75
    bottom = 0.45 + (0.07 * longest if turned else 0.1)
    width, height = left + wide + right, bottom + high + top

    figure = Figure(figsize=(width, height), dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((left / width, bottom / height, wide / width, high / height))
    most = max(1, int(cells.max()))
    norm = PowerNorm(0.5, vmin=0, vmax=most)
    image = axes.imshow(cells, aspect="auto", cmap="Blues", norm=norm, interpolation="nearest")
    small = 8 if cell[1] >= 0.18 else 5.5
    every = max(1, int(np.ceil(0.085 / cell[1])))
    axes.set_yticks(range(0, clients, every), ids[::every], fontsize=small)
    axes.set_xticks(range(classes), names, fontsize=8 if cell[0] > 0.2 else 6.5, rotation=90 if turned else 0)
    axes.set_xlabel("class")
    axes.set_ylabel("client")
    axes.set_xticks(np.arange(classes + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(clients + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=0.6)
    axes.tick_params(which="both", length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if numbered:
        for (k, c), value in np.ndenumerate(cells):
            if value:
                ink = "white" if value > 0.3 * most else "#08306b"
                axes.text(c, k, f"{value}", ha="center", va="center", fontsize=7, color=ink)
    figure.text(0.12 / width, 1 - 0.12 / height, heading(split), fontsize=11, va="top", weight="bold")

    totals = figure.add_axes(((left + wide + 0.15) / width, bottom / height, 1.1 / width, high / height), sharey=axes)
    totals.barh(range(clients), cells.sum(1), height=0.75, color="#4292c6")
    totals.set_xlabel("rows")
    totals.xaxis.set_major_locator(MaxNLocator(2, integer=True))
    totals.tick_params(axis="y", which="both", length=0, labelleft=False)
    totals.tick_params(axis="x", labelsize=7)
    totals.set_ylim(clients - 0.5, -0.5)
    for side in ("top", "right", "left"):
        totals.spines[side].set_visible(False)

    tall = min(high, 2.2)
    scale = figure.add_axes(((left + wide + 1.5) / width, 1 - (top + tall) / height, 0.12 / width, tall / height))
    figure.colorbar(image, cax=scale)
    scale.tick_params(labelsize=7)
    scale.set_title("rows of\na class", fontsize=7, pad=5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
