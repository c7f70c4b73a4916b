"""Who listens to whom, from what a run records: a graph, a matrix by round, and uncertainty and list size by round.

Any method's run has these pictures whose steps leave notes with `listens`: {peer: weight}, how much of others' models a node took
besides its own, which weighs 1. Notes with `uncertainty` (mean over whom it knows) and `chosen` (how many it asked) give curves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from kilter.errors import Mistake
from kilter.records.run_folder import read_rounds

PANELS = 8  # rounds shown as matrices
STRONGEST = 3  # whom a peer listens to most: the arrows of the graph
CURVES = ("uncertainty", "chosen")
Axes = Any  # matplotlib has no types


@dataclass(frozen=True)
class Trust:
    """What a run's notes say."""

    ids: list[str]
    shares: dict[
        int, NDArray[np.float64]
    ]  # by round: (listener, source) -> share of the listener's new model, diagonal 0
    curves: dict[str, dict[int, list[float]]]  # by name and round: one value a peer


def tables(record: Mapping[str, Any]) -> Iterable[tuple[str, dict[str, Any]]]:
    """(node, table) of a round's notes that are tables, not sentences."""
    return ((n["node"], n["note"]) for n in record.get("notes", []) if isinstance(n["note"], dict))


def by_round(rounds: Iterable[Mapping[str, Any]]) -> dict[str, dict[int, list[float]]]:
    """Uncertainty and list size of every peer, by round."""
    found: dict[str, dict[int, list[float]]] = {name: {} for name in CURVES}
    for record in rounds:
        for _, table in tables(record):
            for name in CURVES:
                if name in table:
                    found[name].setdefault(record["round"], []).append(float(table[name]))
    return found


def read(folder: Path) -> Trust | None:
    """From a run folder; None if nobody listened to anybody."""
    rounds = [r for r in read_rounds(folder) if r["round"] > 0]
    heard = {r["round"]: {node: t["listens"] for node, t in tables(r) if "listens" in t} for r in rounds}
    if not any(heard.values()):
        return None
    ids = {i for r in rounds for i in r["participants"]}
    ids |= {i for some in heard.values() for node, listens in some.items() for i in (node, *listens)}
    order = sorted(ids)
    at = {name: k for k, name in enumerate(order)}
    shares = {}
    for t, some in heard.items():
        shares[t] = np.zeros((len(order), len(order)))
        for node, listens in some.items():
            whole = 1 + sum(listens.values())
            for source, weight in listens.items():
                shares[t][at[node], at[source]] = weight / whole
    return Trust(order, shares, by_round(rounds))


def draw(folder: Path) -> list[Path]:
    """The pictures into the run folder, PNG and SVG; the paths of the PNGs. None where the run has nothing to show."""
    from matplotlib import rc_context

    found = read(folder)
    if found is None:
        return []
    with rc_context({"font.size": 9, "axes.titlesize": 9.5, "svg.fonttype": "none", "svg.hashsalt": "kilter"}):
        made = [_save(graph(found), folder / "trust-graph"), _save(matrices(found), folder / "trust-matrix")]
        if any(found.curves.values()):
            made.append(_save(curves(found), folder / "trust-rounds"))
    return made


def draw_or_refuse(folder: Path) -> list[Path]:
    """`draw`, for someone who asks for it."""
    if not (folder / "rounds.jsonl").is_file():
        raise Mistake(f"'{folder}' is not a run folder: it has no rounds.jsonl.")
    made = draw(folder)
    if not made:
        raise Mistake(f"In '{folder}' nobody chose whom to listen to: only methods such as slfed record that.")
    return made


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
    """Arrows to the few each peer listens to most, over all rounds; a peer is the larger the more it is listened to."""
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
    """A row is a listener, a column whom it listens to, the colour the share of the listener's new model; some rounds."""
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
        axes.set_facecolor("0.85")  # the diagonal: nobody need listen to itself
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
    """Mean over peers by round, the band from the least to the most."""
    figure = _new(7.6, 2.9)
    words = {"uncertainty": "mean uncertainty about known peers", "chosen": "peers asked (list size)"}
    for axes, name in zip(figure.subplots(1, 2), CURVES, strict=True):
        rounds = sorted(trust.curves[name])
        values = [trust.curves[name][t] for t in rounds]
        axes.fill_between(rounds, [min(v) for v in values], [max(v) for v in values], color="#0072B2", alpha=0.15, lw=0)
        axes.plot(rounds, [np.mean(v) for v in values], color="#0072B2", linewidth=1.6, marker="o", markersize=3)
        axes.set_xlabel("round")
        axes.set_title(words[name], loc="left")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="0.9", linewidth=0.6)
        if name == "chosen":
            half = (len(trust.ids) - 1) / 2
            axes.axhline(half, color="0.4", linewidth=1, linestyle=(0, (4, 2)))
            axes.annotate("half of the others", (rounds[-1], half), ha="right", va="bottom", fontsize=8, color="0.3")
        axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
    return figure
