"""What a running server or peer says about itself: `kilter status`, the dashboard, and metrics for Prometheus."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from kilter.net.metrics import MetricName, MetricsPort, Values, publish
from kilter.net.tls import Identity
from kilter.net.transport import SiteActivity
from kilter.records.types import Round

ROUND = MetricName("kilter_round", "The round that runs.")
ROUNDS = MetricName("kilter_rounds", "Rounds of the run.")
FINISHED_ROUNDS = MetricName("kilter_finished_rounds", "Rounds that are finished.")
FAILURES = MetricName("kilter_failures", "Calls that failed.", "counter")
RECEIVED = MetricName("kilter_received_bytes", "Bytes of bodies that arrived.", "counter")
SENT = MetricName("kilter_sent_bytes", "Bytes that were sent.", "counter")
CERTIFICATE_DAYS = MetricName("kilter_certificate_days", "Days until the certificate of this process expires.")
SITE_UP = MetricName("kilter_site_up", "Whether a site is connected.", label="site")
SITE_FAILURES = MetricName("kilter_site_failures", "Calls that failed at a site.", "counter", "site")
SITE_RECEIVED = MetricName("kilter_site_received_bytes", "Bytes of bodies that arrived from a site.", "counter", "site")
SITE_ANSWER = MetricName("kilter_site_answer_seconds", "Seconds a site took for its last answer.", label="site")
Snapshot = tuple[Collection[str], Mapping[str, int], str]  # who is connected, bytes in and out, the last error
NO_ACTIVITY: Mapping[str, SiteActivity] = {}


class RunInProgress(Protocol):
    """What a status needs of a run: its participants, and the round it is in."""

    @property
    def ids(self) -> tuple[str, ...]: ...
    @property
    def round(self) -> int: ...


class StatusBoard:
    """The state of a run, for `kilter status` and Prometheus."""

    def __init__(
        self,
        me: str,
        fed: RunInProgress,
        rounds: int,
        snapshot: Callable[[], Snapshot],
        activity: Mapping[str, SiteActivity] = NO_ACTIVITY,
        identity: Identity | None = None,
        enough: int = 0,
    ) -> None:
        self.me, self.fed, self.rounds, self.snapshot, self.activity = me, fed, rounds, snapshot, activity
        self.identity, self.enough = identity, enough  # sites that the run needs to go on
        self.done = 0
        self.failures = 0
        self.failed: Counter[str] = Counter()  # calls by site

    def see(self, record: Round) -> None:
        """Another round is done."""
        self.done = record.round
        self.failures += len(record.failures)
        self.failed.update(failure.node for failure in record.failures)

    def read(self) -> dict[str, Any]:
        here, traffic, error = self.snapshot()
        return {
            "me": self.me,
            "round": self.fed.round,
            "rounds": self.rounds,
            "finished_rounds": self.done,
            "here": [i for i in self.fed.ids if i in here],
            "away": [i for i in self.fed.ids if i not in here and i != self.me],
            "failures": self.failures,
            "last_error": error,
            "bytes_in": traffic.get("in", 0),
            "bytes_out": traffic.get("out", 0),
            "certificate_days": self._days_left(),
        }

    def _days_left(self) -> float | None:
        """Days until my certificate expires."""
        left = self.identity.renewed().days_left() if self.identity else None
        return None if left is None else round(left, 1)

    def with_sites(self) -> dict[str, Any]:
        """The status and, of every site: whether it is connected, when it was last heard, what it cost. For the dashboard."""
        status = self.read()
        sites = {}
        for name in (i for i in self.fed.ids if i != self.me):
            seen = self.activity.get(name, SiteActivity())
            sites[name] = {
                "connected": name in status["here"],
                "last_message": None if seen.heard is None else time.monotonic() - seen.heard,
                "answer_seconds": seen.answer_seconds,
                "failures": self.failed[name],
                "bytes_in": seen.bytes_in,
                "bytes_out": seen.bytes_out,
            }
        return {**status, "sites": sites}

    def metrics(self) -> Values:
        """The values for Prometheus."""
        status, sites = self.read(), self.with_sites()["sites"]
        return {
            ROUND: status["round"],
            ROUNDS: status["rounds"],
            FINISHED_ROUNDS: status["finished_rounds"],
            FAILURES: status["failures"],
            RECEIVED: status["bytes_in"],
            SENT: status["bytes_out"],
            CERTIFICATE_DAYS: status["certificate_days"],
            SITE_UP: {name: float(site["connected"]) for name, site in sites.items()},
            SITE_FAILURES: {name: site["failures"] for name, site in sites.items()},
            SITE_RECEIVED: {name: site["bytes_in"] for name, site in sites.items()},
            SITE_ANSWER: {n: s["answer_seconds"] for n, s in sites.items() if s["answer_seconds"] is not None},
        }

    def unready(self) -> str:
        """Why the run cannot go on now; empty if it can."""
        here = len(self.read()["here"])
        return "" if here >= self.enough else f"{here} sites are connected, and the run needs {self.enough}"

    def publish(self, port: MetricsPort) -> int:
        """Serve the metrics from now on; the port."""
        return publish(port, self.metrics, self.unready)
