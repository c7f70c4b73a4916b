"""A study's figures as PNG and SVG: curves with bands over seeds, boxes over clients, accuracy against bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from kilter.study.grid import slug
from kilter.study.results import CellResult, Line, Results

Axes = Any  # matplotlib has no types
# Okabe and Ito's colours, which colour-blind readers can tell apart; black is for the reference
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
PAGE = 6  # cells on one figure
TEXT = {"global": "global accuracy (%)", "client": "mean client accuracy (%)", "local": "mean local accuracy (%)"}


@dataclass(frozen=True)
class StudyFigure:
    """A figure on disk."""

    path: Path  # without suffix
    kind: str
    title: str = ""  # of a series: its name


def draw(results: Results, folder: Path) -> list[StudyFigure]:
    """Draw all figures of a study into a folder."""
    cells = [c for c in results.cells if any(line.runs for line in c.lines)]
    kinds: list[tuple[str, Callable[[Results, CellResult, Axes], None]]] = [
        ("curves-global", lambda r, c, a: curves(r, c, a, "global")),
        ("curves-client", lambda r, c, a: curves(r, c, a, "client")),
        *([("curves-local", lambda r, c, a: curves(r, c, a, "local"))] if results.study.measure == "local" else []),
        ("bytes", against_bytes),
        ("clients", boxes),
    ]
    for name in _series_names(cells):
        kinds.append((f"series-{slug(name)}", lambda r, c, a, name=name: series(r, c, a, name)))  # type: ignore[misc]
    figures = []
    titles = {f"series-{slug(name)}": name for name in _series_names(cells)}
    folder.mkdir(parents=True, exist_ok=True)
    for name, panel in kinds:
        for page, some in enumerate(_pages(cells), start=1):
            path = folder / (name if page == 1 else f"{name}-{page}")
            _figure(results, some, panel, path, legend=name != "clients")
            figures.append(StudyFigure(path, name, titles.get(name, "")))
    return figures


def _series_names(cells: Sequence[CellResult]) -> list[str]:
    """The series that any run recorded."""
    return list(dict.fromkeys(name for c in cells for line in c.lines for r in line.runs for name in r.series))


def _pages(cells: Sequence[CellResult]) -> Iterator[Sequence[CellResult]]:
    for start in range(0, len(cells), PAGE):
        yield cells[start : start + PAGE]


def style(results: Results, label: str) -> dict[str, Any]:
    """A method's colour and dashes, the same in all figures. The reference is black."""
    labels = [e.label for e in results.study.entries]
    order = [results.study.reference, *(name for name in labels if name != results.study.reference)]
    at = order.index(label)
    return {"color": COLOURS[at % len(COLOURS)], "linestyle": DASHES[(at // len(COLOURS) + at) % len(DASHES)]}


def _figure(
    results: Results,
    cells: Sequence[CellResult],
    panel: Callable[[Results, CellResult, Axes], None],
    path: Path,
    legend: bool,
) -> None:
    """Panels side by side, with one legend to the right."""
    labels = [e.label for e in results.study.entries]
    columns = 1 if len(cells) == 1 else 2 if len(cells) <= 4 else 3
    rows = ceil(len(cells) / columns)
    longest = max(map(len, labels))
    boxed = not legend
    high = max(2.7, 0.9 + 0.33 * len(labels)) if boxed else 2.9
    wide = 4.2 if not boxed else 3.6 + 0.07 * longest
    beside = 0.75 + 0.085 * longest if legend else 0.0
    with rc_context({"font.size": 9, "axes.titlesize": 9.5, "svg.fonttype": "none", "svg.hashsalt": "kilter"}):
        figure = Figure(figsize=(wide * columns + beside, high * rows + 0.1), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(rows, columns, squeeze=False, sharey=boxed)
        for at, axes in enumerate(grid.flat):
            if at >= len(cells):
                axes.set_visible(False)
                continue
            panel(results, cells[at], axes)
            axes.set_title(cells[at].cell.name, loc="left")
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="x" if boxed else "both", color="0.9", linewidth=0.6)
            axes.set_axisbelow(True)
            if at % columns:
                axes.set_ylabel("")
        if legend:
            handles: dict[str, Any] = {}
            for axes in grid.flat:
                handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
            shown = [name for name in labels if name in handles]
            figure.legend(
                [handles[k] for k in shown], shown, loc="outside right upper", frameon=False, handlelength=2.6
            )
        for suffix in (".png", ".svg"):
            figure.savefig(path.with_name(path.name + suffix), metadata={"Date": None} if suffix == ".svg" else None)


Band = tuple[list[int], np.ndarray[Any, Any], np.ndarray[Any, Any]]


def _label(results: Results, measure: str) -> str:
    """The axis of a measure."""
    text = TEXT[measure]
    return text if results.metric == "accuracy" else text.replace("accuracy (%)", results.metric)


def _metric_band(line: Line, measure: str, scale: int) -> Band | None:
    """The main metric over the seeds; an accuracy in per cent."""
    band = _band([r.curves[measure] for r in line.runs if r.curves.get(measure)])
    return None if band is None else (band[0], scale * band[1], scale * band[2])


def _band(curves: Sequence[Mapping[int, float]]) -> Band | None:
    """The rounds that all curves have; mean and standard deviation there."""
    if not curves:
        return None
    rounds = sorted(set.intersection(*map(set, curves)))
    table = np.array([[c[t] for t in rounds] for c in curves])
    std = table.std(axis=0, ddof=1) if len(curves) > 1 else np.zeros(len(rounds))
    return rounds, table.mean(axis=0), std


def curves(results: Results, cell: CellResult, axes: Axes, measure: str) -> None:
    """Mean accuracy over seeds by round; the band is one standard deviation each way."""
    for line in cell.lines:
        _draw_band(axes, _metric_band(line, measure, results.scale), style(results, line.label), line.label)
    axes.set_xlabel("round")
    axes.set_ylabel(_label(results, measure))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))


def series(results: Results, cell: CellResult, axes: Axes, name: str) -> None:
    """A series that a method records: mean over seeds; the band is one standard deviation each way."""
    for line in cell.lines:
        band = _band([r.series[name] for r in line.runs if name in r.series])
        _draw_band(axes, band, style(results, line.label), line.label)
    in_setup = any(name in r.setup_series for line in cell.lines for r in line.runs)
    axes.set_xlabel("round of the set-up phase" if in_setup else "round")
    axes.set_ylabel(name)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))


def _draw_band(axes: Axes, band: Band | None, look: dict[str, Any], label: str) -> None:
    if band is None:
        return
    rounds, mean, std = band
    axes.fill_between(rounds, mean - std, mean + std, color=look["color"], alpha=0.13, linewidth=0)
    axes.plot(rounds, mean, label=label, linewidth=1.6, marker="o" if len(rounds) == 1 else None, **look)


def against_bytes(results: Results, cell: CellResult, axes: Axes) -> None:
    """Accuracy against the bytes sent so far. A method that sends nothing is a level line at its last accuracy."""
    measure = results.study.measure
    silent: list[tuple[float, dict[str, Any], str]] = []
    for line in cell.lines:
        if (band := _metric_band(line, measure, results.scale)) is None:
            continue
        rounds, mean, std = band
        look = style(results, line.label)
        sent = np.mean([[sum(n for r, n in run.spent.items() if r <= t) for t in rounds] for run in line.runs], axis=0)
        if not sent.any():
            silent.append((float(mean[-1]), look, line.label))
            continue
        axes.fill_between(sent, mean - std, mean + std, color=look["color"], alpha=0.13, linewidth=0)
        some = {"marker": "o", "markersize": 3} if len(set(sent)) < 4 else {}
        axes.plot(sent, mean, label=line.label, linewidth=1.6, **look, **some)
    for level, look, label in silent:
        axes.axhline(level, linewidth=1.2, label=f"{label}", **look)
    if axes.lines and any(len(set(line.get_xdata())) > 2 for line in axes.lines):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("bytes sent, up and down" + ("; level lines: no traffic" if silent else ""))
    axes.set_ylabel(_label(results, measure))
    axes.xaxis.set_major_formatter(lambda value, _: _bytes(value))


def _bytes(value: float) -> str:
    """A tick: 1 kB, 10 MB.

    >>> _bytes(1e7), _bytes(2500.0), _bytes(0.0)
    ('10 MB', '2.5 kB', '0')
    """
    if value <= 0:
        return "0"
    step = min(int(np.log10(value) // 3), 5) if value >= 1 else 0
    return f"{value / 1000**step:g} {('B', 'kB', 'MB', 'GB', 'TB', 'PB')[step]}"


def boxes(results: Results, cell: CellResult, axes: Axes) -> None:
    """All clients of all seeds: quartiles, median, whiskers at 1.5 quartile ranges, outliers; a cross marks the mean."""
    names = [line.label for line in cell.lines]
    at = list(range(len(names)))[::-1]
    for place, line in zip(at, cell.lines, strict=True):
        values = [results.scale * a for run in line.runs for a in run.clients]
        if not values:
            continue
        colour = style(results, line.label)["color"]
        axes.boxplot(
            [values],
            positions=[place],
            widths=0.62,
            patch_artist=True,
            showmeans=True,
            orientation="horizontal",
            medianprops={"color": colour, "linewidth": 1.6},
            boxprops={"facecolor": colour + "26", "edgecolor": colour},
            whiskerprops={"color": colour},
            capprops={"color": colour},
            meanprops={"marker": "x", "markeredgecolor": colour, "markersize": 5},
            flierprops={
                "marker": ".",
                "markersize": 3,
                "markerfacecolor": colour,
                "markeredgecolor": "none",
                "alpha": 0.7,
            },
        )
    axes.set_yticks(at, names)
    axes.set_ylim(-0.6, len(names) - 0.4)
    if results.scale == 100:
        axes.set_xlim(-2, 102)
    per_cent = " (%)" if results.scale == 100 else ""
    axes.set_xlabel(f"{results.metric} of a client on its own test rows{per_cent}")
