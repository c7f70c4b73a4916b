"""A site in this process, and a server that says whatever a test wants: terms and orders without a network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from kilter import data as kdata
from kilter.core import Tree
from kilter.experiment import Experiment
from kilter.net.data_description import DataDescription
from kilter.net.messages import Order, Reply, StateMark
from kilter.net.policy import SitePolicy
from kilter.net.site import Site
from kilter.net.terms import Terms
from kilter.records import wire
from kilter.runtimes.step_names import StepName
from kilter.topology import topology

RUN, SESSION = "0" * 32, "1" * 32
IDS = ("a", "b", "c")
AUTOMATIC = SitePolicy(approval="policy")


def make_site(folder: Path, policy: SitePolicy = AUTOMATIC, name: str = "a", rows: int = 0, **options: Any) -> Site:
    dataset = kdata.load("digits")
    if rows:
        dataset = replace(dataset, train=dataset.train[:rows])
    return Site(name, dataset, folder / f"state-{name}", policy, "digits", **options)


def make_terms(site: Site, graph: str = "star", run: str = RUN, **experiment: Any) -> Terms:
    given = {"method": "fedavg", "model": "mlp:8", "rounds": 3, "seed": 3, "valid": 0.2, **experiment}
    spec = Experiment.of({**given, "local": {"lr": 0.1, "batch": 16, **given.get("local", {})}})
    return Terms.write(run, SESSION, spec, DataDescription.of(site.dataset), topology(graph, IDS, 0), site.name)


def order(step: str, round: int = 1, seq: int = 1, **more: Any) -> Order:
    return Order(RUN, SESSION, 0, round, seq, StepName.parse(step), **more)


def ask(site: Site, what: Order, message: Tree = None) -> tuple[Reply, Tree]:
    """What a site answers: the head, and the reply in the body (None if the step failed)."""
    reply, body = site.carry_out(what, wire.encode(message))
    return reply, wire.decode(body)["reply"] if body else None


def known(reply: Reply) -> StateMark:
    return reply.state
