"""The records of a run that other sites lead: what a relay, or a site between two turns, writes to its run folder."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kilter.records.codec import from_json
from kilter.records.run_folder import Store
from kilter.records.types import Clients, ClientsAt, Round, Summary

Watch = Callable[[Round], None]


class RunRecords:
    """Writes the record of every round once, in order, and the result."""

    def __init__(self, store: Store, watch: Watch) -> None:
        self._store, self._watch = store, watch
        self._next = len(store.rounds())
        self._lock = threading.Lock()

    def take(self, kind: str, text: str | bytes) -> None:
        """A record or the result, as JSON."""
        if kind == "record":
            self.add(from_json(Round, text))
        elif kind == "records":
            self.replace(parse_records(text))
        elif kind == "result":
            self.finish(from_json(Summary, text))

    def add(self, record: Round) -> None:
        with self._lock:
            if record.round < self._next:  # a successor repeated the round, or the record came twice
                self._store.rewind(record.round - 1)
            self._store.append(record)
            self._next = record.round + 1
        self._watch(record)

    def replace(self, rounds: list[Round]) -> None:
        """All records, at the end of a run: single ones may have been lost."""
        with self._lock:
            self._store.rewrite(rounds)
            self._next = len(rounds)

    def finish(self, summary: Summary) -> None:
        """The result. What single sites achieved stays with the site that led the last round."""
        self._store.finish(summary, Clients(ClientsAt(summary.rounds, {}), None))


def parse_records(text: str | bytes) -> list[Round]:
    """One record a line."""
    return [from_json(Round, line) for line in text.splitlines()]
