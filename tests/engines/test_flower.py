"""Flower in earnest: a SuperLink with TLS, SuperNodes with registered keys, `flwr run`, and the simulator's numbers.

Run with flwr installed (`pip install 'kilter[flower]'`); a ClientApp is a new process for every message, so this takes minutes.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from place import Place, free_ports
from told import booked, simulate, told

from kilter.net import tls

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(find_spec("flwr") is None, reason="Flower is not installed: pip install 'kilter[flower]'"),
    pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen makes the SuperNodes' keys"),
]
SITES = ("a", "b")
BIN = Path(sys.executable).parent
WAIT = 1500.0  # seconds for a run: the machine may be busy

APP = """
[project]
name = "kilter-app"
version = "1.0.0"
[tool.flwr.app]
publisher = "kilter"
[tool.flwr.app.components]
serverapp = "kilter.engines.flower:server"
clientapp = "kilter.engines.flower:client"
[tool.flwr.app.config]
experiment = ""
sites = ""
out = ""
deadline = 600.0
"""


class Flower:
    """A SuperLink and its SuperNodes on loopback."""

    def __init__(self, folder: Path, sites: tuple[str, ...] = SITES, settings: dict[str, str] | None = None) -> None:
        self.folder, self.sites, self.settings = folder, sites, settings or {}
        folder.mkdir()
        tls.new(folder / "certs", ["localhost", *sites])
        Place(folder, {}, sites)  # the sites' data
        (folder / "app").mkdir()
        (folder / "app/pyproject.toml").write_text(APP)
        self.ports = free_ports(1 + len(sites))
        home = folder / "flwr"
        home.mkdir()
        address = f'address = "localhost:{self.ports[0]}"\nroot-certificates = "{folder}/certs/ca.pem"\n'
        (home / "config.toml").write_text(f'[superlink]\ndefault = "here"\n[superlink.here]\n{address}')
        self.env = {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "OMP_NUM_THREADS": "1",
        }
        self.running: list[subprocess.Popen[bytes]] = []
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *words: str, log: str) -> subprocess.Popen[bytes]:
        with open(self.folder / log, "ab") as out:
            made = subprocess.Popen(
                words, cwd=self.folder, env=self.env, stdout=out, stderr=out, start_new_session=True
            )
        self.running.append(made)
        return made

    def flwr(self, *words: str) -> Any:
        done = subprocess.run(
            ["flwr", *words, "--format", "json"], cwd=self.folder, env=self.env, capture_output=True, timeout=300
        )
        text = done.stdout.decode()
        assert done.returncode == 0, text + done.stderr.decode()
        return json.loads(text[text.index("{") :])

    def open(self) -> None:
        port = self.ports[0]
        keys = ["--ssl-certfile", "certs/localhost/cert.pem", "--ssl-keyfile", "certs/localhost/key.pem"]
        words = ["--host", "localhost", "--port", str(port), *keys, "--ssl-ca-certfile", "certs/ca.pem"]
        options = ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        self.start("flower-superlink", *words, *options, log="superlink.log")
        until(lambda: not socket.socket().connect_ex(("localhost", port)), 300, self.said("superlink.log"))
        for site in self.sites:
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-C", "", "-f", f"key-{site}"],
                cwd=self.folder,
                check=True,
            )
            self.flwr("supernode", "register", f"key-{site}.pub", "--name", site)
            self.join(site)

    def join(self, site: str) -> None:
        here, port = self.folder, self.ports[1 + self.sites.index(site)]
        config = {"name": site, "data": f"{here}/{site}.npz", "state-dir": f"{here}/state-{site}"}
        config |= {"tls": f"{here}/certs/{site}", "policy": f"{here}/site.toml", **self.settings}
        words = ["--superlink", f"localhost:{self.ports[0]}", "--root-certificates", "certs/ca.pem"]
        words += ["--auth-supernode-private-key", f"key-{site}", "--port", str(port)]
        words += ["--node-config", " ".join(f'{k}="{v}"' for k, v in config.items())]
        self.nodes[site] = self.start("flower-supernode", *words, log=f"{site}.log")

    def run(self, here: Place) -> str:
        """Submit, and wait until Flower says what became of it; the exit code would not tell."""
        given = {
            "experiment": here.folder / "experiment.toml",
            "sites": ",".join(self.sites),
            "out": here.folder / "run",
        }
        words = " ".join(f'{k}="{v}"' for k, v in given.items())
        number = self.flwr("run", "app", "--run-config", words)["run-id"]
        end = time.monotonic() + WAIT
        while time.monotonic() < end:
            (actual,) = self.flwr("list", "--run-id", str(number))["runs"]
            if actual["status"].startswith("finished"):
                return str(actual["status"])
            time.sleep(10)
        raise AssertionError(f"the run did not end: {self.said('superlink.log')()}")

    def said(self, log: str) -> Any:
        return lambda: (self.folder / log).read_text()[-3000:]

    def close(self) -> None:
        for one in self.running:
            if one.poll() is None:
                os.killpg(one.pid, 9)  # each has a session of its own: its ClientApps go with it
                one.wait(30)


def until(true: Any, seconds: float, said: Any) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, said()
        time.sleep(0.5)


@pytest.fixture(scope="module")
def flower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flower]:
    made = Flower(tmp_path_factory.mktemp("flower") / "here")
    try:
        made.open()
        yield made
    finally:
        made.close()


@pytest.mark.parametrize(
    ("method", "graph", "rounds"), [("fedavg", "star", 1), ("scaffold", "star", 2), ("fedavg", "full", 1)]
)
def test_flower_gives_the_numbers_of_the_simulation(
    method: str, graph: str, rounds: int, flower: Flower, tmp_path: Path
) -> None:
    relayed = graph != "star"
    here = Place(tmp_path / "place", {"method": method, "topology": graph, "rounds": rounds}, SITES)
    for site in SITES:
        shutil.copy(flower.folder / f"{site}.npz", here.folder / f"{site}.npz")
    assert flower.run(here) == "finished:completed", flower.said("superlink.log")()
    simulated, real = simulate(here, **({"bench": None} if relayed else {})), here.folder / "run"
    assert booked(real, relayed) == booked(simulated, relayed)
    assert told(real) == told(simulated)


def test_a_run_that_cannot_work_is_on_record_as_failed(flower: Flower, tmp_path: Path) -> None:
    """`flwr run` exits with 0 all the same."""
    here = Place(tmp_path / "place", {"method": "fedavg"}, SITES)
    (here.folder / "experiment.toml").write_text('method = "nothing"\n')
    assert flower.run(here) == "finished:failed"
