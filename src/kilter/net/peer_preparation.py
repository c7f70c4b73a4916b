"""Peers prepare their tables together: everyone sends its schema and then statistics to everyone, and fits the same preparation.

Every peer waits for all others, so a peer that is missing is named after the deadline. At the end peers compare digests: a
peer that tells others different statistics is noticed before the first round.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from kilter.core import Tree
from kilter.data import Dataset, Preparation, Schema
from kilter.data.preparation import check_statistics, fit
from kilter.data.schema import merge, quoted
from kilter.errors import Mistake
from kilter.net.audit import AuditLog
from kilter.net.messages import PeerLetter
from kilter.net.peer_transport import PeerTransport
from kilter.net.terms import own_data
from kilter.records import wire
from kilter.runtimes.ledger import Ledger
from kilter.runtimes.step_names import SUMMARISE

FIRST = 900_000  # the number of the first letter in round 0; the method's set-up counts from 1


@dataclass
class PeerExchange:
    """Letters from every peer to every peer, before the method's set-up."""

    transport: PeerTransport
    ids: Sequence[str]
    deadline: float
    audit: AuditLog | None = None
    ledger: Ledger = field(default_factory=Ledger)
    _seq: int = field(init=False, default=FIRST)

    def exchange(self, value: Tree, kinds: str) -> dict[str, Tree]:
        """Everyone's value, in the order of the ids."""
        transport, at = self.transport, (0, self._seq)
        body = wire.encode(value)
        letters = {
            to: (PeerLetter(transport.run, transport.me, to, *at, SUMMARISE), body)
            for to in self.ids
            if to != transport.me
        }
        for to in letters:
            self.ledger.letter(transport.me, to, len(body))
            if self.audit:
                self.audit.record(
                    "letter",
                    body,
                    run=transport.run,
                    round=0,
                    step=str(SUMMARISE),
                    kinds=kinds,
                    to=to,
                    approval=transport.run,
                )
        transport.seq = self._seq
        transport.send(at, letters)
        bodies = self._wait(at)
        self._seq += 1
        values: dict[str, Tree] = {transport.me: value}
        for sender, arrived in bodies.items():
            self.ledger.letter(sender, transport.me, len(arrived))
            try:
                values[sender] = wire.decode(arrived)
            except wire.Malformed as error:
                raise Mistake(f"{sender} sent {kinds} that cannot be read: {error}.") from None
        return {name: values[name] for name in self.ids}

    def _wait(self, at: tuple[int, int]) -> dict[str, bytes]:
        transport, until = self.transport, time.monotonic() + self.deadline
        others = [name for name in self.ids if name != transport.me]
        with transport.changed:
            while missing := [name for name in others if (at, name) not in transport.inbox]:
                left = until - time.monotonic()
                if left <= 0:
                    raise Mistake(
                        f"No statistics came from {quoted(missing)} within {self.deadline:g} s: start these peers, or raise "
                        "--deadline."
                    )
                transport.changed.wait(min(left, 0.5))
            return {name: transport.inbox.pop((at, name))[1] for name in others}


def agree_on_preparation(
    exchange: PeerExchange, dataset: Dataset, seed: int, valid: float, minimum: int
) -> tuple[Preparation, Dataset]:
    """The preparation that all peers share, and this peer's data prepared with it. `minimum`: see `Dataset.statistics`."""
    assert dataset.schema is not None
    me = exchange.transport.me
    schemas = exchange.exchange(dataset.schema.plain(), "schema")
    agreed = merge([_schema(name, plain) for name, plain in schemas.items()])
    if reason := agreed.mismatch(dataset.schema):
        raise Mistake(f"The table of this peer does not fit the others': {reason}.")
    dataset = dataset.matching(agreed)
    rows = own_data(dataset, me, seed, valid).train.index.numpy()
    statistics = exchange.exchange(dataset.statistics(rows, minimum), "statistics")
    parts = []
    for name, plain in statistics.items():
        try:
            parts.append(check_statistics(plain, agreed))
        except ValueError as error:
            raise Mistake(f"{name} sent statistics that do not fit: {error}.") from None
    preparation = fit(agreed, parts)
    _compare(exchange, preparation)
    return preparation, dataset.prepared(preparation)


def _schema(name: str, plain: Tree) -> Schema:
    try:
        return Schema.parse(plain)
    except ValueError as error:
        raise Mistake(f"{name} sent an impossible schema: {error}.") from None


def _compare(exchange: PeerExchange, preparation: Preparation) -> None:
    """Whether all peers fitted the same preparation."""
    own = blake2b(preparation.text().encode(), digest_size=16).hexdigest()
    digests: Mapping[str, Tree] = exchange.exchange(own, "digest of the preparation")
    different = [name for name, digest in digests.items() if digest != own]
    if different:
        raise Mistake(
            f"{quoted(different)} fitted another preparation: a peer sent different statistics to different peers."
        )
