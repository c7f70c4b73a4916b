"""A site's links through a relay, and its session there: one stream for packets, presence, terms and the relay's goodbye."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from kilter.net.frames import Ended, Head, read_letter, to_frames
from kilter.net.links import Links
from kilter.net.messages import Goodbye, Order, kind_of
from kilter.net.rotation import Rotation
from kilter.net.site import Site
from kilter.net.terms import Terms
from kilter.net.turns import Packet, Presence, Waits
from kilter.records.wire import Malformed
from kilter.runtimes.step_names import SUMMARISE

log = logging.getLogger("kilter.net")

Stream = Any  # gRPC has no types
Agree = Callable[[Site, Stream, Head], Awaitable[Terms]]
Outbox = asyncio.Queue[tuple[Head, bytes]]


class RelayLinks(Links):
    """Sends packets over the stream to the relay. While there is none, packets are lost."""

    def __init__(self, site: Site, run: str, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(run, site.seal, site.largest)
        self._loop = loop
        # Not bounded: a leader sends each site one order at a time, and a lost connection empties the outbox.
        self.outbox: Outbox | None = None

    def post(self, packet: Packet, sealed: bytes) -> None:
        self.tell(packet.head(), sealed)

    def tell(self, head: Head, body: bytes = b"") -> None:
        """Send a message to the relay itself, or for the relay to forward."""
        if (outbox := self.outbox) is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(outbox.put_nowait, (head, body))

    def close(self) -> None:
        self.outbox = None


class RelaySession:
    """What outlives a connection to the relay: the links, and this site's part in the run."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.links: RelayLinks | None = None
        self.rotation: Rotation | None = None

    async def attend(self, stream: Stream, agree: Agree) -> bool:
        """One connection, from the agreed terms on; true when the run is over."""
        outbox: Outbox = asyncio.Queue()
        reader = asyncio.create_task(self._read(stream, outbox, agree))
        writer = asyncio.create_task(self._write(stream, outbox))
        self._take_part(outbox)
        try:
            while True:
                await asyncio.wait([reader, writer], timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
                if reader.done():
                    return reader.result()
                if writer.done():
                    raise Ended
                if self.rotation is not None and self.rotation.done.done():
                    self.rotation.done.result()  # raises what went wrong
        finally:
            reader.cancel()
            writer.cancel()
            if self.links is not None:
                self.links.close()
                self.links.lost()

    def _take_part(self, outbox: Outbox) -> None:
        """Say that this site is ready, once the data is prepared."""
        site, terms = self.site, self.site.terms
        assert terms is not None
        if terms.description.needs_statistics and site.preparation is None:
            return
        if self.rotation is None or self.links is None or self.rotation.terms.run != terms.run:
            self.links = RelayLinks(site, terms.run, asyncio.get_running_loop())
            folder = site.state_dir / "rotation" / terms.run
            self.rotation = Rotation(site, self.links, folder, Waits(), self._report, relay=True)
        self.links.outbox = outbox
        outbox.put_nowait((self.rotation.ready().head(), b""))

    def _report(self, kind: str, text: str) -> None:
        if self.links is not None:
            self.links.tell({"kind": kind}, text.encode())

    async def _write(self, stream: Stream, outbox: Outbox) -> None:
        while True:
            head, body = await outbox.get()
            for frame in to_frames(head, body):
                await stream.write(frame)

    async def _read(self, stream: Stream, outbox: Outbox, agree: Agree) -> bool:
        while True:
            head, body = await read_letter(stream.read, self.site.largest)
            kind = kind_of(head)
            if kind == "goodbye":
                goodbye = Goodbye.parse(head)
                if goodbye.finished and self.rotation is not None:
                    self.rotation.end()
                if goodbye.finished:
                    log.info("the run is finished")
                else:
                    log.warning("the relay stopped%s; waiting for it", f": {goodbye.why}" if goodbye.why else "")
                return goodbye.finished
            if kind == "terms":
                await agree(self.site, stream, head)
                self._take_part(outbox)
            elif kind == "order":
                await self._summarise(Order.parse(head), body, outbox)
            elif self.links is not None and self.rotation is not None:
                if kind == "presence":
                    self._update(Presence.parse(head))
                elif kind == "packet":
                    await asyncio.to_thread(self.links.receive, Packet.parse(head), body)

    def _update(self, presence: Presence) -> None:
        assert self.links is not None
        assert self.rotation is not None
        self.rotation.waits = Waits(presence.quorum, presence.deadline, presence.grace)
        self.links.update(presence.sites)
        self.rotation.start()

    async def _summarise(self, order: Order, body: bytes, outbox: Outbox) -> None:
        """The relay may ask for one thing only: statistics for the preparation of the data."""
        if order.step != SUMMARISE:
            raise Malformed("a relay gives no orders but to summarise the data")
        self.site.leader = ""
        reply, reply_body = await asyncio.to_thread(self.site.carry_out, order, body)
        outbox.put_nowait((reply.head(), reply_body))
