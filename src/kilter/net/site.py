"""A site: it agrees to the terms of a run and carries out orders one by one.

What leaves a site is made in one place, `make_reply`: what the step returns, how training went (mean loss and steps of each fit),
and the step's notes. It is checked against the policy and written to the audit log before it is sent. An error leaves as its kind
only; the text stays in this site's log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from inspect import isgenerator
from pathlib import Path

import torch

from kilter import data as kdata
from kilter.core import Data, Fit, Method, Node, Note, Post, Rows, Step, Tree
from kilter.data.preparation import AnyPreparation, ImagePreparation, Preparation, fit_whole
from kilter.data.schema import quoted
from kilter.data.split import SKIPPED
from kilter.errors import Mistake
from kilter.experiment import Experiment
from kilter.fast import placement
from kilter.net.approvals import Approvals, NotApproved
from kilter.net.audit import AuditLog
from kilter.net.data_description import DataDescription
from kilter.net.disclosure import explain
from kilter.net.frames import LARGEST
from kilter.net.limits import StepTimer
from kilter.net.messages import Hello, Order, Reply
from kilter.net.policy import PolicyViolation, SitePolicy
from kilter.net.results import StepResult, check_spread
from kilter.net.seal import Seal
from kilter.net.site_models import save_models
from kilter.net.site_state import SiteState, StateDirectory
from kilter.net.terms import Terms, own_data
from kilter.net.tls import Identity
from kilter.net.tracing import site_span
from kilter.records import wire
from kilter.runtimes.base import fingerprint
from kilter.runtimes.devices import repeatable
from kilter.runtimes.evaluation import received_models
from kilter.runtimes.ledger import refuse_letter
from kilter.runtimes.reply_checks import checked
from kilter.runtimes.step_names import EVALUATE, RECEIVE, SUMMARISE, StepKind
from kilter.runtimes.step_runner import Done, RunningStep, resolve, run_step
from kilter.trees import not_finite, tensors

log = logging.getLogger("kilter.net")

MOST_CALLS = 100_000  # orders in one round
FRAMEWORK_KINDS = {
    EVALUATE: "evaluation",
    SUMMARISE: "statistics",
}  # what replies to the framework's own steps disclose
Ask = Callable[[list[str]], bool]  # shows the terms in plain words, and asks whether to approve them


def make_reply(done: Done) -> tuple[bool, str, bytes]:
    """The part of a reply that says something: whether it is letters, the error, the body. Nothing else ever leaves a site."""
    if done.error is not None:
        policy = isinstance(done.error, PolicyViolation)
        why = str(done.error) if policy else f"the step failed there ({type(done.error).__name__}); see that site's log"
        return False, why[:300], b""
    letters = isinstance(done.reply, Post)
    reply = dict(done.reply) if letters else done.reply
    return letters, "", wire.encode(StepResult(reply, done.fits, done.seconds, done.notes).tree())


@dataclass
class Site:
    """One site: its name, its data, its policy, where it keeps its state."""

    name: str
    dataset: kdata.Dataset
    state_dir: Path
    policy: SitePolicy = field(default_factory=SitePolicy)
    data_path: str = ""
    identity: Identity | None = None
    largest: int = LARGEST
    ask: Ask | None = None  # asks a person at the terminal; None: there is nobody
    server_name: str = "server"
    table: kdata.TableOptions = field(default_factory=kdata.TableOptions)  # how to read this site's table
    device: torch.device = placement.CPU  # where it trains: this site's choice, not the server's
    job: int = 0  # at a hub: the run that this site takes part in
    public: Rows | None = None  # rows that it may use when it aggregates

    directory: StateDirectory = field(init=False)
    audit: AuditLog = field(init=False)
    state: SiteState | None = field(init=False, default=None)
    terms: Terms | None = field(init=False, default=None)
    experiment: Experiment = field(init=False)
    method: Method = field(init=False)
    data: Data = field(init=False)
    preparation: AnyPreparation | None = field(init=False, default=None)  # of this run; None: not known, or not needed
    last_contact: float = field(init=False, default=-1.0)  # when the server last sent its terms
    leader: str = field(init=False, default="")  # the site that sent the order at hand (rotating); empty: the server

    def __post_init__(self) -> None:
        torch.set_num_threads(1)  # one thread for every fit: the same numbers as in simulation
        self.directory = StateDirectory(self.state_dir)
        self.audit = AuditLog(self.state_dir)
        self.approvals = Approvals(self.state_dir)
        self.seal = Seal(self.name, self.identity, self.state_dir)
        self._unreported = len(self.dataset.skipped)
        for note in self.dataset.notes:
            log.warning("%s", note)
        self._last: tuple[tuple[str, int, int], tuple[Reply, bytes]] | None = None

    def close(self) -> None:
        """Let another process use the state directory."""
        if self.state is not None:
            self.state.close()
        self.audit.close()
        self.directory.close()

    def share_approvals(self, folder: Path) -> None:
        """Use the approvals of another folder; terms that wait for one are explained there."""
        self.approvals = Approvals(folder)
        self.ask = self.ask or self.approvals.explain_pending

    def renew(self) -> None:
        """Use the certificate as it is on disk now: it may have been renewed."""
        if self.identity is not None:
            self.identity = self.seal.identity = self.identity.renewed()

    def hello(self, rehearsal: bool = False) -> Hello:
        rows = len(self.dataset.train) + len(self.dataset.test)
        description, card = DataDescription.of(self.dataset), self.seal.card()
        return Hello(self.name, description, rows, self.directory.instance, card, "dry-run" if rehearsal else "join")

    # The terms ------------------------------------------------------------------------------------------------------

    def consider(self, terms: Terms) -> tuple[Experiment, Method]:
        """What these terms would run here, if the policy allows it; a Mistake otherwise."""
        description = terms.description
        self._match_table(description)
        own = DataDescription.of(self.dataset)
        if own.shape != description.shape or own.normalised != description.normalised:
            raise Mistake(f"Rows here have shape {own.shape}, and the server wants {description.shape}.")
        if terms.sealed and not {self.name, *terms.peers} <= set(terms.ids):
            raise Mistake("The terms do not name this site and its neighbours among the participants.")
        if description.classes != self.dataset.classes:
            self.dataset = kdata.load(self.data_path, classes=description.classes, table=self.table)
        preparation = terms.preparation or self._provisional()
        facts = description.row_facts(preparation)
        experiment, method = self.policy.admit(terms, len(self.dataset.train), facts)
        if isinstance(preparation, Preparation):
            self.dataset = self.dataset.prepared(preparation)
        return experiment, method

    def _provisional(self) -> AnyPreparation | None:
        """A preparation from this site's rows alone, to check the terms and to rehearse. It stays here."""
        dataset = self.dataset
        if dataset.raw is not None and dataset.schema is not None:
            return fit_whole(dataset.raw, dataset.schema, dataset.train.numpy())
        if dataset.mean is not None and dataset.std is not None:
            return ImagePreparation(dataset.mean, dataset.std)
        return None

    def _match_table(self, description: DataDescription) -> None:
        """Read this site's table as the terms say, with columns matched by name; a Mistake says what does not fit."""
        schema = description.schema
        if schema is None and self.dataset.schema is not None:
            raise Mistake(
                "This site has a table, and the terms name no columns: start the server with --data none or with a table."
            )
        if schema is not None and self.dataset.schema is None:
            raise Mistake(f"The terms want a table with the columns {quoted(schema.names)}, and this site has arrays.")
        if schema != self.dataset.schema:
            self.dataset = kdata.load(self.data_path, schema=schema, table=self.table, prepare=False)

    def agree(self, terms: Terms) -> None:
        """Take part under these terms if the policy allows them and they are approved; a Mistake says why not."""
        known = self.terms
        if known is not None and self.state is not None and (known.run, known.digest) == (terms.run, terms.digest):
            if self.preparation is not None and terms.preparation != self.preparation:
                raise Mistake("The server changed the preparation of the data in a run: start this site again.")
            if terms.preparation is not None and self.preparation is None:
                self.take_part(terms, *self.consider(terms))
            self.terms = terms  # the server may have started a new session
            return
        if known is not None and known.run == terms.run:
            raise Mistake(
                "The server changed the terms of a run: start this site again to look at them and approve them."
            )
        experiment, method = self.consider(terms)
        self._approve(terms, experiment, method)
        if self.state is not None:
            self.state.close()
        self.state = SiteState(self.directory, terms.run, self.policy.state_mb)
        self._last = None
        self.take_part(terms, experiment, method)

    def take_part(self, terms: Terms, experiment: Experiment, method: Method) -> None:
        data = own_data(self.dataset, self.name, experiment.seed, experiment.valid)
        self.terms, self.experiment, self.method, self.data = terms, experiment, method, data
        self.preparation = terms.preparation

    def _approve(self, terms: Terms, experiment: Experiment, method: Method) -> None:
        digest = terms.digest
        if self.approvals.has(digest):
            return
        if self.policy.approval == "policy":
            how = "by policy"
        elif self.ask is not None and self.ask([*explain(terms, experiment, method), f"Digest: {digest}"]):
            how = "at the terminal"
        else:
            raise NotApproved(digest)
        self.approvals.add(digest, how)
        kinds = method.discloses() | ({"statistics"} if terms.description.needs_statistics else set())
        self.audit.record("approval", run=terms.run, kinds=" ".join(sorted(kinds)), approval=digest)

    def statistics(self) -> dict[str, object]:
        """What this site says about its training rows for the preparation of the data, if the policy allows it."""
        if "statistics" not in self.policy.sends:
            raise PolicyViolation("This site's policy does not allow statistics of its rows to leave.")
        return self.dataset.statistics(self.data.train.index.numpy(), self.policy.statistics_rows)

    # Orders ---------------------------------------------------------------------------------------------------------

    def carry_out(self, order: Order, body: bytes) -> tuple[Reply, bytes]:
        """An order's reply; the same order is never applied twice."""
        assert self.state is not None
        key = (order.session, *order.place)
        if self._last and self._last[0] == key:
            stored = self._last[1]
        else:
            try:
                with site_span(order.trace, self.name, str(order.step), order.round):
                    stored = self.state.begin(order) or self._run(order, body)
            except Exception as e:  # whatever it is, the site stays up, and the server learns that there is no reply
                log.error(
                    "round %d, %s: %s", order.round, order.step, e, exc_info=None if isinstance(e, Mistake) else e
                )
                stored = self._reply(order, Done(error=e))
        self._last = key, stored
        self._record(order, stored[1])
        return stored

    def _record(self, order: Order, body: bytes) -> None:
        assert self.terms is not None
        kinds = FRAMEWORK_KINDS.get(order.step) or " ".join(sorted(self.method.discloses()))
        self.audit.record(
            "reply",
            body,
            run=order.run,
            round=order.round,
            step=str(order.step),
            kinds=f"sealed: {kinds}" if self.terms.sealed and order.step not in FRAMEWORK_KINDS else kinds,
            to=self.leader or self.server_name,
            approval=self.terms.digest,
        )

    def _reply(self, order: Order, done: Done) -> tuple[Reply, bytes]:
        assert self.state is not None
        letters, error, body = make_reply(done)
        place = (order.run, order.session, order.round, order.seq, order.step)
        return Reply(self.name, *place, self.state.mark, letters, error), body

    def _run(self, order: Order, body: bytes) -> tuple[Reply, bytes]:
        assert self.state is not None
        assert self.terms is not None
        self._check_order(order)
        if order.step == SUMMARISE:
            return self._reply(order, Done(self.statistics(), notes=self._skipped_images()))
        node = Node(
            self.name,
            self.data,
            self.experiment.seed,
            order.round,
            order.step.step,
            self.state.state(),
            self.terms.peers,
            self.public if self.terms.rotates else None,
            private_seed=self.directory.private_seed,
        )
        node.group, node.aggregators = self.terms.group_of(self.name)
        message = self._open_mail(order, wire.decode(body), node)
        if order.step == RECEIVE:
            folder = self.state_dir / "models" / order.run
            models, card = received_models(self.method, node, message)
            save_models(folder, models, card, self.preparation, self.experiment.model_info(self.method))
            log.info("the final models are in %s", folder)
        before = fingerprint(node.state)
        began = time.perf_counter()
        with StepTimer(self.policy.seconds_per_step), repeatable(self.device, self.experiment.precision):
            (done,) = run_step(self._guarded(resolve(self.method, order.step)), [node], [message])
        if done.error is not None:
            log.error("round %d, %s failed", node.round, order.step, exc_info=done.error)
            return self._reply(order, done)
        done.reply = self.policy.filter_report(order.step, done.reply, node.data)
        done.notes += self._skipped_images()
        reply, encoded = self._reply(order, self._seal_mail(order, done))
        if fingerprint(node.state) != before:
            reply = self.state.finish(order, node.state, reply, encoded)
        seconds = time.perf_counter() - began
        log.info("round %d, %s: %d bytes, %.1f s", node.round, order.step, len(encoded), seconds)
        return reply, encoded

    def _skipped_images(self) -> list[Note]:
        """A notice for each image that could not be read, in the first reply after the start of this site."""
        count, self._unreported = self._unreported, 0
        return [{"notice": SKIPPED}] * count

    def _check_order(self, order: Order) -> None:
        """An order must belong to the approved run."""
        assert self.terms is not None
        if order.run != self.terms.run or order.round > self.experiment.rounds or order.seq > MOST_CALLS:
            raise PolicyViolation("The order does not belong to the approved run.")
        pending = self.terms.description.needs_statistics and self.preparation is None
        if pending != (order.step == SUMMARISE):
            raise PolicyViolation(
                "The data is not prepared yet."
                if pending
                else "This run does not need statistics, or has them already."
            )
        if pending:
            return
        self.policy.check_step(self.method, order.step)
        if self.terms.sealed and not set(order.cards) <= set(self.terms.ids):
            raise PolicyViolation("The order has cards of sites that do not take part.")

    def _guarded(self, step: Step) -> Step:
        """The step, with every fit that it asks for checked against the policy first."""

        def guarded(node: Node, message: Tree) -> RunningStep:
            running: Tree = step(node, message)
            if not isgenerator(running):
                return running
            answer: Tree = None
            try:
                while True:
                    request = running.send(answer)
                    if isinstance(request, Fit):
                        self.policy.check_fit(request)
                    answer = yield request
            except StopIteration as end:
                return end.value

        return guarded

    def _open_mail(self, order: Order, message: Tree, node: Node) -> Tree:
        """The message as the step sees it; a letter that does not fit is left out, and noted."""
        assert self.terms is not None
        if not_finite(tensors(message)):
            raise wire.Malformed("the server sent numbers that are not finite")
        if order.step.kind in (StepKind.SPREAD, StepKind.SUBMIT):
            check_spread(message, self.method, order.step)
        if order.mail is None:
            if order.step.reads_letters:
                raise wire.Malformed("an order to combine letters came without letters")
            return message
        if not isinstance(message, dict) or not set(message) <= set(self.terms.ids):
            raise wire.Malformed("mail that is not sorted by sender")
        box, written = dict(message), order.mail
        if self.terms.seals_letters:
            if written.round != order.round or not 0 < written.seq < order.seq:
                raise wire.Malformed("mail of another round")
            box = {}
            at = replace(order, seq=written.seq, step=written.step)
            for sender, letter in message.items():
                try:
                    box[sender] = self.seal.open(letter, sender, order.cards, at)
                except wire.Malformed as e:
                    log.warning("%s", e)
                    refuse_letter(node, str(e))
        box, refused = checked(box, self.method, written.step, self.name)
        for why in refused:
            refuse_letter(node, why)
        return box

    def _seal_mail(self, order: Order, done: Done) -> Done:
        """The outcome as the server may see it in a sealed run: letters sealed, no other reply, and no note on who listens."""
        assert self.terms is not None
        if not self.terms.seals_letters or order.step == EVALUATE:
            return done
        done = replace(done, notes=[note for note in done.notes if isinstance(note, str) or "notice" in note])
        if not isinstance(done.reply, Post):
            return replace(done, kept=None)  # between peers, nobody sees what another node returns
        post = Post()
        for to, letter in done.reply.items():
            try:
                post[to] = self.seal.close(letter, to, order.cards, order)
            except wire.Malformed as e:
                done.notes.append(str(e))
        return replace(done, kept=post)
