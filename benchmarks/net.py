"""Latency of `map` over gRPC with mutual TLS on loopback: a message to sites and back, real processes.

    python benchmarks/net.py [--sizes 50000 40000000] [--calls 20] [--sites 3] [--engine flower | nvflare]

The sites echo what they are sent, and the server averages the replies. Targets with three sites: at most 10 ms for 50 kB, 0.6 s for
40 MB. With ten sites and 37 MB: 4 s, and a server below 800 MB (`peak_megabytes`, this process with everything it imports).
With an engine (installed, and started as in its tests) every call is a round of a method that only sends, and the round's
seconds are those of the call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from kilter.fast.memory_layout import keep_memory
from kilter.net import tls
from kilter.net.frames import OPTIONS, read_letter, to_frames
from kilter.net.grpc_server import ATTEND, GrpcServer
from kilter.net.messages import Card, DataDescription, Hello, Order, Reply, StateMark, kind_of
from kilter.net.server import ServerRuntime
from kilter.params import average
from kilter.runtimes.step_names import StepName

SITES = ("a", "b", "c")


def echo(port: int, folder: Path) -> None:
    """A site that sends back what it is sent, decoded and encoded as in earnest."""
    asyncio.run(_echo(port, tls.Identity.read(folder)))


async def _echo(port: int, me: tls.Identity) -> None:
    from grpc import aio

    from kilter.net.site import make_reply
    from kilter.records import wire
    from kilter.runtimes.step_runner import Done

    keep_memory(large=True)  # as a site does
    options = [*OPTIONS, ("grpc.ssl_target_name_override", "server")]
    async with aio.secure_channel(f"127.0.0.1:{port}", me.for_client(), options=options) as channel:
        stream = channel.stream_stream(ATTEND)()
        mark = StateMark("0" * 32)
        hello = Hello(me.name, DataDescription((1,), ("x",)), 100, mark.instance, Card(""))
        for frame in to_frames(hello.head()):
            await stream.write(frame)
        while True:
            head, body = await read_letter(stream.read)
            if kind_of(head) == "goodbye":
                return
            if kind_of(head) != "order":
                continue
            order = Order.parse(head)
            letters, error, result = make_reply(Done(wire.decode(body)))
            place = (order.run, order.session, order.round, order.seq, order.step)
            for frame in to_frames(Reply(me.name, *place, mark, letters, error).head(), result):
                await stream.write(frame)


def measure(sizes: list[int], calls: int, count: int) -> dict[str, dict[str, float]]:
    """Seconds of a call by size, and the peak memory of the server up to then."""
    names = [f"site-{k}" for k in range(count)]
    folder = Path(tempfile.mkdtemp())
    tls.new(folder, ["server", *names])
    server = GrpcServer("127.0.0.1:0", tls.Identity.read(folder / "server"), names)
    context = multiprocessing.get_context("spawn")
    sites = [context.Process(target=echo, args=(server.port, folder / site), daemon=True) for site in names]
    for site in sites:
        site.start()
    runtime = ServerRuntime(server, names, run="0" * 32)
    runtime.wait()
    results = {}
    for size in sizes:
        message = {"w": torch.ones(size // 4)}
        took = []
        for _ in range(max(3, calls if size < 10**6 else calls // 4)):
            began = time.perf_counter()
            replies = runtime.call(StepName("echo"), message)
            assert len(replies) == len(names)
            average((reply, 1) for reply in replies.values())
            took.append(time.perf_counter() - began)
            del replies
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        results[str(size)] = {"median_seconds": median(took), "best_seconds": min(took), "peak_megabytes": peak}
    runtime.close(finished=True)
    for site in sites:
        site.join(10)
    return results


def measure_engine(name: str, sizes: list[int], calls: int) -> dict[str, dict[str, float]]:
    """Seconds of a call by size, behind Flower or NVFlare."""
    here = Path(__file__).resolve().parent
    for part in ("engines", "net"):
        sys.path.insert(0, str(here.parent / "tests" / part))
    from place import Place

    if name == "flower":
        from test_flower import Flower as Engine
    else:
        from test_nvflare import Flare as Engine  # type: ignore[assignment]
    folder = Path(tempfile.mkdtemp())
    engine = Engine(folder / "engine", SITES, {"trust": f"{here / 'echo.py'}:Echo"})
    results = {}
    try:
        engine.open()
        for size in sizes:
            count = max(3, calls if size < 10**6 else calls // 4)
            experiment = {"method": f"{here / 'echo.py'}:Echo", "settings": {"size": size}, "evaluate_every": count + 1}
            place = Place(folder / str(size), {**experiment, "rounds": count + 1}, SITES)
            print(engine.run(place), file=sys.stderr)
            took = [r["seconds"] for r in place.rounds()[1:-1]]  # not the set-up, nor the round with an evaluation
            results[str(size)] = {"median_seconds": median(took), "best_seconds": min(took)}
    finally:
        engine.close()
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[50_000, 40_000_000])
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--engine", choices=["flower", "nvflare"])
    arguments = parser.parse_args()
    results = (
        measure_engine(arguments.engine, arguments.sizes, arguments.calls)
        if arguments.engine
        else measure(arguments.sizes, arguments.calls, arguments.sites)
    )
    print(json.dumps(results, indent=2))
