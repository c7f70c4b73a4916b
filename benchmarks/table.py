"""From measurements to tables: medians, spreads, ratios; and a refusal to compare those who did not do the same work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Measured = Mapping[str, Any]  # one run of one peer: work, peer, threads, rounds, startup, rss, pss, accuracy
FLOWER = "flwr"
OTHERS = ("pfl", "fluke", "hand", "hand-cl")  # whose fastest counts
BARS = {"W1": (3.0, 2.2), "W2": (12.0, 3.5), "W3": (70.0, 7.0), "W4": (1.3, 1.1)}  # against Flower, against the fastest
MEMORY, STARTUP = 3.0, 4.0  # bars: times below Flower's peak; seconds, except for W4, whose round alone takes longer
LEARNT = 0.1  # how far accuracies after the same rounds may lie apart; who trains in a round is drawn by each peer


class Unequal(Exception):
    """Peers that did not do the same work."""


@dataclass(frozen=True)
class Line:
    """What several repetitions of one setting gave."""

    peer: str
    threads: int
    seconds: float  # of a steady round: the median over repetitions of each one's median
    least: float
    most: float
    startup: float  # seconds from the process's start to the end of its first round, median
    rss: int  # bytes, the largest
    pss: int
    loss: float  # of the last round, median
    accuracy: float  # after the last round, median
    times: int  # repetitions


def steady(run: Measured) -> float:
    """Seconds of a round: the median of all but the first, or the only one."""
    seconds = [r["seconds"] for r in run["rounds"]]
    return median(seconds[1:] or seconds)


def check(runs: Sequence[Measured], steps: int, rounds: int) -> None:
    """Every run did as many rounds, and as many optimiser steps in each, as the work has; else nothing is compared."""
    for run in runs:
        who = f"{run['work']}: {run['peer']} with {run['threads']}"
        if len(run["rounds"]) != rounds:
            raise Unequal(f"{who} did {len(run['rounds'])} rounds, not {rounds}: nothing is compared.")
        for r in run["rounds"]:
            if r["steps"] != steps:
                raise Unequal(f"{who} did {r['steps']} steps in round {r['round']}, not {steps}: nothing is compared.")


def lines(runs: Sequence[Measured]) -> list[Line]:
    """One line for each peer and setting, in the order they came."""
    groups: dict[tuple[str, int], list[Measured]] = {}
    for run in runs:
        groups.setdefault((run["peer"], run["threads"]), []).append(run)
    lines = []
    for (peer, threads), some in groups.items():
        seconds = [steady(run) for run in some]
        lines.append(
            Line(
                peer,
                threads,
                median(seconds),
                min(seconds),
                max(seconds),
                median(run["startup"] for run in some),
                max(run["rss"] for run in some),
                max(run["pss"] for run in some),
                median(run["rounds"][-1]["loss"] for run in some),
                median(run["accuracy"] for run in some),
                len(some),
            )
        )
    return lines


def best(lines: Sequence[Line]) -> dict[str, Line]:
    """Each peer's better setting."""
    chosen: dict[str, Line] = {}
    for line in lines:
        if line.peer not in chosen or line.seconds < chosen[line.peer].seconds:
            chosen[line.peer] = line
    return chosen


def ratios(lines: Sequence[Line]) -> dict[str, float]:
    """How many times longer each peer takes than Kilter, better setting against better setting."""
    chosen = best(lines)
    if "kilter" not in chosen:
        return {}
    return {peer: line.seconds / chosen["kilter"].seconds for peer, line in chosen.items() if peer != "kilter"}


def verdict(work: str, lines: Sequence[Line]) -> dict[str, Any]:
    """Kilter against Flower and against the fastest of the others, each with its bar; None where one was not measured."""
    times = ratios(lines)
    others = {peer: times[peer] for peer in OTHERS if peer in times}
    fastest = min(others, key=lambda p: others[p]) if others else None
    bars = BARS.get(work, (None, None))
    out: dict[str, Any] = {"flower": times.get(FLOWER), "flower_bar": bars[0]}
    out |= {"fastest": fastest, "others": others[fastest] if fastest else None, "others_bar": bars[1]}
    chosen = best(lines)
    if "kilter" in chosen:
        out["startup"] = chosen["kilter"].startup
        if FLOWER in chosen:
            out["memory"] = chosen[FLOWER].rss / chosen["kilter"].rss
    return out


def strangers(lines: Sequence[Line]) -> list[str]:
    """Who has learnt something else than the others: accuracies far from the median."""
    middle = median(line.accuracy for line in lines)
    return [
        f"{line.peer} with {line.threads} has accuracy {line.accuracy:.2f}, the median is {middle:.2f}"
        for line in lines
        if abs(line.accuracy - middle) > LEARNT
    ]


# ---- as text ----


def short(seconds: float) -> str:
    """Three digits."""
    return f"{seconds:.0f}" if seconds >= 100 else f"{seconds:.3g}"


def megabytes(size: int) -> str:
    return f"{size / 2**20:,.0f}"


def rows(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(["| " + " | ".join(r) + " |" for r in (header, ["---"] * len(header), *body)])


def against(value: float | None, bar: float | None) -> list[str]:
    """A ratio and its bar."""
    if value is None:
        return ["not measured", ""]
    if bar is None:
        return [f"{short(value)}x", ""]
    return [f"**{short(value)}x**", f"{bar:g} {'met' if value >= bar else 'MISSED'}"]


def verdicts(lines_by_work: Mapping[str, Sequence[Line]]) -> str:
    body = []
    for work, some in lines_by_work.items():
        v, mine = verdict(work, some), best(some).get("kilter")
        if mine is None:
            continue
        who = f" ({v['fastest']})" if v["fastest"] else ""
        flower, others = against(v["flower"], v["flower_bar"]), against(v["others"], v["others_bar"])
        memory = against(v.get("memory"), MEMORY if work in BARS else None)
        start = f"{short(v['startup'])} s"
        if work in BARS and work != "W4":
            start += f", bar {STARTUP:g} {'met' if v['startup'] < STARTUP else 'MISSED'}"
        body.append(
            [work, short(mine.seconds), *flower, others[0] + who, others[1], memory[0] + " " + memory[1], start]
        )
    header = ["", "Kilter, s a round", "Flower / Kilter", "bar", "fastest other / Kilter", "bar"]
    return rows([*header, "Flower's memory / Kilter's", "Kilter's start-up and first round"], body)


def details(some: Sequence[Line], kilter: float | None) -> str:
    body = [
        [
            line.peer,
            str(line.threads),
            short(line.seconds),
            f"{short(line.least)} - {short(line.most)}",
            f"{line.seconds / kilter:.2f}x" if kilter else "",
            short(line.startup),
            megabytes(line.rss),
            megabytes(line.pss),
            f"{line.loss:.3f}",
            f"{line.accuracy:.3f}",
            str(line.times),
        ]
        for line in some
    ]
    header = ["", "threads", "s a round", "least - most", "/ Kilter", "start-up + first round, s", "peak RSS, MB"]
    return rows([*header, "peak PSS, MB", "loss", "accuracy", "times"], body)
