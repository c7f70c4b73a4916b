"""`kilter join --dry-run`: show the terms, rehearse the experiment on this site's data, and print what each step would send.

The replies are made by the same code as in a real run (`site.make_reply`); nothing but a hello goes out. Copies of this site stand
in for the other sites, so values differ from the real ones, but names, types, shapes and sizes do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import grpc
from torch import Tensor

from kilter import trees
from kilter.core import Tree
from kilter.errors import Mistake
from kilter.net.disclosure import explain
from kilter.net.fields import printable
from kilter.net.frames import read_letter, to_frames
from kilter.net.grpc_server import ATTEND
from kilter.net.messages import Goodbye, Refusal, kind_of
from kilter.net.site import Site, make_reply
from kilter.net.site_client import open_channel, route
from kilter.net.terms import Terms, own_data
from kilter.records import wire
from kilter.runtimes.simulation import Simulation
from kilter.runtimes.step_names import EVALUATE, SUMMARISE, StepName
from kilter.runtimes.step_runner import Done

Print = Callable[[str], None]
PATIENCE = 60.0  # seconds to wait for the server


class Rehearsal(Simulation):
    """A simulation in which one node is this site, and what it would send is printed."""

    def __init__(self, site: Site, topology: str, seed: int, data: Any, show: Print) -> None:
        names = [site.name, *(f"{site.name}-copy-{k}" for k in (1, 2))]
        super().__init__(dict.fromkeys(names, data), topology=topology, seed=seed)
        self.site, self.show = site, show
        self.shown: set[StepName] = set()

    def execute(self, name: StepName, messages: Mapping[str, Tree]) -> Mapping[str, Done]:
        done = super().execute(name, messages)
        if self.site.name in done and name not in self.shown:
            self.shown.add(name)
            mine = done[self.site.name]
            if mine.error is None:
                mine.reply = self.site.policy.filter_report(name, mine.reply, self.clients[self.site.name])
            _, error, body = make_reply(mine)
            self.show(f"{name}: {len(body)} bytes")
            if not error:
                _show_leaves(body, self.show)
        return done


def _show_leaves(body: bytes, show: Print) -> None:
    """The name, type and shape of everything in the body of a reply."""
    for path, leaf in trees.leaves(wire.decode(body)):
        what = f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
        show(f"    {path}  {what}")


async def hear_terms(site: Site, server: str) -> Terms:
    """Ask the server for its terms, and hang up."""
    async with open_channel(site, server) as channel:
        stream = channel.stream_stream(ATTEND)(metadata=route(site), wait_for_ready=True, timeout=PATIENCE)
        hello = site.hello(rehearsal=True).head()
        site.audit.record("hello", next(to_frames(hello)), kinds="data description, row count", to=site.server_name)
        try:
            for frame in to_frames(hello):
                await stream.write(frame)
            head, _ = await read_letter(stream.read, 0)
        except grpc.RpcError as e:
            why = printable((e.details() or e.code().name).splitlines()[0])
            if e.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                why = f"'{server}' did not answer within {PATIENCE:.0f} seconds"
            raise Mistake(f"The server does not send its terms: {why}.") from None
    if kind_of(head) == "refusal":
        raise Mistake(f"The server cannot send its terms: {Refusal.parse(head).why}.")
    if kind_of(head) == "goodbye":
        raise Mistake(
            f"There are no terms: the run is {'finished' if Goodbye.parse(head).finished else 'interrupted'}."
        )
    return Terms.parse(head)


async def rehearse(site: Site, server: str, show: Print) -> None:
    """Show the terms, then rehearse set-up, a round and an evaluation."""
    show(f"Asking {server} for its terms; waiting up to {PATIENCE:.0f} seconds.")
    terms = await hear_terms(site, server)
    experiment, method = site.consider(terms)
    for line in explain(terms, experiment, method):
        show(line)
    data = own_data(site.dataset, site.name, experiment.seed, experiment.valid)
    show(f"Rehearsal on {len(data.train)} training rows. This is all that would leave this site:")
    if terms.description.needs_statistics:
        site.data = data
        _, _, body = make_reply(Done(site.statistics()))
        show(f"{SUMMARISE}: {len(body)} bytes")
        _show_leaves(body, show)
    with Rehearsal(site, "full" if terms.seals_letters else "star", experiment.seed, data, show) as fed:
        fed.bind(method)
        state = method.setup(fed)
        fed.round = 1
        state = method.round(fed, state)
        fed.call(EVALUATE, {"state": state, "full": True}, training=False)
    approved = site.approvals.has(terms.digest) or site.policy.approval == "policy"
    show(f"Digest of these terms: {terms.digest} ({'approved' if approved else 'not approved'} at this site)")
