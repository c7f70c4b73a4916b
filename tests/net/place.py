"""A small network on loopback: data files of sites, certificates, and the real commands as real processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kilter import data as kdata
from kilter.core import DISCLOSURES
from kilter.experiment import Experiment
from kilter.methods import methods
from kilter.net import tls
from kilter.net.terms import own_data
from kilter.runtimes.roles import parse_roles
from kilter.runtimes.simulation import Simulation

SITES = ("a", "b", "c")
# A policy under which every test experiment runs without a person: what a policy forbids is tested in test_policy.py.
LENIENT = """
approval = "policy"
methods = [METHODS]
sends = [SENDS]
evaluation = ["test", "valid", "own_test", "own_valid", "own_bench", "local", "common"]
batch = { at_least = 1, at_most = 1000 }
""".replace("METHODS", ", ".join(f'"{name}"' for name in methods())).replace(
    "SENDS", ", ".join(f'"{k}"' for k in DISCLOSURES)
)
BUILT_IN = "built-in policy"  # a word for `join`: without a policy file
WAIT = 120.0  # seconds for what should take a few: the machine may be busy


# Real processes, forked from one that has torch and kilter loaded: starting is then cheap.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["kilter.cli", "sklearn.datasets", "kilter.data", "loaded"])


def command(words: tuple[str, ...], log: Path, folder: Path, env: dict[str, str]) -> None:
    """The command line, as a shell would start it."""
    os.chdir(folder)
    os.environ.update(env)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    sys.argv = ["kilter", *words]
    spoil(env)
    from kilter import cli

    if not (trace := env.get("KILTER_TEST_TRACE")):
        cli.main()
        return
    import tracing

    with tracing.recorded() as calls:
        try:
            cli.main()
        finally:
            tracing.write(calls, Path(trace))


def spoil(env: dict[str, str]) -> None:
    """What is wrong with this process: a disk that takes only small files, or steps that take their time."""
    if size := int(env.get("KILTER_TEST_DISK", 0)):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing then fails as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    if seconds := float(env.get("KILTER_TEST_SLOW", 0)):
        from kilter.net import site

        quick = site.run_step
        site.run_step = lambda *args: time.sleep(seconds) or quick(*args)  # type: ignore[func-returns-value]


@dataclass
class Process:
    """One of the commands, running; what it says is in a file."""

    popen: Any
    log: Path

    def alive(self) -> bool:
        return bool(self.popen.is_alive())

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """kill -9."""
        self.popen.kill()
        self.popen.join(WAIT)

    def wait(self, code: int = 0) -> str:
        self.popen.join(WAIT)
        assert self.popen.exitcode == code, f"exit code {self.popen.exitcode}: {self.said()}"
        return self.said()

    def until(self, pattern: str, count: int = 1) -> str:
        """Wait until it has said this."""
        end = time.monotonic() + WAIT
        while time.monotonic() < end:
            if len(matches := re.findall(pattern, self.said())) >= count:
                return str(matches[-1])
            assert self.alive(), f"it ended ({self.popen.exitcode}) and never said {pattern}: {self.said()}"
            time.sleep(0.02)
        raise AssertionError(f"it did not say {pattern} in time: {self.said()}")


@dataclass
class Place:
    """A folder with everything; `experiment` fills experiment.toml."""

    folder: Path
    experiment: dict[str, Any]
    sites: tuple[str, ...] = SITES
    running: list[Process] = field(default_factory=list)

    def __post_init__(self) -> None:
        defaults = {"data": "digits", "model": "mlp:8", "rounds": 2, "seed": 3, "rows": 400, "partition": "iid"}
        defaults |= {"clients": 3, "valid": 0.2, "local": {"lr": 0.1, "batch": 16}}
        self.experiment = {**defaults, **self.experiment}
        self.folder.mkdir(parents=True, exist_ok=True)
        made = Experiment.of(self.experiment)
        (self.folder / "experiment.toml").write_text(made.write())
        (self.folder / "site.toml").write_text(LENIENT)
        if not (self.folder / "a.npz").exists():
            site_files(self.folder, self.sites)
        if not (self.folder / "certs").exists():
            tls.new(self.folder / "certs", ["server", *self.sites])

    def kilter(self, *words: str, name: str, **env: str) -> Process:
        log = self.folder / f"{name}-{len(self.running)}.log"
        log.touch()
        made = CONTEXT.Process(target=command, args=(words, log, self.folder, env), daemon=True)
        made.start()
        self.running.append(Process(made, log))
        return self.running[-1]

    def serve(self, *words: str, port: int = 0, out: str = "run", **env: str) -> Process:
        options = [
            "--listen",
            f"127.0.0.1:{port}",
            "--tls",
            "certs/server",
            "--out",
            out,
            "--sites",
            ",".join(self.sites),
            *(() if "--linger" in words else ("--linger", "0")),
        ]
        made = self.kilter("serve", "experiment.toml", *options, *words, name="server", **env)
        self.port = int(made.until(r"Listening on 127\.0\.0\.1:(\d+)"))
        return made

    def join(self, site: str, *words: str, port: int = 0, **env: str) -> Process:
        options = ["--server", f"127.0.0.1:{port or self.port}", "--tls", f"certs/{site}", "--data", f"{site}.npz"]
        policy = () if {"--policy", BUILT_IN} & set(words) else ("--policy", "site.toml")
        words = tuple(w for w in words if w != BUILT_IN)
        return self.kilter("join", *options, *policy, "--state-dir", f"state-{site}", *words, name=site, **env)

    def all(self, *words: str, **env: str) -> list[Process]:
        return [self.join(site, *words, **env) for site in self.sites]

    def peers(self, *words: str) -> dict[str, Process]:
        """Everyone as a peer."""
        ports = free_ports(len(self.sites))
        lines = [f'{site} = "127.0.0.1:{port}"' for site, port in zip(self.sites, ports, strict=True)]
        (self.folder / "peers.toml").write_text('experiment = "experiment.toml"\n[peers]\n' + "\n".join(lines) + "\n")
        return {site: self.peer(site, *words) for site in self.sites}

    def peer(self, site: str, *words: str) -> Process:
        options = ["--me", site, "--peers", "peers.toml", "--tls", f"certs/{site}", "--data", f"{site}.npz"]
        return self.kilter("peer", *options, "--policy", "site.toml", "--out", f"run-{site}", *words, name=site)

    def end(self) -> None:
        for process in self.running:
            process.kill()

    # What came out -------------------------------------------------------------------------------------------------

    def rounds(self, out: str = "run") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / out / "rounds.jsonl").read_text().splitlines()]

    def summary(self, out: str = "run") -> dict[str, Any]:
        return json.loads((self.folder / out / "summary.json").read_text())

    def failures(self, out: str = "run") -> list[dict[str, str]]:
        return [f for r in self.rounds(out) for f in r["failures"]]

    def simulated(self, **options: Any) -> Simulation:
        """The same sites, data and seeds in one process."""
        made = Experiment.of(self.experiment)
        clients = {
            site: own_data(kdata.load(self.folder / f"{site}.npz"), site, made.seed, made.valid) for site in self.sites
        }
        split = made.split()
        given = {
            "topology": made.topology,
            "seed": made.seed,
            "stack": False,
            "bench": split.test,
            "public": split.public,
        }
        roles = parse_roles(made.roles, made.topology)
        fed = Simulation(roles.taking_part(clients) if made.roles else clients, **given | options)
        fed.roles = roles
        return fed

    def method(self) -> Any:
        return Experiment.of(self.experiment).make((1, 8, 8), 10)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on just now."""
    made = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    actual = [one.getsockname()[1] for one in made]
    for one in made:
        one.close()
    return actual


def site_files(folder: Path, sites: tuple[str, ...], rows: int = 90) -> None:
    """A .npz a site, each with other proportions of the classes."""
    whole = kdata.load("digits")
    x, y = whole.x[:, 0].numpy(), whole.y.numpy()
    for k, site in enumerate(sites):
        rng = np.random.default_rng(k)
        odds = 1.0 + 4.0 * ((y + k) % len(sites) == 0)
        mine = np.sort(rng.choice(len(y), rows + 10 * k, replace=False, p=odds / odds.sum()))
        train, test = mine[: -(len(mine) // 4)], mine[-(len(mine) // 4) :]
        parts = {"x_train": x[train], "y_train": y[train], "x_test": x[test], "y_test": y[test]}
        np.savez(folder / f"{site}.npz", classes=np.array([str(c) for c in range(10)]), **parts)
