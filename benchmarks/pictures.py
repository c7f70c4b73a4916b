"""The two pictures of the benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import table
from work import WORKS

COLOURS = {
    "kilter": "#0b6e4f",
    "flwr": "#f4a259",
    "pfl": "#9b6db0",
    "fluke": "#4a7fb5",
    "hand": "#9a9a9a",
    "hand-cl": "#5c5c5c",
}
NAMES = {
    "kilter": "Kilter",
    "flwr": "Flower",
    "pfl": "pfl",
    "fluke": "fluke",
    "hand": "plain loop",
    "hand-cl": "plain loop,\nchannels_last",
}


def speed(lines_by_work: Mapping[str, Sequence[table.Line]], path: Path) -> None:
    """A panel for each workload: seconds a round of each peer at its better setting, with the spread over repetitions."""
    if not lines_by_work:
        return
    columns = min(4, len(lines_by_work))
    lines = -(-len(lines_by_work) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(3.4 * columns, 2.5 * lines), squeeze=False, layout="constrained"
    )
    for ax in axes.flat[len(lines_by_work) :]:
        ax.axis("off")
    for ax, (work, some) in zip(axes.flat, lines_by_work.items(), strict=False):
        chosen = table.best(some)
        times = table.ratios(some)
        shown = [p for p in NAMES if p in chosen][::-1]
        seconds = [chosen[p].seconds for p in shown]
        spread = [[s - chosen[p].least for p, s in zip(shown, seconds, strict=True)]]
        spread += [[chosen[p].most - s for p, s in zip(shown, seconds, strict=True)]]
        ax.barh([NAMES[p] for p in shown], seconds, color=[COLOURS[p] for p in shown], height=0.7)
        ax.errorbar(seconds, range(len(shown)), xerr=spread, fmt="none", ecolor="black", elinewidth=1, capsize=2)
        for k, p in enumerate(shown):
            text = f" {table.short(chosen[p].seconds)} s" + (f"  ({times[p]:.1f}x)" if p in times else "")
            ax.text(chosen[p].most, k, text, va="center", fontsize=8)
        ax.set_xlim(0, 1.75 * max(chosen[p].most for p in shown))
        w = WORKS[work]
        ax.set_title(f"{work}: {w.model}, {w.sampled} of {w.clients:,} clients", fontsize=9, loc="left")
        ax.tick_params(labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("seconds a round (median, least to most); in brackets: times Kilter's", fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def growth(lines_by_clients: Mapping[int, Sequence[table.Line]], path: Path) -> None:
    """Seconds a round and peak memory by the number of clients."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.4), layout="constrained")
    for peer, name in NAMES.items():
        at = {n: table.best(some)[peer] for n, some in lines_by_clients.items() if peer in table.best(some)}
        if not at:
            continue
        style = {
            "color": COLOURS[peer],
            "marker": "o",
            "markersize": 4,
            "label": name.replace("\n", " "),
            "lw": 2.4 if peer == "kilter" else 1.2,
        }
        left.plot(list(at), [line.seconds for line in at.values()], **style)
        right.plot(list(at), [line.rss / 2**30 for line in at.values()], **style)
    for ax, what in ((left, "seconds a round"), (right, "peak memory, GB (RSS, all processes)")):
        ax.set_xscale("log")
        ax.set_xticks(list(lines_by_clients), [f"{n:,}" for n in lines_by_clients])
        ax.minorticks_off()
        ax.set_xlabel("clients (100 of them, or all, in a round)", fontsize=9)
        ax.set_ylabel(what, fontsize=9)
        ax.yaxis.set_major_formatter(lambda v, _: f"{v:g}")
        ax.tick_params(labelsize=8)
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    left.set_yscale("log")
    right.set_ylim(bottom=0)
    names = left.get_legend_handles_labels()
    figure.legend(*names, fontsize=8, frameon=False, loc="outside upper center", ncols=len(names[1]))
    figure.savefig(path, dpi=150)
    plt.close(figure)
