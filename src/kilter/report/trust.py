"""Who listens to whom in a run: a graph, a matrix for some rounds, and the series that the method records.

A run has these figures if its method calls `node.listened({peer: weight})`: how much of others' models a node took besides its
own, which has weight 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from kilter.errors import Mistake
from kilter.records.run_folder import read_rounds

PANELS = 8  # rounds shown as matrices
STRONGEST = 3  # the peers a node listens to most: the arrows of the graph
Axes = Any  # matplotlib has no types


@dataclass(frozen=True)
class Trust:
    """Who listened to whom, by round."""

    ids: list[str]
    shares: dict[int, NDArray[np.float64]]  # by round: (listener, source) -> share of the listener's model, diagonal 0
    series: dict[str, dict[int, list[float]]]  # by name and round: one value for each peer


def read(folder: Path) -> Trust | None:
    """From a run folder; None if nobody listened to anybody."""
    rounds = [record for record in read_rounds(folder) if record.round > 0]
    if not any(record.listens for record in rounds):
        return None
    ids = {i for record in rounds for i in record.participants}
    ids |= {i for record in rounds for node, weights in record.listens.items() for i in (node, *weights)}
    order = sorted(ids)
    at = {name: k for k, name in enumerate(order)}
    shares = {}
    series: dict[str, dict[int, list[float]]] = {}
    for record in rounds:
        shares[record.round] = np.zeros((len(order), len(order)))
        for node, weights in record.listens.items():
            whole = 1 + sum(weights.values())
            for source, weight in weights.items():
                shares[record.round][at[node], at[source]] = weight / whole
        for point in record.series:
            series.setdefault(point.series, {}).setdefault(point.at, []).append(point.value)
    return Trust(order, shares, series)


def draw(folder: Path) -> list[Path]:
    """Draw the figures into the run folder, as PNG and SVG; the paths of the PNGs. None if nobody listened to anybody."""
    from matplotlib import rc_context

    trust = read(folder)
    if trust is None:
        return []
    with rc_context({"font.size": 9, "axes.titlesize": 9.5, "svg.fonttype": "none", "svg.hashsalt": "kilter"}):
        paths = [_save(graph(trust), folder / "trust-graph"), _save(matrices(trust), folder / "trust-matrix")]
        if trust.series:
            paths.append(_save(curves(trust), folder / "trust-rounds"))
    return paths


def draw_or_refuse(folder: Path) -> list[Path]:
    """Draw the figures; a Mistake if there is nothing to draw."""
    if not (folder / "rounds.jsonl").is_file():
        raise Mistake(f"'{folder}' is not a run folder: it has no rounds.jsonl.")
    paths = draw(folder)
    if not paths:
        raise Mistake(f"The run in '{folder}' does not record who listens to whom: only methods such as slfed do.")
    return paths


def _new(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: Path) -> Path:
    for suffix in (".svg", ".png"):
        figure.savefig(path.with_suffix(suffix), metadata={"Date": None} if suffix == ".svg" else None)
    return path.with_suffix(".png")


def graph(trust: Trust) -> Any:
    """Arrows to the peers each node listens to most, over all rounds. Nodes that others listen to more are larger."""
    mean = np.mean(list(trust.shares.values()), axis=0)
    links = nx.DiGraph()
    links.add_nodes_from(trust.ids)
    for k, name in enumerate(trust.ids):
        for j in np.argsort(-mean[k], kind="stable")[:STRONGEST]:
            if mean[k, j] > 0:
                links.add_edge(name, trust.ids[j], weight=float(mean[k, j]))
    places = nx.circular_layout(links)
    heard = mean.sum(axis=0)
    widths = np.array([links.edges[e]["weight"] for e in links.edges])
    figure = _new(6.2, 6.4)
    axes = figure.subplots()
    sizes = 250 + 900 * heard / max(heard.max(), 1e-12)
    nx.draw_networkx_nodes(
        links,
        places,
        ax=axes,
        node_size=sizes,
        node_color=heard,
        cmap="Blues",
        vmin=0,
        vmax=2 * heard.max(),
        edgecolors="0.3",
    )
    nx.draw_networkx_edges(
        links,
        places,
        ax=axes,
        node_size=sizes,
        width=0.5 + 2.0 * widths / widths.max(),
        edge_color="#D55E00",
        alpha=0.55,
        arrowsize=9,
        connectionstyle="arc3,rad=0.08",
    )
    nx.draw_networkx_labels(links, places, ax=axes, font_size=8)
    axes.set_title(
        f"Who listens to whom: arrows to the {STRONGEST} each peer listens to most\n"
        f"(mean of {len(trust.shares)} rounds; larger: listened to more)",
        loc="left",
    )
    axes.set_axis_off()
    axes.set(xlim=(-1.2, 1.2), ylim=(-1.2, 1.2), aspect="equal")
    return figure


def matrices(trust: Trust) -> Any:
    """Matrices of some rounds: rows are listeners, columns are whom they listen to, colours are shares of the new model."""
    rounds = sorted(trust.shares)
    shown = [
        rounds[k] for k in np.unique(np.linspace(0, len(rounds) - 1, min(PANELS, len(rounds))).round().astype(int))
    ]
    columns = min(4, len(shown))
    rows = -(-len(shown) // columns)
    many = len(trust.ids) > 30
    figure = _new(2.7 * columns + 0.9, 2.8 * rows + 0.3)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    top = max(m.max() for m in trust.shares.values())
    picture = None
    for at, axes in enumerate(grid.flat):
        if at >= len(shown):
            axes.set_visible(False)
            continue
        m = np.ma.masked_where(np.eye(len(trust.ids), dtype=bool), trust.shares[shown[at]])
        axes.set_facecolor("0.85")  # the diagonal
        picture = axes.imshow(100 * m, cmap="Blues", vmin=0, vmax=100 * top, interpolation="nearest")
        axes.set_title(f"round {shown[at]}", loc="left")
        step = -(-len(trust.ids) // 20) if many else 1
        marks = range(0, len(trust.ids), step)
        axes.set_xticks(marks, [trust.ids[k] for k in marks], rotation=90, fontsize=6)
        axes.set_yticks(marks, [trust.ids[k] for k in marks], fontsize=6)
        axes.tick_params(length=1.5)
        if at % columns == 0:
            axes.set_ylabel("listener")
        if at >= len(shown) - columns:
            axes.set_xlabel("listens to")
            axes.tick_params(labelbottom=True)
    figure.colorbar(picture, ax=grid, shrink=0.8, label="share of the listener's new model (%)")
    return figure


def curves(trust: Trust) -> Any:
    """Every recorded series: the mean over peers, the band from the smallest to the largest value."""
    names = list(trust.series)
    figure = _new(3.8 * len(names), 2.9)
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False).flat, names, strict=True):
        rounds = sorted(trust.series[name])
        values = [trust.series[name][t] for t in rounds]
        axes.fill_between(rounds, [min(v) for v in values], [max(v) for v in values], color="#0072B2", alpha=0.15, lw=0)
        axes.plot(rounds, [np.mean(v) for v in values], color="#0072B2", linewidth=1.6, marker="o", markersize=3)
        axes.set_xlabel("round")
        axes.set_title(name, loc="left")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="0.9", linewidth=0.6)
        axes.set_ylim(min(0.0, axes.get_ylim()[0]), 1.12 * axes.get_ylim()[1])
    return figure
