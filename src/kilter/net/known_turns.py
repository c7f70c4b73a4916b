"""What a site knows about turns: the highest one, who leads it, who led the round before, and which claims it believes.

Only sites that may aggregate in this run are believed. They are trusted as a server is: one that lies can take the lead when it is
not its turn. All others can neither take the lead, stop a leader nor end the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from kilter.net.turns import NOBODY, Turn
from kilter.records.wire import Malformed


class KnownTurns:
    """`turn` is the highest known turn and `leader` leads it; `order(round)` lists the sites in the order of their turns."""

    def __init__(
        self, turn: Turn, aggregators: Collection[str], rounds: int, order: Callable[[int], Sequence[str]]
    ) -> None:
        self.turn, self.leader = turn, ""
        self._before = (0, "")  # the last earlier round, and who led it
        self._aggregators, self._rounds, self._order = aggregators, rounds, order
        self._progress = time.monotonic()

    def check(self, sender: str, turn: Turn) -> None:
        """Refuse a claim of a site that never aggregates, or about a round that this run does not have."""
        if sender not in self._aggregators:
            raise Malformed("it does not aggregate in this run")
        if turn.round > self._rounds:
            raise Malformed(f"this run has no round {turn.round}")

    def leads(self, sender: str, turn: Turn) -> bool:
        """Whether a site can lead this turn. If two begin the same turn, the first in turn leads."""
        if turn != self.turn or self.leader in ("", sender):
            return turn >= self.turn
        order = list(self._order(turn.round))
        return order.index(sender) < order.index(self.leader)

    def holder(self, turn: Turn) -> str:
        """The site that has the state before this turn: it led the round before. Empty if unknown."""
        for round, leader in ((self.turn.round, self.leader), self._before):
            if round == turn.round - 1:
                return leader
        return ""

    def observe(self, turn: Turn, leader: str) -> bool:
        """A site follows this turn, or leads it; whether the turn is higher than all before."""
        if turn < self.turn or (leader and not self.leads(leader, turn)):
            return False
        higher = turn > self.turn
        if turn.round > self.turn.round:
            self._before = self.turn.round, self.leader
        if higher:
            self.turn, self.leader = turn, ""
        if leader:
            self.leader = leader
        if leader or higher:
            self.progressed()
        return higher

    def progressed(self) -> None:
        """The leader works, or was appointed just now."""
        self._progress = time.monotonic()

    @property
    def silence(self) -> float:
        """For how many seconds the leader has shown no progress."""
        return time.monotonic() - self._progress

    @property
    def nobody_leads(self) -> bool:
        return self.turn == NOBODY
