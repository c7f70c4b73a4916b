"""`kilter peer` where sites aggregate in turn: direct links, and terms made from the site's own copy of the experiment."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from rich.console import Console

from kilter.core import Rows
from kilter.data import Preparation
from kilter.net.direct_links import DirectLinks
from kilter.net.metrics import MetricsPort
from kilter.net.peer_run import PeerRun
from kilter.net.rotation import Rotation
from kilter.net.run_records import RunRecords
from kilter.net.server_run import watching
from kilter.net.site import Site
from kilter.net.site_state import SiteState
from kilter.net.status import StatusBoard
from kilter.net.tls import Identity
from kilter.net.turns import Waits
from kilter.report.progress import Progress
from kilter.report.result import show_result
from kilter.runtimes.roles import parse_roles

LINGER = 3.0  # seconds in which a finished site tells the others


class RotatingPeer:
    """One of the sites; `listen` opens its port."""

    def __init__(
        self,
        run: PeerRun,
        listen: str,
        identity: Identity | None,
        largest: int,
        public: Rows | None,
        waits: Waits,
        device: torch.device,
    ) -> None:
        self.run, self.waits = run, waits
        dataset = run.dataset
        place = run.where / "site"
        self.site = Site(run.me, dataset, place, run.policy, run.data, identity, largest, device=device, public=public)
        spec = run.experiment
        ids = parse_roles(spec.roles).members(run.terms.ids)
        terms = replace(run.terms, ids=ids, topology=spec.topology, roles=spec.roles)
        experiment, method = run.policy.admit(terms, len(dataset.train), run.facts)
        self.site.state = SiteState(self.site.directory, terms.run, run.policy.state_mb)
        self.site.take_part(terms, experiment, method)
        self.site.preparation = run.schema if isinstance(run.schema, Preparation) else None
        addresses = {name: run.addresses[name] for name in ids}
        self.links = DirectLinks(terms.run, self.site.seal, addresses, listen, identity, largest)

    def attend(self, out: Console, metrics: MetricsPort | None = None) -> None:
        """Take part until the run is over, and show the result."""
        run, links = self.run, self.links
        with Progress(run.experiment.rounds, out, self.site.method.task.main) as progress:
            rotation: Rotation | None = None
            try:
                records = RunRecords(run.store, lambda record: watch(record))
                rotation = Rotation(self.site, links, self.site.state_dir / "rotation", self.waits, records.take)
                board = StatusBoard(run.me, rotation, run.experiment.rounds, self._snapshot)
                watch = watching(board, progress)
                links.status = board.read
                if metrics:
                    board.publish(metrics)
                links.open(rotation.ready)
                rotation.start()
                rotation.done.result()
                self._linger()
            finally:
                if rotation is not None:
                    rotation.close()
                links.close()
        show_result(run.where, out)

    def _snapshot(self) -> tuple[list[str], dict[str, int], str]:
        return list(self.links.present), dict(self.links.traffic), self.links.last_error

    def _linger(self) -> None:
        end = time.monotonic() + LINGER
        while time.monotonic() < end and not self.links.flush():
            time.sleep(0.05)
        time.sleep(0.2)
