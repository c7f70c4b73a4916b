"""A lying relay between honest sites: whatever it does to letters, sites open only what was written to them, here and now."""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from mutate import flip_bit
from sites import IDS, ask, make_site, make_terms, order

from kilter.net import tls
from kilter.net.messages import Card, MailMark
from kilter.net.site import Site
from kilter.records import wire
from kilter.runtimes.step_names import StepName

CERTS = Path(tempfile.mkdtemp())
tls.new(CERTS, IDS)


class LyingRelay(RuleBasedStateMachine):
    """Passes letters on: altered, replayed, misdelivered, dropped, or as they are."""

    @initialize(seed=st.integers(0, 2**32))
    def meet(self, seed: int) -> None:
        self.rng = Random(seed)
        self.folder = tempfile.TemporaryDirectory()
        folder = Path(self.folder.name)
        self.sites = {
            n: make_site(folder, name=n, rows=60 + 20 * k, identity=tls.Identity.read(CERTS / n))
            for k, n in enumerate(IDS)
        }
        self.cards: dict[str, Card] = {n: s.seal.card() for n, s in self.sites.items()}
        self.old: list[tuple[str, str, torch.Tensor]] = []
        self.round = 0
        for site in self.sites.values():
            site.agree(make_terms(site, "full", rounds=100))

    def do(self, site: Site, step: str, seq: int, message: object, mail: MailMark | None = None) -> tuple[str, object]:
        assert site.state
        what = order(
            step, self.round, seq, accepted=(self.round, seq), state=site.state.mark, mail=mail, cards=self.cards
        )
        reply, content = ask(site, what, message)
        return reply.error, content

    @rule(lie=st.sampled_from(["none", "flip", "swap", "replay", "drop", "plain", "misdeliver", "card"]))
    def pool(self, lie: str) -> None:
        self.round += 1
        start = next(iter(self.sites.values())).method.task.init(0)
        letters: dict[str, dict[str, torch.Tensor]] = {}
        for name, site in self.sites.items():
            self.do(site, ":adopt", 1, start)
            error, post = self.do(site, "spread:train", 2, {"to": list(IDS), "view": None})
            assert not error
            assert isinstance(post, dict)
            letters[name] = post
        me = self.rng.choice(IDS)
        victim = self.rng.choice([n for n in IDS if n != me])
        box = {sender: post[me] for sender, post in letters.items()}
        self.old.append((victim, me, box[victim]))
        cards = dict(self.cards)
        if lie == "flip":
            box[victim] = torch.frombuffer(
                bytearray(flip_bit(self.rng, box[victim].numpy().tobytes())), dtype=torch.uint8
            )
        elif lie == "swap":
            other = next(n for n in IDS if n not in (me, victim))
            box[victim], box[other] = box[other], box[victim]
        elif lie == "replay":
            sender, to, letter = self.rng.choice(self.old)
            if to == me:
                box[sender] = letter
        elif lie == "drop":
            del box[victim]
        elif lie == "plain":
            box[victim] = start  # type: ignore[assignment]
        elif lie == "misdeliver":
            box[victim] = letters[victim][next(n for n in IDS if n not in (me, victim))]
        elif lie == "card":
            self.cards[victim] = self.cards[me]
            self.sites[me].seal._known.clear()
        error, content = self.do(
            self.sites[me], "gather:combine", 3, box, MailMark(self.round, 2, StepName.spread("train"))
        )
        self.cards = cards
        assert not error
        assert content is None  # nothing is given back to the relay
        state = self.sites[me].state.state()["~pool"]  # type: ignore[union-attr]
        assert all(bool(torch.isfinite(v).all()) for v in state.values())
        opened = self._opened(me, box)
        if lie in ("flip", "plain", "misdeliver"):
            assert victim not in opened
        if lie == "swap":
            assert opened == {me}
        if lie == "none":
            assert opened == set(IDS)

    def _opened(self, me: str, box: dict[str, torch.Tensor]) -> set[str]:
        at = order("spread:train", self.round, 2)
        opened = set()
        for sender, letter in box.items():
            try:
                self.sites[me].seal.open(letter, sender, self.cards, at)
                opened.add(sender)
            except wire.Malformed:
                pass
        return opened

    def teardown(self) -> None:
        if hasattr(self, "sites"):
            for site in self.sites.values():
                site.close()
            self.folder.cleanup()


LyingRelay.TestCase.settings = settings(max_examples=25, stateful_step_count=10, deadline=None)
TestLyingRelay = LyingRelay.TestCase
