"""A lying server against an honest site: no crash, no rows, no reply outside the approved terms, everything on record."""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from mutate import mutate_bytes, mutate_head, strange_tree
from sites import RUN, make_site, make_terms, order

from kilter.errors import Mistake
from kilter.methods import methods
from kilter.net.audit import verify
from kilter.net.messages import Order, Reply
from kilter.net.policy import SitePolicy
from kilter.net.results import StepResult
from kilter.net.site import Site
from kilter.net.terms import Terms
from kilter.records import wire
from kilter.trees import tensors

STEPS = [
    "train",
    "combine",
    "setup",
    ":evaluate",
    ":adopt",
    ":look",
    "spread:train",
    "gather:combine",
    "gather:median:combine",
]
ALLOWED = SitePolicy(approval="policy")


def holds_rows(site: Site, body: bytes) -> bool:
    """Whether a reply contains one of the site's rows, as bytes or as a tensor."""
    rows = site.dataset.x[site.dataset.train].reshape(len(site.dataset.train), -1).float()
    if any(row.numpy().tobytes() in body for row in rows[:200]):
        return True
    try:
        arrays = tensors(wire.decode(body)["reply"])
    except (wire.Malformed, TypeError, KeyError):
        return False
    wide = [a.reshape(len(a), -1).float() for a in arrays if a.ndim > 1 and a[0].numel() == rows.shape[1]]
    return any(bool((torch.cdist(a, rows) < 1e-6).any()) for a in wide if len(a))


class LyingServer(RuleBasedStateMachine):
    """Says anything, in any order."""

    @initialize(seed=st.integers(0, 2**32), sealed=st.booleans())
    def meet(self, seed: int, sealed: bool) -> None:
        self.rng = Random(seed)
        self.folder = tempfile.TemporaryDirectory()
        self.site = make_site(Path(self.folder.name), ALLOWED, rows=120)
        self.honest = make_terms(self.site, "full" if sealed else "star")
        self.site.agree(self.honest)
        self.digest = self.honest.digest
        self.sent = 0
        self.round, self.seq = 0, 0

    def carry_out(self, what: Order, body: bytes) -> None:
        reply, answer = self.site.carry_out(what, body)
        assert isinstance(reply, Reply)
        assert Reply.parse(reply.head()) == reply
        if answer:
            try:
                StepResult.parse(wire.decode(answer))
            except wire.Malformed as e:  # the server sent a model with absurd numbers: the loss is not finite
                assert "a fit with impossible numbers" in str(e)  # noqa: PT017
        assert not holds_rows(self.site, answer)
        if self.honest.sealed and what.step.step != "evaluate" and answer:
            plain = wire.decode(answer)["reply"]
            assert plain is None or (reply.letters and all(t.dtype == torch.uint8 for t in tensors(plain)))
        self.sent += 1

    @rule(method=st.sampled_from(sorted(methods())), data=st.data())
    def change_the_terms(self, method: str, data: st.DataObject) -> None:
        head = self.honest.head()
        experiment: dict[str, Any] = {**self.honest.experiment, "method": method, "settings": {}}
        lie = data.draw(st.sampled_from(["method", "head", "experiment", "run"]))
        if lie == "head":
            head = mutate_head(self.rng, head)
        elif lie == "experiment":
            head["experiment"] = mutate_head(self.rng, dict(self.honest.experiment))
        else:
            head["experiment"] = experiment
        if lie == "run":
            head["run"] = "5" * 32
        try:
            terms = Terms.parse(head)
            experiment_here, kind = self.site.consider(terms)
        except Mistake:
            return
        assert kind.discloses() <= ALLOWED.sends
        assert 0 <= experiment_here.valid <= 0.5
        if terms.run == RUN and terms.digest != self.digest:
            with pytest.raises(Mistake):
                self.site.agree(terms)

    @rule(step=st.sampled_from(STEPS), forward=st.integers(0, 3))
    def order_a_step(self, step: str, forward: int) -> None:
        self.round, self.seq = (self.round + 1, 1) if forward == 0 else (self.round, self.seq + forward)
        assert self.site.state
        what = order(step, self.round, self.seq, accepted=(self.round, self.seq), state=self.site.state.mark)
        honest = self.site.method.task.init(0)
        message = {"state": honest, "full": True, "seen": None} if step == ":evaluate" else honest
        self.carry_out(what, wire.encode(strange_tree(self.rng, message)))

    @rule(step=st.sampled_from(STEPS))
    def order_in_pieces(self, step: str) -> None:
        head = mutate_head(self.rng, order(step, self.round, self.seq + 1).head())
        try:
            what = Order.parse(head)
        except wire.Malformed:
            return
        self.carry_out(what, mutate_bytes(self.rng, wire.encode(self.site.method.task.init(0))))

    @invariant()
    def the_site_is_as_it_was(self) -> None:
        if not hasattr(self, "site"):
            return
        assert self.site.terms
        assert self.site.terms.digest == self.digest
        entries = list(verify(self.site.audit.path))
        assert sum(e.event == "reply" for e in entries) == self.sent

    def teardown(self) -> None:
        if hasattr(self, "site"):
            self.site.close()
            self.folder.cleanup()


LyingServer.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestLyingServer = LyingServer.TestCase
