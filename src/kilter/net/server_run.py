"""A run as its server leads it: who takes part and what a row looks like, then round after round to the result."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from kilter.core import Rows
from kilter.errors import Mistake
from kilter.experiment import Experiment
from kilter.net.data_description import DataDescription
from kilter.net.fields import check_name
from kilter.net.messages import Goodbye
from kilter.net.peer import PeerRuntime
from kilter.net.server import ServerRuntime
from kilter.net.status import StatusBoard
from kilter.net.terms import Terms, agree_on_data, describe, difference
from kilter.net.transport import Transport
from kilter.records.run_folder import Store, write
from kilter.records.types import Round
from kilter.records.wire import Malformed
from kilter.report.progress import Progress
from kilter.report.result import show_result


@dataclass(frozen=True)
class Agreement:
    """Which run this is, who takes part and what a row looks like: decided once, kept in the run folder."""

    run: str
    sites: list[str]
    description: DataDescription

    def text(self) -> str:
        return json.dumps({"run": self.run, "sites": self.sites, "data": self.description.plain()}, indent=2)

    @staticmethod
    def read(path: Path) -> Agreement:
        try:
            plain = json.loads(path.read_text())
            return Agreement(str(plain["run"]), list(plain["sites"]), DataDescription.parse(plain["data"]))
        except (OSError, ValueError, LookupError, TypeError, Malformed):
            raise Mistake(f"'{path}' is damaged: choose another --out to start a new run.") from None


@dataclass
class ServerRun:
    """What is known before the first site connects; everything that can be refused is refused here."""

    experiment: Experiment
    sites: list[str]  # who may take part; empty: the first sites to connect
    quorum: int = 0  # fewest sites to begin and to go on with; 0: all to begin, half of them to go on
    deadline: float = 600.0
    grace: float = 30.0
    data: str = ""  # the server's data; `none`: it has none
    folder: str = ""  # the run folder; reuse the folder to resume

    where: Path = field(init=False)
    store: Store = field(init=False)

    def __post_init__(self) -> None:
        experiment = self.experiment
        for name in self.sites:
            try:
                check_name(name)
            except Malformed as e:
                raise Mistake(f"--sites: {e}.") from None
        if len(set(self.sites)) < len(self.sites):
            raise Mistake("--sites names a site twice.")
        if not self.sites and not self.quorum:
            raise Mistake("Say who takes part (--sites hospital-a,hospital-b) or how many (--quorum 2).")
        self.where = Path(self.folder or f"runs/{Path(experiment.method.split(':')[0]).stem}-sites-{experiment.seed}")
        if self.finished and not (self.where / "run.json").exists():
            raise Mistake(f"'{self.where}' already holds a finished run: choose another --out.")
        self._bench, self._public, self._description = self._own_data()
        self.store = Store(self.where)
        if not (self.where / "experiment.toml").exists():
            write(self.where / "experiment.toml", experiment.write())

    @property
    def finished(self) -> bool:
        """Whether the run folder holds a result already."""
        return (self.where / "summary.json").exists()

    def _own_data(self) -> tuple[Rows | None, Rows | None, DataDescription | None]:
        """The common test set and the public rows, as in simulation, and what a row looks like; nothing for `none`."""
        if self.data == "none":
            return None, None, None
        split = (replace(self.experiment, data=self.data) if self.data else self.experiment).split()
        return split.test, split.public, describe(split.dataset)

    def run(self, transport: Transport, me: str, out: Console, metrics: str = "") -> None:
        """Wait for a quorum, run to the end, show the result; sites are told why the server stops, whatever happens."""
        try:
            if self.finished:
                self._dismiss(transport, out)
            else:
                self._lead(transport, me, out, metrics)
        except BaseException as e:
            why = (
                str(e)
                if isinstance(e, Mistake)
                else "it was interrupted"
                if not isinstance(e, Exception)
                else "it failed"
            )
            transport.close(Goodbye(False, why))
            raise
        transport.close(Goodbye(True))
        show_result(self.where, out)

    def _lead(self, transport: Transport, me: str, out: Console, metrics: str) -> None:
        experiment = self.experiment
        agreed = self._agree(transport, out)
        description = agreed.description
        runtime = ServerRuntime(
            transport,
            agreed.sites,
            run=agreed.run,
            seed=experiment.seed,
            topology=experiment.topology,
            bench=self._bench,
            public=self._public,
            classes=len(description.classes),
            quorum=self.quorum or None,
            deadline=self.deadline,
            grace=self.grace,
            terms=lambda fed, name: Terms.write(
                fed.run, fed.session, experiment, description, fed.topology, name
            ).head(),
        )
        board = StatusBoard(
            me, runtime, experiment.rounds, lambda: (transport.sites, dict(transport.traffic), transport.last_error)
        )
        transport.status = board.read
        if metrics:
            board.publish(metrics)
        run_rounds(experiment, description, runtime, self.store, board, out)

    def _dismiss(self, transport: Transport, out: Console) -> None:
        """The run is finished already: tell the sites that still wait, for some seconds."""
        waiting = set(Agreement.read(self.where / "run.json").sites)
        out.print(f"'{self.where}' is finished; telling sites that still wait for it.")
        end = time.monotonic() + self.grace
        with transport.changed:
            while waiting and time.monotonic() < end:
                for name in list(transport.sites):
                    transport.send(name, Goodbye(True).head(), b"")
                    waiting.discard(name)
                transport.changed.wait(0.2)

    def _agree(self, transport: Transport, out: Console) -> Agreement:
        path, listed, description = self.where / "run.json", self.sites, self._description
        if path.exists():
            agreed = Agreement.read(path)
            if listed and listed != agreed.sites:
                raise Mistake(f"This run's sites are {','.join(agreed.sites)}: give the same, or choose another --out.")
            transport.allowed = agreed.sites
            return agreed
        need = self.quorum or len(listed)
        if not listed or description is None:
            out.print(f"Waiting for {need} sites.")
            listed, description = self._meet(transport, need)
            transport.allowed = listed
        agreed = Agreement(uuid.uuid4().hex, listed, description)
        write(path, agreed.text())
        if description.schema is not None:
            write(self.where / "schema.toml", description.schema.text())
        return agreed

    def _meet(self, transport: Transport, need: int) -> tuple[list[str], DataDescription]:
        """Wait until this many sites with the same kind of data are here; a site with another kind is disconnected."""
        with transport.changed:
            while True:
                here = {name: site.hello.description for name, site in transport.sites.items()}
                if len(here) >= need:
                    description, different = agree_on_data(here)
                    for name in different:
                        first = next(n for n in here if n not in different)
                        why = difference(here[first], here[name])
                        transport.drop(name, f"its rows or classes differ from those of {first}: {why}")
                        transport.note(f"{name} has other data than {first} ({why}): it cannot take part")
                    same = sorted(set(here) - set(different))
                    if len(same) >= need:
                        return self.sites or same, self._description or description
                transport.changed.wait(1.0)


def run_rounds(
    experiment: Experiment,
    description: DataDescription,
    fed: ServerRuntime | PeerRuntime,
    store: Store,
    board: StatusBoard,
    out: Console,
) -> None:
    """Wait for a quorum, then run to the end; every round is checkpointed before the next begins."""
    method = experiment.make(description.shape, len(description.classes), description.mean, description.std)
    fed.robust = experiment.robust
    fed.wait()
    with Progress(experiment.rounds, out, method.task.main) as progress:

        def watch(record: Round) -> None:
            board.see(record)
            progress.see(record)

        experiment.run(method, fed, store, watch, checkpoint_seconds=0.0)
