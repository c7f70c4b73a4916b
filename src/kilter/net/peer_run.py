"""A run as one of its peers leads it, from the list of peers to the result."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rich.console import Console

from kilter import data as kdata
from kilter.core import Rows
from kilter.data import Preparation, Schema
from kilter.errors import Mistake
from kilter.experiment import Experiment
from kilter.net.audit import AuditLog
from kilter.net.data_description import DataDescription
from kilter.net.metrics import MetricsPort
from kilter.net.peer import PeerRuntime
from kilter.net.peer_transport import PeerTransport
from kilter.net.policy import SitePolicy
from kilter.net.server_run import run_rounds
from kilter.net.site_state import private_seed
from kilter.net.status import StatusBoard
from kilter.net.terms import SENT, Terms, file_digest, own_data, peer_run_id
from kilter.net.tls import Identity
from kilter.records.run_folder import Store, write
from kilter.report.result import show_result


@dataclass
class PeerRun:
    """What is known before the first peer is reached; the site's policy is checked here."""

    experiment: Experiment
    me: str
    addresses: dict[str, str]
    data: str
    classes: list[str] | None
    folder: str
    policy: SitePolicy
    schema: Schema | Preparation | None = None  # of a table: the fitted preparation that all peers share

    where: Path = field(init=False)
    description: DataDescription = field(init=False)

    def __post_init__(self) -> None:
        experiment = self.experiment
        self._dataset = kdata.load(self.data, classes=self.classes, schema=self.schema)
        if self._dataset.schema is not None and not isinstance(self.schema, Preparation):
            raise Mistake(
                'Peers with tables must share a preparation: add a line schema = "preparation.toml" to the list of peers '
                "(the run folder of a simulation or server contains one)."
            )
        preparation = self.schema if isinstance(self.schema, Preparation) else None
        self.description = replace(DataDescription.of(self._dataset), normalised=False)  # nobody knows everyone's
        self.facts = self.description.row_facts(preparation)
        self.run_id = peer_run_id(experiment, self.description, preparation, self.addresses)
        plain = {key: value for key, value in asdict(experiment).items() if key in SENT}
        ids = tuple(self.addresses)
        described = replace(self.description, schema=None)  # the preparation is known: no statistics are asked for
        terms = Terms(self.run_id, "", plain, file_digest(experiment.weights), described, ids, (), True)
        self.policy.admit(terms, len(self._dataset.train), self.facts)
        self.where = Path(
            self.folder or f"runs/{Path(experiment.method.split(':')[0]).stem}-{self.me}-{experiment.seed}"
        )
        if (self.where / "summary.json").exists():
            raise Mistake(f"'{self.where}' already holds a finished run: choose another --out.")
        self.store = Store(self.where)
        if not (self.where / "experiment.toml").exists():
            write(self.where / "experiment.toml", experiment.write())

    def open(
        self,
        listen: str,
        identity: Identity | None,
        largest: int,
        public: Rows | None,
        quorum: int,
        deadline: float,
        grace: float,
    ) -> AbstractContextManager[PeerRuntime]:
        """Open the port; from now on other peers can write to this one."""
        experiment = self.experiment
        fed = PeerRuntime(
            PeerTransport(self.me, self.addresses, listen, self.run_id, identity, largest),
            list(self.addresses),
            own_data(self._dataset, self.me, experiment.seed, experiment.valid),
            topology=experiment.topology,
            seed=experiment.seed,
            public=public,
            deadline=deadline,
            grace=grace,
            quorum=quorum or None,
            audit=AuditLog(self.where),
        )
        fed.private_seed = private_seed(self.where)
        return fed

    def run(self, fed: PeerRuntime, out: Console, metrics: MetricsPort | None = None) -> None:
        """Wait for enough peers, run to the end, show the result."""
        transport = fed.transport
        board = StatusBoard(
            self.me,
            fed,
            self.experiment.rounds,
            lambda: (fed.here(), dict(transport.traffic), transport.last_error),
        )
        transport.status = board.read
        if metrics:
            board.publish(metrics)
        run_rounds(self.experiment, self.facts, fed, self.store, board, out)
        show_result(self.where, out)
