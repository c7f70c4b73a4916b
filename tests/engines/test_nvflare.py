"""NVFlare in earnest: a provisioned project, a server and two sites as their startup kits start them, `nvflare job submit`."""

from __future__ import annotations

import json
import os
import shutil
import signal
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

from kilter.engines import nvflare_job as job
from kilter.errors import Mistake

SITES = ("a", "b")
BIN = Path(sys.executable).parent
WAIT = 1500.0  # seconds for a run: the machine may be busy
LEAD = "lead@kilter.org"
RUNS = "nvflare.collab.runtime."
ALLOWED = {"server": [RUNS + "controller.CollabController", "kilter.engines.nvflare.FlareServer"]}
ALLOWED["site"] = [RUNS + "executor.CollabExecutor", "kilter.engines.nvflare.FlareSite"]

installed = pytest.mark.skipif(
    find_spec("nvflare") is None, reason="NVFlare is not installed: pip install 'kilter[nvflare]'"
)

PROJECT = """
api_version: 3
name: kilter
description: two sites
participants:
  - {{name: localhost, type: server, org: kilter, fed_learn_port: {port}}}
{clients}
  - {{name: lead@kilter.org, type: admin, org: kilter, role: project_admin}}
builders:
  - path: nvflare.lighter.impl.workspace.WorkspaceBuilder
    args: {{template_file: [master_template.yml]}}
  - path: nvflare.lighter.impl.static_file.StaticFileBuilder
    args: {{config_folder: config}}
  - path: nvflare.lighter.impl.cert.CertBuilder
  - path: nvflare.lighter.impl.signature.SignatureBuilder
"""


class Flare:
    """A provisioned project on loopback."""

    def __init__(self, folder: Path, sites: tuple[str, ...] = SITES, settings: dict[str, str] | None = None) -> None:
        self.folder, self.sites, self.settings = folder, sites, settings or {}
        Place(folder, {}, sites)  # the sites' data
        clients = "\n".join(f"  - {{name: {site}, type: client, org: kilter}}" for site in sites)
        (folder / "project.yml").write_text(PROJECT.format(port=free_ports(1)[0], clients=clients))
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        self.env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "HOME": str(folder)}
        self.kits = folder / "ws/kilter/prod_00"
        self.running: list[subprocess.Popen[bytes]] = []

    def nvflare(self, *words: str) -> str:
        done = subprocess.run(["nvflare", *words], cwd=self.folder, env=self.env, capture_output=True, timeout=600)
        assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
        return done.stdout.decode()

    def open(self) -> None:
        self.nvflare("provision", "-p", "project.yml", "-w", "ws", "--force")
        for who in ("localhost", *self.sites):
            local = self.kits / who / "local"
            resources = json.loads((local / "resources.json.default").read_text())
            resources["class_allow_list"] += ALLOWED["site" if who in self.sites else "server"]
            (local / "resources.json").write_text(json.dumps(resources))
            if who in self.sites:
                told = {"data": f"{self.folder}/{who}.npz", "state-dir": f"{self.folder}/state-{who}"}
                told |= {"policy": f"{self.folder}/site.toml", **self.settings}
                (local / "kilter.toml").write_text("".join(f'{k} = "{v}"\n' for k, v in told.items()))
        for who in ("localhost", *self.sites):
            with open(self.folder / f"{who}.log", "ab") as out:
                start = ["bash", str(self.kits / who / "startup/sub_start.sh")]
                self.running.append(
                    subprocess.Popen(
                        start, cwd=self.folder, env=self.env, stdout=out, stderr=out, start_new_session=True
                    )
                )

    def ask(self, *words: str) -> Any:
        """A job command of NVFlare, as the project's lead; tried again while the server starts."""
        end = time.monotonic() + 600
        while True:
            try:
                kit = ["--startup-kit", str(self.kits / LEAD)]
                actual = self.nvflare("--connect-timeout", "60", "--format", "json", "job", *words, *kit)
                return json.loads(actual[actual.index("{") :])["data"]
            except AssertionError:
                if time.monotonic() > end:
                    raise
                time.sleep(5)

    def run(self, here: Place) -> str:
        """Submit, and wait until NVFlare says what became of it."""
        given = {
            "experiment": str(here.folder / "experiment.toml"),
            "sites": ",".join(self.sites),
            "out": str(here.folder / "run"),
        }
        job.write(given, here.folder / "job")
        number = self.ask("submit", "-j", str(here.folder / "job"))["job_id"]
        end = time.monotonic() + WAIT
        while time.monotonic() < end:
            status = str(self.ask("meta", number)["status"])
            if status.startswith("FINISHED"):
                return status
            time.sleep(3)
        raise AssertionError(f"the run did not end: {self.said()}")

    def said(self) -> str:
        return "\n".join((self.folder / f"{who}.log").read_text()[-3000:] for who in ("localhost", *self.sites))

    def close(self) -> None:
        for one in self.running:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)  # each has a session of its own: its job processes go with it
                one.wait(30)


@pytest.fixture(scope="module")
def flare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flare]:
    made = Flare(tmp_path_factory.mktemp("flare") / "here")
    try:
        made.open()
        yield made
    finally:
        made.close()


@installed
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("method", "graph", "rounds"), [("fedavg", "star", 1), ("scaffold", "star", 2), ("fedavg", "full", 1)]
)
def test_nvflare_gives_the_numbers_of_the_simulation(
    method: str, graph: str, rounds: int, flare: Flare, tmp_path: Path
) -> None:
    """Under a graph the letters are sealed with keys that the provisioned certificates vouch for."""
    relayed = graph != "star"
    here = Place(tmp_path / "place", {"method": method, "topology": graph, "rounds": rounds}, SITES)
    for site in SITES:
        shutil.copy(flare.folder / f"{site}.npz", here.folder / f"{site}.npz")
    assert flare.run(here) == "FINISHED:COMPLETED", flare.said()
    simulated, real = simulate(here, **({"bench": None} if relayed else {})), here.folder / "run"
    assert booked(real, relayed) == booked(simulated, relayed)
    assert told(real) == told(simulated)


def test_a_job_names_classes_and_ships_no_code(tmp_path: Path) -> None:
    job.write({"experiment": "/e.toml", "sites": "a,b", "out": "/run"}, tmp_path)
    files = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert files == ["app/config/config_fed_client.json", "app/config/config_fed_server.json", "meta.json"]
    text = "".join((tmp_path / f).read_text() for f in files)
    for name in (*ALLOWED["server"], *ALLOWED["site"]):
        assert name in text


def test_a_job_without_sites_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match="sites"):
        job.write({"experiment": "/e.toml", "out": "/run"}, tmp_path)
