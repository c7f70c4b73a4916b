"""The server of a rotating federation: it tells sites the terms and who is present, and forwards packets that it cannot open.

It runs no script and holds no model. Sites send it the record of each round (means over sites, bytes, failures), which it writes
to its run folder. If it stops and starts again, sites reconnect and go on. What waits for a slow receiver is bounded in bytes for
each sender: more is lost, and when there is room again, the receiver's connection counts as new: others send again what matters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from kilter.net.frames import Body, Head
from kilter.net.messages import Refusal, kind_of
from kilter.net.run_records import RunRecords, Watch, parse_records
from kilter.net.transport import ConnectedSite, Transport
from kilter.net.turns import Packet, Presence, Ready
from kilter.records.codec import Unreadable, from_json
from kilter.records.run_folder import Store
from kilter.records.types import Round, Summary
from kilter.records.wire import Malformed

PROTOCOL = 4  # the first with turns
LARGEST_RECORD = 2**24  # bytes


class Relay:
    """The sites of one run, and what they report; `terms(name)` is what a site is told when it connects."""

    def __init__(
        self,
        transport: Transport,
        run: str,
        ids: tuple[str, ...],
        aggregators: Collection[str],
        terms: Callable[[str], Head],
        quorum: int = 0,
        deadline: float = 600.0,
        grace: float = 30.0,
    ) -> None:
        self.run, self.ids, self.round = run, ids, 0
        self._aggregators = aggregators
        self._overflowed: set[tuple[str, str]] = set()  # receiver and sender of packets that had no room
        self._transport, self._terms = transport, terms
        self._quorum, self._deadline, self._grace = quorum, deadline, grace
        self._ready: dict[str, tuple[ConnectedSite, Ready, int]] = {}  # with the number of the connection
        self._connections = 0
        self._announced: Presence | None = None
        self._records: list[Round] = []
        self._all: list[Round] = []  # at the end of the run
        self._summary: Summary | None = None
        with transport.changed:
            transport.on_message, transport.on_arrival = self._on_message, self._on_arrival
            transport.rehearsal = lambda hello: terms(hello.name)
            for site in list(transport.sites.values()):
                self._on_arrival(site)

    # In the transport's thread, `changed` held ----------------------------------------------------------------------

    def _on_arrival(self, site: ConnectedSite) -> None:
        protocol = site.hello.protocol
        if protocol < PROTOCOL:
            why = f"it speaks protocols up to {protocol}, and turns need {PROTOCOL}: update kilter at the site"
            self._transport.drop(site.name, why)
            return
        self._transport.send(site.name, {**self._terms(site.name), "protocol": protocol}, b"")

    def _on_message(self, name: str, head: Head, body: Body) -> str | None:
        """A message from a site; a reason if its stream must end."""
        try:
            kind = kind_of(head)
            if kind == "refusal":
                return f"it does not agree to the terms: {Refusal.parse(head).why}"
            if kind == "packet":
                return self._forward(name, Packet.parse(head), body)
            if kind == "ready":
                return self._welcome(name, Ready.parse(head))
            if kind in ("record", "records", "result") and len(body) <= LARGEST_RECORD:
                if name not in self._aggregators:
                    return "it does not aggregate in this run, and so has nothing to report"
                self._take_report(kind, bytes(body))
                return None
        except (Malformed, Unreadable) as e:
            return str(e)
        return "a message that a relay does not expect"

    def _welcome(self, name: str, ready: Ready) -> str | None:
        if ready.name != name:
            return "it signs with another's name"
        self._connections += 1
        self._ready[name] = self._transport.sites[name], ready, self._connections
        self._transport.changed.notify_all()
        return None

    def _forward(self, name: str, packet: Packet, body: Body) -> str | None:
        """Pass a packet on. If its receiver is away, it is lost, and its sender learns that the receiver is away."""
        if packet.sender != name:
            return "it signs with another's name"
        if packet.run != self.run or packet.to not in self.ids:
            return "a packet for another run, or for nobody who takes part"
        if self._is_ready(packet.to) and not self._transport.forward(packet.to, name, packet.head(), bytes(body)):
            self._transport.note(f"{packet.to} reads too slowly: a packet of {name} is lost and will be sent again")
            self._overflowed.add((packet.to, name))
        return None

    def _take_report(self, kind: str, body: bytes) -> None:
        if kind == "record":
            self._records.append(from_json(Round, body))
        elif kind == "records":
            self._all = parse_records(body)
        else:
            self._summary = from_json(Summary, body)
        self._transport.changed.notify_all()

    def _is_ready(self, name: str) -> bool:
        """Whether a site is connected and ready, on the connection that it has now."""
        known = self._ready.get(name)
        return known is not None and self._transport.sites.get(name) is known[0]

    def _announce(self) -> None:
        """Tell all sites who is there, if that has changed, and whose packets were lost."""
        for to, sender in list(self._overflowed):
            if self._transport.has_room(to, sender) and self._is_ready(to):
                self._overflowed.discard((to, sender))
                self._connections += 1
                self._ready[to] = (*self._ready[to][:2], self._connections)
        sites = {name: (ready, number) for name, (_, ready, number) in self._ready.items() if self._is_ready(name)}
        presence = Presence(sites, self._quorum, self._deadline, self._grace)
        if presence != self._announced:
            self._announced = presence
            for name in sites:
                self._transport.send(name, presence.head(), b"")

    # In the script's thread -----------------------------------------------------------------------------------------

    def lead(self, store: Store, watch: Watch) -> Summary:
        """Serve until a site reports the result; records go to the store."""
        written = RunRecords(store, watch)
        while True:
            with self._transport.changed:
                self._announce()
                if not self._records and self._summary is None:
                    self._transport.changed.wait(0.5)
                records, self._records = self._records, []
                summary = self._summary
            for record in records:
                self.round = record.round
                written.add(record)
            if summary is not None:
                if self._all:
                    written.replace(self._all)
                written.finish(summary)
                return summary
