"""A run as its server leads it: who takes part and what a row looks like, then round after round to the result."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from kilter.core import Rows
from kilter.data import Preparation, Split
from kilter.data.federated_inspection import inspect_sites, with_label_counts
from kilter.data.preparation import FILE as PREPARATION_FILE
from kilter.data.preparation import AnyPreparation, ImagePreparation
from kilter.data.prepare_settings import with_settings
from kilter.data.row_facts import RowFacts
from kilter.data.schema import Column, with_series
from kilter.errors import Mistake
from kilter.experiment import Experiment
from kilter.net.agreement import FILE as AGREEMENT
from kilter.net.agreement import Agreement
from kilter.net.data_description import DataDescription
from kilter.net.data_preparation import collect_statistics, pool_statistics
from kilter.net.fields import check_name
from kilter.net.final_models import dismiss, hand_out_models
from kilter.net.frames import Head
from kilter.net.messages import Goodbye
from kilter.net.metrics import MetricsPort
from kilter.net.peer import PeerRuntime
from kilter.net.relay import Relay
from kilter.net.run_records import Watch
from kilter.net.server import ServerRuntime
from kilter.net.status import StatusBoard
from kilter.net.terms import Terms, agree_on_data, difference, frozen_digest
from kilter.net.transport import Transport
from kilter.records.run_folder import Store, write
from kilter.records.types import Round
from kilter.records.wire import Malformed
from kilter.report import federated_inspection as inspection
from kilter.report.progress import Progress
from kilter.report.result import show_result
from kilter.runtimes.roles import parse_roles
from kilter.topology import topology

WriteTerms = Callable[[ServerRuntime, str], Head]  # for a site


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
    inspect: bool = False  # show what sites share about their data, and do not train
    linger: float = 0.0  # seconds after the end for sites that have not received the final models

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
        roles = parse_roles(experiment.roles)
        if self.sites:
            roles.check([*self.sites, *filter(None, [roles.proxy])])
            self.sites = list(roles.members(self.sites))  # a site that is idle is not waited for
        if not self.sites and not self.quorum:
            raise Mistake("Say who takes part (--sites hospital-a,hospital-b) or how many (--quorum 2).")
        self.where = Path(self.folder or f"runs/{Path(experiment.method.split(':')[0]).stem}-sites-{experiment.seed}")
        if self.finished and not (self.where / AGREEMENT).exists():
            raise Mistake(f"'{self.where}' already holds a finished run: choose another --out.")
        self._split = None if self.data == "none" else self._own_data()
        self._description = None if self._split is None else DataDescription.of(self._split.dataset)
        self.store = Store(self.where)
        if not (self.where / "experiment.toml").exists():
            write(self.where / "experiment.toml", experiment.write())

    @property
    def finished(self) -> bool:
        """Whether the run folder holds a result already."""
        return (self.where / "summary.json").exists()

    def _own_data(self) -> Split:
        """The common test set and the public rows, as in simulation."""
        return (replace(self.experiment, data=self.data) if self.data else self.experiment).split()

    def _own_preparation(self) -> AnyPreparation | None:
        """The preparation that needs no site: a fitted one in --schema, or the server's own images."""
        if self._split is None:
            return None
        dataset = self._split.dataset
        if dataset.schema is not None:
            return None if self._split.statistics else dataset.preparation
        return None if dataset.mean is None or dataset.std is None else ImagePreparation(dataset.mean, dataset.std)

    def _own_rows(self, preparation: AnyPreparation | None) -> tuple[Rows | None, Rows | None]:
        """The common test set and the public rows, prepared like those of the sites."""
        if self._split is None:
            return None, None
        split, public = self._split, self._split.public
        if not isinstance(preparation, Preparation) or preparation == split.dataset.preparation:
            return split.test, public
        x = split.dataset.prepared(preparation).x
        tables = {"x": x, "y": split.dataset.y}
        if public is not None and public.tables is not split.test.tables:
            raise Mistake(
                "With a table, set public rows aside (public = 10): a file of public rows is not supported here."
            )
        return Rows(tables, split.test.index), public and Rows(tables, public.index)

    def run(
        self, transport: Transport, me: str, out: Console, metrics: MetricsPort | None = None, dashboard: str = ""
    ) -> None:
        """Wait for a quorum, run to the end, show the result; sites are told why the server stops, whatever happens."""
        proxy = parse_roles(self.experiment.roles).proxy
        if proxy not in ("", me):
            raise Mistake(
                f"The proxy of this run is '{proxy}': start the relay with its certificate (--tls), not as '{me}'."
            )
        try:
            if self.finished:
                self._reopen(transport, out)
            else:
                self._lead(transport, me, out, metrics, dashboard)
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
        if not self.inspect:
            show_result(self.where, out)

    def _lead(self, transport: Transport, me: str, out: Console, metrics: MetricsPort | None, dashboard: str) -> None:
        experiment = self.experiment
        agreed = self._agree(transport, out)
        description, runtime, terms, relays = agreed.description, *self._open(transport, agreed)
        board = StatusBoard(
            me,
            runtime,
            experiment.rounds,
            lambda: (transport.sites, dict(transport.traffic), transport.last_error),
            transport.activity,
            transport.identity,
            runtime.enough,
        )
        transport.status = board.read
        if metrics:
            board.publish(metrics)
        if dashboard:
            show_dashboard(self.where, dashboard, board, out)
        if description.needs_statistics and agreed.preparation is None:
            self._prepare(agreed, runtime, out)
        elif self.inspect:
            raise Mistake("--inspect needs sites with tables whose statistics are not known yet: choose another --out.")
        facts = description.row_facts(runtime.preparation)
        if relays and not self.inspect:
            self._forward(transport, runtime, lambda name: terms(runtime, name), board, facts, out)
        elif not self.inspect:
            run_rounds(experiment, facts, runtime, self.store, board, out)
            hand_out_models(runtime, transport, experiment.make(**facts), self.store, self.linger, out)
        runtime.traces.end()

    def _open(self, transport: Transport, agreed: Agreement) -> tuple[ServerRuntime, WriteTerms, bool]:
        """The runtime for these sites, the terms that it tells them, and whether they aggregate in turn."""
        experiment, description = self.experiment, agreed.description
        bench, public = self._own_rows(agreed.preparation)
        roles = parse_roles(experiment.roles)
        aggregators = roles.group_aggregators(experiment.topology, agreed.sites)
        graph = topology(experiment.topology, agreed.sites, experiment.seed, aggregators)
        relays = graph.kind == "rotating"  # sites aggregate, and the server only asks for statistics, if at all
        frozen = frozen_digest(experiment, description)

        def terms(fed: ServerRuntime, name: str) -> Head:
            return Terms.write(
                fed.run, fed.session, experiment, description, graph, name, fed.preparation, frozen
            ).head()

        runtime = ServerRuntime(
            transport,
            agreed.sites,
            run=agreed.run,
            seed=experiment.seed,
            topology="star" if relays else experiment.topology,
            bench=bench,
            public=public,
            classes=len(description.classes),
            quorum=self.quorum or None,
            deadline=self.deadline,
            grace=self.grace,
            terms=terms,
            preparation=agreed.preparation,
        )
        runtime.roles = roles
        return runtime, terms, relays

    def _forward(
        self,
        transport: Transport,
        runtime: ServerRuntime,
        terms: Callable[[str], Head],
        board: StatusBoard,
        facts: RowFacts,
        out: Console,
    ) -> None:
        """The sites aggregate in turn: forward their packets until one of them reports the result."""
        aggregators = parse_roles(self.experiment.roles).aggregators(runtime.ids)
        relay = Relay(transport, runtime.run, runtime.ids, aggregators, terms, self.quorum, self.deadline, self.grace)
        board.fed = relay
        with Progress(self.experiment.rounds, out, self.experiment.make(**facts).task.main) as progress:
            relay.lead(self.store, watching(board, progress))

    def _prepare(self, agreed: Agreement, runtime: ServerRuntime, out: Console) -> None:
        """Fit the preparation on statistics of the sites, keep it in the run folder, and tell the sites."""
        out.print("Preparing the data: sites that have approved the terms send statistics of their rows.")
        statistics = collect_statistics(runtime, agreed.description)
        if agreed.description.schema is not None:
            report = inspect_sites(agreed.description.schema, statistics)
            write(self.where / "inspection.html", inspection.page(report))
            write(self.where / "inspection.json", json.dumps(report.plain(), indent=2))
            if self.inspect:
                for part in inspection.tables(report):
                    out.print(part)
                out.print(
                    f"Page: {self.where / 'inspection.html'}. To train, start the server again without --inspect."
                )
        preparation = pool_statistics(agreed.description, statistics)
        write(self.where / AGREEMENT, replace(agreed, preparation=preparation).text())
        if isinstance(preparation, Preparation):
            write(self.where / PREPARATION_FILE, preparation.text())
        runtime.preparation = preparation
        runtime.bench, runtime.public = self._own_rows(preparation)
        runtime.announce_terms()

    def _reopen(self, transport: Transport, out: Console) -> None:
        """The run is finished already: tell the sites that still wait, and give them their models."""
        agreed = Agreement.read(self.where / AGREEMENT)
        out.print(f"'{self.where}' is finished; telling sites that still wait for it.")
        transport.allowed = agreed.sites
        until = time.monotonic() + self.grace
        if topology(self.experiment.topology, agreed.sites, self.experiment.seed).kind != "rotating":
            runtime, _, _ = self._open(
                transport, agreed
            )  # otherwise the sites have the models, and the server has none
            method = self.experiment.make(**agreed.description.row_facts(agreed.preparation))
            hand_out_models(runtime, transport, method, self.store, max(self.linger, self.grace), out)
        dismiss(transport, set(agreed.sites) - set(transport.left), until - time.monotonic())

    def _agree(self, transport: Transport, out: Console) -> Agreement:
        path, listed, description = self.where / AGREEMENT, self.sites, self._description
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
        if description.schema is not None:
            schema = with_settings(description.schema, self.experiment.prepare)
            series = self.experiment.table_options().series
            schema = with_series(schema, series) if series else schema
            if self.inspect:
                schema = with_label_counts(schema)
            if self.experiment.loss.startswith("class-weights"):
                schema = replace(schema, targets=(Column(schema.target, "category", least=1),))
            description = replace(description, schema=schema)
        agreed = Agreement(uuid.uuid4().hex, listed, description, self._own_preparation())
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


def show_dashboard(folder: Path, address: str, board: StatusBoard, out: Console) -> None:
    """Serve the dashboard of this run from now on."""
    from kilter.report.dashboard import Dashboard, address_of, serve_in_background

    server = Dashboard(folder, *address_of(address), status=board.with_sites)
    serve_in_background(server)
    out.print(f"Dashboard: {server.address}", markup=False, soft_wrap=True)


def run_rounds(
    experiment: Experiment,
    facts: RowFacts,
    fed: ServerRuntime | PeerRuntime,
    store: Store,
    board: StatusBoard,
    out: Console,
) -> None:
    """Wait for a quorum, then run to the end; every round is checkpointed before the next begins."""
    method = experiment.make(**facts)
    fed.robust, fed.precision = experiment.robust, experiment.precision
    fed.wait()
    with Progress(experiment.rounds, out, method.task.main) as progress:
        experiment.run(method, fed, store, watching(board, progress), checkpoint_seconds=0.0)


def watching(board: StatusBoard, progress: Progress) -> Watch:
    """Show every round's record on the status board and in the terminal."""

    def watch(record: Round) -> None:
        board.see(record)
        progress.see(record)

    return watch
