"""Who leads next where sites aggregate in turn, and when a leader is given up."""

from __future__ import annotations

import logging

from kilter.net.known_turns import KnownTurns
from kilter.net.links import Links
from kilter.net.site import Site
from kilter.net.turns import Waits

log = logging.getLogger("kilter.net")


class Succession:
    """Chooses leaders, as far as one site can see the others; `waits` may change while the run goes on."""

    def __init__(self, site: Site, links: Links, known: KnownTurns, waits: Waits) -> None:
        assert site.terms is not None
        self.waits = waits
        self._site, self._links, self._known, self._terms = site, links, known, site.terms
        self._given_up: set[str] = set()  # leaders of the next round
        self._waiting_for = ""  # the last line in the log about sites that the run waits for

    def choose(self, round: int) -> str | None:
        """Who leads this round: the first in turn that is there and willing. None: wait for somebody who left just now."""
        for name in self._terms.turns(round):
            if name in self._given_up:
                continue
            if name == self._site.name:
                if self._site.policy.aggregate:
                    return name
                continue
            with self._links.changed:
                there = self._links.present.get(name)
            if there is None and self._links.away(name) < self.waits.grace:
                return None
            if there is not None and there[0].aggregates:
                return name
        self._given_up.clear()
        return None

    def gives_up(self, leader: str, round: int) -> bool:
        """Whether the leader of this round is given up: away for longer than the grace, or no progress until the deadline."""
        if self._links.away(leader) > self.waits.grace:
            why = "is lost"
        elif self._known.silence > self.waits.deadline:
            why = "makes no progress"
        else:
            return False
        if leader not in self._given_up:
            self._links.note(f"{leader} {why}: another site repeats round {round}")
            self._given_up.add(leader)
        return True

    def forget(self) -> None:
        """The round goes on: all are trusted with the next one."""
        self._given_up.clear()

    def watch(self) -> None:
        """Say in the log if the run waits because the leader and the site that appointed it are both lost."""
        turn, leader = self._known.turn, self._known.leader
        holder = self._known.holder(turn)
        lost = [name for name in (leader, holder) if name not in ("", self._site.name)]
        why = f"round {turn.round} waits for {leader} or {holder} to come back: nobody else has the state"
        if len(lost) < 2 or any(self._links.away(name) <= self.waits.grace for name in lost):
            self._waiting_for = ""
        elif self._waiting_for != why:
            self._waiting_for = why
            self._links.note(why)
