"""A run as one of its peers leads it, from the list of peers to the result."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rich.console import Console

from kilter import data as kdata
from kilter.core import Rows
from kilter.data import Preparation, Schema
from kilter.data.preparation import FILE as PREPARATION
from kilter.data.preparation import fit_whole
from kilter.errors import Mistake
from kilter.experiment import Experiment
from kilter.net.audit import AuditLog
from kilter.net.data_description import DataDescription
from kilter.net.metrics import MetricsPort
from kilter.net.peer import PeerRuntime
from kilter.net.peer_preparation import PeerExchange, agree_on_preparation
from kilter.net.peer_transport import PeerTransport
from kilter.net.policy import SitePolicy
from kilter.net.server_run import run_rounds
from kilter.net.site_state import private_seed
from kilter.net.status import StatusBoard
from kilter.net.terms import SENT, Terms, file_digest, own_data, peer_run_id
from kilter.net.tls import Identity
from kilter.records.run_folder import Store, write
from kilter.report.result import show_result
from kilter.runtimes.roles import Roles, parse_roles


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
    schema: Schema | Preparation | None = (
        None  # of a table: a fitted preparation makes the exchange of statistics needless
    )
    table: kdata.TableOptions | None = None  # how to read this site's data; None: as the experiment says

    where: Path = field(init=False)
    description: DataDescription = field(init=False)

    def __post_init__(self) -> None:
        experiment = self.experiment
        self.where = Path(
            self.folder or f"runs/{Path(experiment.method.split(':')[0]).stem}-{self.me}-{experiment.seed}"
        )
        if (self.where / "summary.json").exists():
            raise Mistake(f"'{self.where}' already holds a finished run: choose another --out.")
        stored = self.where / PREPARATION
        options = self.table or experiment.table_options()
        self.roles = self._check_roles()
        self.dataset = kdata.load(self.data, classes=self.classes, schema=self.schema, table=options, prepare=False)
        self._pending = self.dataset.schema is not None and not isinstance(self.schema, Preparation)
        # Statistics of all peers are exchanged when the port is open, unless an earlier start of this run did so.
        fitted = self.schema if isinstance(self.schema, Preparation) else None
        self.run_id = peer_run_id(
            experiment, None if self._pending else DataDescription.of(self.dataset), fitted, self.addresses
        )
        if self._pending and stored.exists():
            fitted, self._pending = Preparation.read(stored), False
            self.dataset = self.dataset.matching(fitted.schema).prepared(fitted)
        self._admit(fitted or self._provisional(), exchanged=fitted is not None)
        self.store = Store(self.where)
        if not (self.where / "experiment.toml").exists():
            write(self.where / "experiment.toml", experiment.write())

    def _check_roles(self) -> Roles:
        roles = parse_roles(self.experiment.roles)
        if not roles.by_name:
            return roles
        roles.check(self.addresses)
        if roles.proxy:
            raise Mistake(
                f"Direct links need no proxy: start '{roles.proxy}' as a relay (kilter serve), or leave it out."
            )
        if self.me not in roles.members(tuple(self.addresses)):
            raise Mistake(f"The role of '{self.me}' in this run is idle: there is nothing to do here.")
        return roles

    @property
    def ids(self) -> tuple[str, ...]:
        """The peers that take part."""
        return self.roles.members(tuple(self.addresses))

    def _provisional(self) -> Preparation | None:
        """A preparation from this peer's rows alone, to check the policy. It stays here."""
        dataset = self.dataset
        if dataset.raw is None or dataset.schema is None:
            return None
        return fit_whole(dataset.raw, dataset.schema, dataset.train.numpy())

    def _admit(self, preparation: Preparation | None, exchanged: bool) -> None:
        """Check the experiment against this peer's policy; it must also allow statistics if they are to be exchanged."""
        experiment = self.experiment
        self.description = replace(DataDescription.of(self.dataset), normalised=False)  # nobody knows everyone's
        self.facts = self.description.row_facts(preparation)
        plain = {key: value for key, value in asdict(experiment).items() if key in SENT}
        described = replace(self.description, schema=None) if exchanged else self.description
        digest = file_digest(experiment.weights)
        self.terms = terms = Terms(self.run_id, "", plain, digest, described, tuple(self.addresses), (), True)
        if self.experiment.topology.startswith("aggregators:"):
            self.terms = terms = replace(
                terms, ids=self.ids, topology=self.experiment.topology, roles=self.experiment.roles
            )
        self.policy.admit(terms, len(self.dataset.train), self.facts)

    @property
    def rotates(self) -> bool:
        """Whether the sites aggregate in turn."""
        if self.experiment.topology != "rotating":
            return False
        if self._pending:
            raise Mistake(
                "Sites that aggregate in turn over direct links must share a preparation of their tables: add a line schema = "
                '"preparation.toml" to the list of peers (from the run folder of a simulation), or use a relay (kilter serve).'
            )
        return True

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
        """Open the port, and exchange statistics if this is needed; from now on other peers can write to this one."""
        experiment = self.experiment
        addresses = {name: self.addresses[name] for name in self.ids}
        transport = PeerTransport(self.me, addresses, listen, self.run_id, identity, largest)
        audit = AuditLog(self.where)
        exchange = PeerExchange(transport, list(self.ids), deadline, audit)
        try:
            if self._pending:
                self._prepare(exchange)
            fed = PeerRuntime(
                transport,
                list(self.ids),
                own_data(self.dataset, self.me, experiment.seed, experiment.valid),
                topology=experiment.topology,
                seed=experiment.seed,
                public=public,
                deadline=deadline,
                grace=grace,
                quorum=quorum or None,
                audit=audit,
            )
        except BaseException:
            transport.flush(grace)
            transport.close()
            audit.close()
            raise
        fed.opening, fed.roles = exchange.ledger, self.roles
        fed.private_seed = private_seed(self.where)
        return fed

    def _prepare(self, exchange: PeerExchange) -> None:
        """Fit one preparation with all peers, and keep it in the run folder."""
        experiment = self.experiment
        preparation, self.dataset = agree_on_preparation(
            exchange, self.dataset, experiment.seed, experiment.valid, self.policy.statistics_rows
        )
        self._admit(preparation, exchanged=True)
        write(self.where / "schema.toml", preparation.schema.text())
        write(self.where / PREPARATION, preparation.text())

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
