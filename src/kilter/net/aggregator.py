"""The runtime of the site whose turn it is: it runs the round's script, and its nodes are the sites behind its links.

It works like the server of a star, with three differences: it lives for one turn, it is a node itself, and it steps down when the
others follow a higher turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kilter.core import Node, Params, Tree
from kilter.net.data_description import DataDescription
from kilter.net.frames import Head
from kilter.net.links import Links
from kilter.net.messages import Goodbye, Hello, kind_of
from kilter.net.server import Call, ServerRuntime
from kilter.net.site import Site
from kilter.net.transport import ConnectedSite, Transport
from kilter.net.turns import Ready, Turn
from kilter.runtimes.base import AGGREGATE
from kilter.runtimes.roles import parse_roles
from kilter.runtimes.step_names import StepName

REPEATED = "the aggregator was lost or made no progress: another one repeated the round"


class TurnOver(Exception):
    """The next round is another site's."""


class SteppedDown(Exception):
    """The others follow a higher turn than this site's."""


class LinkTransport(Transport):
    """The other sites as the leader's runtime sees them; the leader itself is always there."""

    def __init__(
        self, links: Links, own: Ready, description: DataDescription, turn: Turn, local: Callable[[Head, bytes], None]
    ) -> None:
        super().__init__()
        self.links, self.turn, self._description, self._local = links, turn, description, local
        self._connections: dict[
            str, tuple[str, int, int]
        ] = {}  # process and connection of each site, and my own connection
        self._dropped: set[str] = set()
        self._answered: dict[str, tuple[object, object, object]] = {}  # the last order that each site answered
        self.sites[own.name] = ConnectedSite(self._hello(own))

    def _hello(self, ready: Ready) -> Hello:
        return Hello(ready.name, self._description, ready.rows, ready.instance, ready.card)

    def refresh(self) -> None:
        """Who is there now. A site with a new connection is asked again, because its order or reply may be lost."""
        with self.links.changed:
            present, mine, left = dict(self.links.present), self.links.connection, dict(self.links.left)
        with self.changed:
            for name in [n for n in self._connections if n not in present]:
                del self._connections[name]
                self.sites.pop(name, None)
                self.left[name] = left.get(name, time.monotonic())
            for name, (ready, number) in present.items():
                connection = ready.nonce, number, mine
                if self._connections.get(name) == connection or name in self._dropped:
                    continue
                self._connections[name] = connection
                self.sites[name] = ConnectedSite(self._hello(ready))
                self.on_arrival(self.sites[name])
            self.changed.notify_all()

    def send(self, name: str, head: Head, body: bytes) -> None:
        if kind_of(head) != "order":  # sites have the terms already
            return
        order = {**head, "turn": list(self.turn)}
        if name == self.links.me:
            self._local(order, body)
        else:
            self.links.send(name, order, body)

    def reply(self, name: str, head: Head, body: bytes) -> None:
        """A reply came in. A site that was asked twice, because a packet may have been lost, may answer twice."""
        answered = head.get("session"), head.get("round"), head.get("seq")
        with self.changed:
            if name not in self.sites or self._answered.get(name) == answered:
                return
            if refused := self.on_message(name, head, body):
                self.note(f"{name}: {refused}")
            else:
                self._answered[name] = answered

    def drop(self, name: str, why: str) -> None:
        self._dropped.add(name)
        self.sites.pop(name, None)
        self.note(f"{name} is left out of this turn: {why}")

    def close(self, goodbye: Goodbye | None = None) -> None:
        """The links outlive the turn."""


class AggregatorRuntime(ServerRuntime):
    """Leads one turn: one round, or the set-up and the first round."""

    rotates = True
    exhibits = False  # this is a real site

    def __init__(self, transport: LinkTransport, site: Site, quorum: int | None, deadline: float, grace: float) -> None:
        terms, experiment = site.terms, site.experiment
        assert terms is not None
        super().__init__(
            transport,
            terms.ids,
            run=terms.run,
            seed=experiment.seed,
            topology=terms.topology,
            public=site.public,
            classes=len(terms.description.classes),
            quorum=quorum,
            deadline=deadline,
            grace=grace,
        )
        self.me, self.turn, self.roles = site.name, transport.turn, parse_roles(terms.roles)
        self._own_data = site.data
        self.private_seed = site.directory.private_seed
        self.devices, self.device = (site.device,), site.device
        self.stepped_down = False
        self.on_progress: Callable[[], None] = lambda: (
            None
        )  # called at least once a second while the script waits or works on

    def node(self, name: str, step: StepName, round: int, state: dict[str, Tree]) -> Node:
        node = super().node(name, step, round, state)
        if name == self.me:  # as in simulation, a step at the aggregator sees its rows
            node.data = self._own_data
        return node

    def begin_round(self, last: int, state: Tree, best: Params | None = None) -> None:
        if last >= self.turn.round:
            raise TurnOver
        super().begin_round(last, state, best)
        if self.turn.attempt:
            self.ledger.notice(self.me, AGGREGATE, REPEATED)

    def choose_aggregator(self) -> str:
        return self.me

    def step_down(self) -> None:
        """End the turn: the others follow somebody else."""
        self.stepped_down = True
        with self._transport.changed:
            self._transport.changed.notify_all()

    def _seconds_left(self, call: Call) -> float:
        if self.stepped_down:
            raise SteppedDown
        self.on_progress()
        return super()._seconds_left(call)
