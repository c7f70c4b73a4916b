"""What moves from one aggregator to the next, as bytes, and as a run folder that the next one resumes from.

The hand-over itself holds the state, what the aggregator remembers, and the best model so far: the ledger counts exactly these
bytes. The books hold what every runtime keeps about a run: its records, its progress, and which replies of each site counted last.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from kilter.core import SERVER, Params, Tree
from kilter.experiment import Experiment
from kilter.net.server import ACCEPTED
from kilter.net.site import Site
from kilter.net.turns import Turn
from kilter.records import wire
from kilter.records.codec import Unreadable, from_json, from_tree, to_json, to_tree
from kilter.records.model_info import BEST
from kilter.records.run_folder import Saved, Store, model_round
from kilter.records.types import Checkpoint, Round

MOST_RECORDS = 2**28  # bytes of records in one hand-over


@dataclass(frozen=True)
class HandOver:
    """Everything that the next aggregator needs."""

    saved: Saved
    rounds: list[Round]
    best: Params | None
    best_round: int

    @staticmethod
    def read(store: Store, names: Mapping[str, str]) -> HandOver:
        """From the run folder of the aggregator that finished a round; `names` maps the module's names to ours."""
        saved = store.load()
        assert saved is not None
        return HandOver(saved, store.rounds(), store.read_best(names), model_round(store.path(BEST)) or 0)

    def parts(self) -> list[bytes]:
        """The state, the aggregator's memory, and the best model: what the ledger counts. Empty for nothing."""
        memory = self.saved.nodes.get(SERVER, {})
        return [
            wire.encode(self.saved.state),
            wire.encode(memory) if memory else b"",
            b"" if self.best is None else wire.encode(self.best),
        ]

    def books(self) -> bytes:
        lines = "".join(to_json(record) + "\n" for record in self.rounds)
        return wire.encode(
            {
                "progress": to_tree(self.saved.at),
                "role": self.saved.role,
                "accepted": self.saved.nodes.get(ACCEPTED, {}),
                "best_round": self.best_round,
                "rounds": zlib.compress(lines.encode()),
            }
        )

    @staticmethod
    def parse(books: bytes, body: bytes, sizes: Sequence[int], experiment: Experiment) -> HandOver:
        """From what another site sent; `Malformed` if it is not a hand-over."""
        if len(sizes) != 3 or sum(sizes) != len(body):
            raise wire.Malformed("a hand-over has other sizes than announced")
        cuts = [0, sizes[0], sizes[0] + sizes[1], len(body)]
        state, memory, best = (wire.decode(body[a:b]) if a < b else None for a, b in pairwise(cuts))
        tree = wire.decode(books)
        try:
            lines = _decompress(tree["rounds"]).decode().splitlines()
            rounds = [from_json(Round, line) for line in lines]
            nodes: dict[str, dict[str, Tree]] = {ACCEPTED: dict(tree["accepted"])}
            if memory is not None:
                nodes[SERVER] = dict(memory)
            at = from_tree(Checkpoint, tree["progress"])
            saved = Saved(at, state, str(tree["role"]), asdict(experiment), nodes)
            return HandOver(saved, rounds, None if best is None else dict(best), int(tree["best_round"]))
        except (Unreadable, LookupError, TypeError, ValueError, zlib.error) as e:
            raise wire.Malformed(f"the books of a hand-over cannot be read ({type(e).__name__})") from None

    def write(self, folder: Path, names: Mapping[str, str]) -> None:
        """As a run folder, from which a round can be run."""
        store = Store(folder)
        store.rewrite(self.rounds)
        if self.best is not None:
            store.save_best(self.best, names, self.best_round)
        store.save(self.saved, tuple(self.saved.nodes))
        store.close()


def pack_up(folder: Path, site: Site, to: str, turn: Turn) -> tuple[list[bytes], bytes]:
    """The parts of a hand-over from this run folder, and the books. They are in the site's audit log before they leave."""
    store = Store(folder)
    moved = HandOver.read(store, site.method.task.names)
    store.close()
    parts, books = moved.parts(), moved.books()
    assert site.terms is not None
    place = {"run": site.terms.run, "to": to, "approval": site.terms.digest}
    for what, data, kinds in (
        ("books", books, "records of the run"),
        ("hand-over", b"".join(parts), "state and memory of the aggregator"),
    ):
        site.audit.record("hand-over", data, round=turn.round, step=what, kinds=f"sealed: {kinds}", **place)
    return parts, books


def _decompress(data: object) -> bytes:
    if not isinstance(data, bytes):
        raise wire.Malformed("the books of a hand-over have no records")
    unpacker = zlib.decompressobj()
    text = unpacker.decompress(data, MOST_RECORDS)
    if unpacker.unconsumed_tail:
        raise wire.Malformed("the books of a hand-over are too long")
    return text
