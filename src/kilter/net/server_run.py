"""A run as its server leads it: who takes part and what a row looks like, then round after round to the result."""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from kilter.core import Rows
from kilter.errors import Mistake
from kilter.experiment import Experiment
from kilter.net import terms
from kilter.net.links import Links
from kilter.net.peer import Peer
from kilter.net.server import RESERVED, Star
from kilter.net.status import Board
from kilter.net.terms import Facts
from kilter.records.run_folder import Store, write
from kilter.report.progress import Progress
from kilter.report.result import show_result


@dataclass
class Lead:
    """What is known before the first site is there; everything that can be refused is refused here."""

    experiment: Experiment
    sites: list[str]  # who may take part; empty: who makes the quorum
    quorum: int = 0  # fewest sites to begin and go on with; 0: all
    deadline: float = 600.0
    grace: float = 30.0
    data: str = ""  # the server's data; `none`: it has none
    folder: str = ""  # the run folder; the same again goes on with it

    where: Path = field(init=False)
    store: Store = field(init=False)

    def __post_init__(self) -> None:
        experiment = self.experiment
        if len(set(self.sites)) < len(self.sites) or set(self.sites) & set(RESERVED):
            raise Mistake(f"--sites names each site once, and none '{RESERVED[0]}'.")
        if not self.sites and not self.quorum:
            raise Mistake("Say who takes part (--sites hospital-a,hospital-b) or how many (--quorum 2).")
        self.where = Path(self.folder or f"runs/{Path(experiment.method.split(':')[0]).stem}-sites-{experiment.seed}")
        if (self.where / "summary.json").exists():
            raise Mistake(f"'{self.where}' already holds a finished run: choose another --out.")
        self._bench, self._public, self._facts = self._own()
        self.store = Store(self.where)
        if not (self.where / "experiment.toml").exists():
            write(self.where / "experiment.toml", experiment.write())

    def _own(self) -> tuple[Rows | None, Rows | None, Facts | None]:
        """The common test set and the public rows, as in simulation, and what a row looks like; nothing for `none`."""
        if self.data == "none":
            return None, None, None
        split = (replace(self.experiment, data=self.data) if self.data else self.experiment).split()
        return split.test, split.public, Facts.of(split.dataset)

    def run(self, links: Links, me: str, out: Console, metrics: str = "") -> None:
        """Wait for a quorum, run to the end, show the result; the sites' links are closed whatever happens."""
        experiment = self.experiment
        try:
            agreed = self._agree(links, out)
            facts = Facts.read(agreed["facts"])
            star = Star(
                links,
                agreed["sites"],
                run=agreed["run"],
                seed=experiment.seed,
                topology=experiment.topology,
                bench=self._bench,
                public=self._public,
                quorum=self.quorum or None,
                deadline=self.deadline,
                grace=self.grace,
                terms=lambda star, name: terms.write(star.run, star.life, experiment, facts, star.topology, name),
            )
            board = Board(me, star, experiment.rounds, lambda: (links.links, dict(links.traffic), links.last_error))
            links.status = board.read
            if metrics:
                board.publish(metrics)
            rounds(experiment, facts, star, self.store, board, out)
        except BaseException:
            links.close()
            raise
        links.close({"kind": "end"})
        show_result(self.where, out)

    def _agree(self, links: Links, out: Console) -> dict[str, Any]:
        """Which run this is, who takes part and what a row looks like: decided once, kept in the run folder."""
        path, listed, facts = self.where / "run.json", self.sites, self._facts
        if path.exists():
            found: dict[str, Any] = json.loads(path.read_text())
            if listed and listed != found["sites"]:
                raise Mistake(
                    f"This run's sites are {','.join(found['sites'])}: give the same, or choose another --out."
                )
            return found
        need = self.quorum or len(listed)
        if not listed or facts is None:
            out.print(f"Waiting for {need} sites.")
            with links.changed:
                while len(links.links) < need:
                    links.changed.wait(1.0)
                here = {name: link.facts for name, link in sorted(links.links.items())}
            listed, facts = listed or list(here), facts or Facts.together(here)
            links.allowed = listed
        found = {"run": uuid.uuid4().hex, "sites": listed, "facts": asdict(facts)}
        write(path, json.dumps(found, indent=2))
        return found


def rounds(experiment: Experiment, facts: Facts, fed: Star | Peer, store: Store, board: Board, out: Console) -> None:
    """Wait for a quorum, then run to the end; every round is checkpointed before the next begins."""
    method = experiment.make(facts.shape, len(facts.classes), facts.mean, facts.std)
    fed.robust = experiment.robust
    fed.wait()
    with Progress(experiment.rounds, out) as progress:

        def watch(record: dict[str, Any]) -> None:
            board.see(record)
            progress.see(record)

        experiment.run(method, fed, store, watch, checkpoint_seconds=0.0)
