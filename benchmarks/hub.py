"""What a hub costs: CPU and memory with 200 idle agents over mutual TLS, and the time to list 1,000 jobs.

    python benchmarks/hub.py                     # a minute
    python benchmarks/hub.py --seconds 600       # ten minutes, as the target says

Targets: under 5 % of one core and 300 MB at the hub; listing under 0.3 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from grpc import aio

from kilter.hub.client import HubClient
from kilter.hub.job_queue import JobQueue
from kilter.hub.messages import AGENT, AgentHello, AgentReport, encode
from kilter.net import tls
from kilter.net.frames import OPTIONS
from kilter.net.tls import Identity

HUB = [sys.executable, "-c", "from kilter.cli import main; main()", "hub", "run", "--config"]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def megabytes(pid: int) -> float:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


async def idle_agent(folder: Path, name: str, address: str, ready: asyncio.Semaphore) -> None:
    """A stream like that of `kilter site run`, without runs."""
    options = [*OPTIONS, ("grpc.ssl_target_name_override", "server")]
    credentials = Identity.read(folder / "certs" / name).for_client()
    async with aio.secure_channel(address, credentials, options=options) as channel:
        stream = channel.stream_stream(AGENT)(wait_for_ready=True)
        await stream.write(encode(AgentHello(name, 1)))
        await stream.write(encode(AgentReport([])))
        await stream.read()
        ready.release()
        while await stream.read():
            pass


async def idle(folder: Path, names: list[str], address: str, hub: int, seconds: float) -> dict[str, float]:
    """CPU and memory of the hub while all agents are connected and nothing happens."""
    ready = asyncio.Semaphore(0)
    began = time.monotonic()
    agents = [asyncio.create_task(idle_agent(folder, name, address, ready)) for name in names]
    for _ in names:
        await asyncio.wait_for(ready.acquire(), 120)
    connected = time.monotonic() - began
    before = cpu_seconds(hub)
    await asyncio.sleep(seconds)
    used = cpu_seconds(hub) - before
    assert not any(agent.done() for agent in agents), "an agent lost its connection"
    for agent in agents:
        agent.cancel()
    await asyncio.gather(*agents, return_exceptions=True)
    return {"connect_seconds": connected, "cpu_percent": 100 * used / seconds, "megabytes": megabytes(hub)}


def listing(folder: Path, address: str, jobs: int) -> dict[str, float]:
    """The time to list many jobs, over the network."""
    queue = JobQueue(folder / "state/queue.sqlite")
    for k in range(jobs):
        queue.move(queue.add("experiment", f"job {k}", "alice", "method = 'fedavg'\n" * 20, ["s000"]), "finished")
    queue.close()
    client = HubClient(address, Identity.read(folder / "certs/alice"))
    client.jobs(1)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        assert len(client.jobs(jobs)) == jobs
        times.append(time.perf_counter() - began)
    client.close()
    return {"list_seconds": min(times)}


def measure(agents: int, seconds: float, jobs: int, port: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as temporary:
        folder, address = Path(temporary), f"127.0.0.1:{port}"
        names = [f"s{k:03d}" for k in range(agents)]
        tls.new(folder / "certs", ["server:server", "alice:submitter", *(f"{name}:site" for name in names)])
        listed = json.dumps(names)
        (folder / "hub.toml").write_text(
            f'listen = "{address}"\ntls = "certs/server"\nstate = "state"\nsites = {listed}\n'
        )
        command = [*HUB, str(folder / "hub.toml"), "--log-file", str(folder / "log.txt")]
        hub = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert hub.stdout is not None
            hub.stdout.readline()
            costs = asyncio.run(idle(folder, names, address, hub.pid, seconds))
            return {"agents": agents, "seconds": seconds, **costs, "jobs": jobs, **listing(folder, address, jobs)}
        finally:
            hub.kill()
            hub.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--port", type=int, default=9953)
    parser.add_argument("--out", type=Path, help="write the numbers to this file, as JSON")
    options = parser.parse_args()
    result = measure(options.agents, options.seconds, options.jobs, options.port)
    text = json.dumps({key: round(value, 4) for key, value in result.items()}, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
