"""What each method is, keeps and sends, and what it costs: said by its file, and measured on a small federation in memory."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from rich.table import Table
from rich.text import Text

from kilter.core import Data, Method, Rows
from kilter.errors import Mistake
from kilter.models import build
from kilter.options import declaration, default, own_fields
from kilter.runtimes.simulation import Simulation
from kilter.seeds import generator
from kilter.tasks import Task
from kilter.train import SGD

SHAPE, CLASSES, CLIENTS, ROWS = (1, 16, 16), 10, 4, 12  # small, but the network weighs more than its header
MODEL = "mlp:64"
UNDER = {"star": "star", "rotating": "rotating", "full": "the full graph of peers", "ring": "any graph of peers"}


@dataclass(frozen=True)
class About:
    """What a method's file says."""

    paper: str
    keeps: str
    sends: str


@dataclass(frozen=True)
class Cost:
    """Bytes both ways, of all nodes, as multiples of one round of FedAvg under the same topology."""

    round: float  # a round
    once: float  # before and in the first round, beyond that


def about(kind: type[Method]) -> About:
    """From the first line of the file and the line "Keeps: ...  Sends: ..." of the class."""
    paper = (sys.modules[kind.__module__].__doc__ or "").strip().splitlines()[:1]
    text = " ".join((kind.__doc__ or "").split())
    found = re.search(r"Keeps: (.*?)\.? Sends: (.*)$", text)
    keeps, sends = found.groups() if found else ("", "")
    return About(*(part.strip().removesuffix(".") for part in (*paper, keeps, sends)))


def topologies(kind: type[Method]) -> list[str]:
    """The kinds of topology a method runs under, as its needs say."""
    found = []
    for spec, text in UNDER.items():
        try:
            _federation(spec).bind(_method(kind))
        except Mistake:
            continue
        found.append(text)
    return [t for t in found if t != UNDER["full"] or UNDER["ring"] not in found]


def costs(kinds: Mapping[str, type[Method]]) -> dict[str, Cost]:
    """What a second round of each sends, in rounds of FedAvg, and what came before it."""
    from kilter.methods.fedavg import FedAvg

    plain = {spec: _traffic(FedAvg, spec)[2] for spec in ("star", "full")}
    found = {}
    for name, kind in kinds.items():
        spec = "star" if "star" in topologies(kind) else "full"
        before, first, second = _traffic(kind, spec)
        found[name] = Cost(second / plain[spec], max(0, before + first - second) / plain[spec])
    return found


def table(kinds: Mapping[str, type[Method]], measured: bool) -> Table:
    """A method a row: its paper, what it keeps, sends and costs, where it runs, its settings."""
    found = costs(kinds) if measured else {}
    made = Table("method", "", box=None, header_style="bold", pad_edge=False, show_header=False)
    for name, kind in kinds.items():
        said = about(kind)
        lines = [said.paper, f"keeps: {said.keeps}", f"sends: {said.sends}"]
        if name in found:
            lines.append(f"costs: {price(found[name])}")
        lines.append(f"under: {', '.join(topologies(kind))}")
        own = own_fields(kind, Method).values()
        lines += [f"--set {f.name}={default(f)}  {declaration(f).help}" for f in own]
        made.add_row(Text(name, "bold"), Text("\n".join(lines)))
        made.add_row()
    return made


def price(cost: Cost) -> str:
    """In words.

    >>> price(Cost(round=2, once=0.5))
    "2.00 x FedAvg's bytes a round, and 0.50 x once"
    """
    once = f", and {cost.once:.2f} x once" if cost.once >= 0.005 else ""
    return f"{cost.round:.2f} x FedAvg's bytes a round{once}"


def _traffic(kind: type[Method], spec: str) -> tuple[int, int, int]:
    """Bytes of the set-up and of two rounds."""
    with _federation(spec) as fed:
        method = _method(kind)
        fed.bind(method)
        fed.rounds = 9  # not the last yet
        state, spent = method.setup(fed), []
        for round in (0, 1, 2):
            if round:
                fed.round = round
                state = method.round(fed, state)
            record = fed.ledger.close()
            spent.append(record["bytes_up"] + record["bytes_down"])
    return spent[0], spent[1], spent[2]


def _method(kind: type[Method]) -> Method:
    return kind(task=Task(lambda: build(MODEL, SHAPE, CLASSES)), local=SGD(batch=0))


def _federation(spec: str) -> Simulation:
    def rows(name: str, n: int) -> Rows:
        x = torch.rand(n, *SHAPE, generator=generator("methods", name))
        return Rows.of(x=x, y=torch.arange(n) % CLASSES)

    clients = {f"c{k}": Data(*(rows(f"{k} {part}", ROWS) for part in range(3))) for k in range(CLIENTS)}
    return Simulation(clients, public=rows("public", CLASSES), topology=spec, stack=False)
