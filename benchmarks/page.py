"""The page of what was measured: speed.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import table
from work import GROWTH, SLOWER, TRIAL, WORKS


def page(
    about: dict[str, Any], lines_by_work: dict[str, list[table.Line]], when: dict[str, str], notes: Sequence[str]
) -> str:
    """What was measured, of each work its lines and when, and how."""
    shown = {w: s for w, s in lines_by_work.items() if w not in GROWTH}
    text = [
        "# Speed",
        f"`{about['command']}` on {about['machine']}; Python {about['python']}. "
        + "; ".join(f"{p}: {v}" for p, v in about["versions"].items())
        + ".",
    ]
    if any(about["smaller"].values()):
        text.append(
            f"**Not the workloads themselves but smaller ones ({about['smaller']}): only to try the harness out.**"
        )
    text += [
        "![seconds a round](speed.png)",
        "## Kilter and its peers",
        "A ratio says how many times longer the peer takes than Kilter for one steady round, each at its better setting.",
        table.verdicts(shown),
    ]
    for label, some in shown.items():
        w, mine = WORKS[label], table.best(some).get("kilter")
        text += [
            f"### {label}: {w.method}, {w.clients:,} clients x {w.images} images of {w.data}, {w.sampled} a round, {w.model}",
            when[label],
            table.details(some, mine.seconds if mine else None),
        ]
    grown = {WORKS[w].clients: s for w, s in lines_by_work.items() if w in GROWTH}
    if grown:
        text += [
            "## Growth",
            "W3's network and 60 images a client, 100 clients (or all there are) in a round. Beyond 1,000 clients there are too "
            "few images for each to be with one client only: every client draws its own 60 of the 60,000.",
            "![growth](growth.png)",
            *(f"### {n:,} clients\n\n{when[f'G{n}']}\n\n{table.details(some, None)}" for n, some in grown.items()),
        ]
    text.append("## How it was measured")
    means = "; ".join(f"{p}: {what}" for p, what in about["threads"].items())
    text += [
        "- The same rows, network and first weights for all (`work.py`), read from the same files; SGD 0.01, batches of 32, one "
        "epoch. Every runner counts its optimiser steps; were they not equal in every round, this page would not exist.\n"
        "- Peers take turns within a repetition. Seconds: the median over repetitions of each one's median steady round, and the "
        "least and most of these. The first round belongs to the start-up, except in W4, where it is the only one, timed from "
        "its own beginning. Nothing is evaluated in timed rounds; accuracy is that of the last model on 2,000 test images. Who "
        "trains in a round is drawn by each peer, so losses and accuracies are close but not equal.\n"
        f"- Threads: 1, or 2, which means for {means}. A setting that took {SLOWER} times as long as the other in the first "
        f"repetition is not repeated. In W4 only the setting that a trial with {TRIAL} images a client found "
        "faster; in W5 and in the growth curve (measured once) only the one that was faster on W1 and on W3.\n"
        "- Start-up: from the process's start, imports and Ray's start included, to the end of the first round. Memory: of the "
        "peer's whole family of processes, read from /proc five times a second; RSS summed counts pages that processes share "
        "once for each of them (so do forked workers' data), PSS once.\n"
        "- Flower: the message API on its Ray backend by `flwr.simulation.run_simulation`; one torch thread in each actor. pfl: "
        "two processes by torchrun and gloo. fluke: torchvision, datasets, wandb, clearml and opacus, which it imports and this "
        "run never calls, are replaced by empty stand-ins. The hand-written loop runs in Kilter's venv; `hand-cl` is it with "
        "channels_last.\n"
        "- W5: SCAFFOLD where the peer has it for its PyTorch (not written by us for Flower); FedDisk's weighted loss with "
        "weights drawn beforehand, for its rounds and not its set-up are compared."
    ]
    text += ["## Notes", *(f"- {n}" for n in notes)] if notes else []
    return "\n\n".join(text) + "\n"
