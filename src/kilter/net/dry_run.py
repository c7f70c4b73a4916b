"""`kilter join --dry-run`: rehearse the server's experiment on this site's data, and print what each step would send.

The letters are made by the code that makes them in earnest (`site.answer`); nothing but the hello goes out. The other sites are
played by copies of this one, so sums and choices differ from the real ones, and names, types, shapes and bytes do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from kilter import trees
from kilter.core import Tree
from kilter.errors import Mistake
from kilter.net.frames import cut, read
from kilter.net.grpc_server import ATTEND
from kilter.net.site import Site, _channel, answer
from kilter.records import wire
from kilter.runtimes.simulation import Simulation
from kilter.runtimes.step_names import EVALUATE, StepName
from kilter.runtimes.step_runner import Done

Print = Callable[[str], None]
PATIENCE = 120.0  # seconds to wait for the server


class Rehearsal(Simulation):
    """A simulation in which one node is me, and what I would send is printed."""

    def __init__(self, site: Site, topology: str, show: Print) -> None:
        names = [site.name, *(f"{site.name}-copy-{k}" for k in (1, 2))]
        super().__init__(dict.fromkeys(names, site.data), topology=topology, seed=site.seed)
        self.site, self.show = site, show
        self.shown: set[StepName] = set()

    def execute(self, name: StepName, messages: Mapping[str, Tree]) -> Mapping[str, Done]:
        done = super().execute(name, messages)
        if self.site.name in done and name not in self.shown:
            self.shown.add(name)
            head, body = answer(done[self.site.name])
            self.show(f"{name}: {len(body)} bytes")
            for path, leaf in trees.leaves(wire.decode(body)) if not head.get("error") else ():
                what = f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
                self.show(f"    {path}  {what}")
        return done


async def rehearse(site: Site, server: str, server_name: str, show: Print) -> None:
    """Hear the terms, hang up, and rehearse set-up, a round and an evaluation."""
    import grpc

    async with _channel(site, server, server_name) as channel:
        stream = channel.stream_stream(ATTEND)(wait_for_ready=True, timeout=PATIENCE)
        try:
            for frame in cut(site.hello()):
                await stream.write(frame)
            terms, _ = await read(stream.read, 0)
        except grpc.RpcError as e:
            raise Mistake(f"The server gives no terms: {e.details()}.") from None
    site.agree(terms)
    show(
        f"{type(site.method).__name__} on {len(site.data.train)} training rows; this is all that would leave this site:"
    )
    with Rehearsal(site, "full" if terms.get("relay") else "star", show) as fed:
        fed.bind(site.method)
        state = site.method.setup(fed)
        fed.round = 1
        state = site.method.round(fed, state)
        fed.call(EVALUATE, {"state": state, "full": True}, training=False)
