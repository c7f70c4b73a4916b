"""A hub, agents and submitters on loopback, enrolled by signing requests: the real commands as real processes."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
from place import LENIENT, WAIT, Place, Process, free_ports, site_files

from kilter.hub.client import HubClient
from kilter.hub.messages import JobView, SubmitRequest
from kilter.net import enrolment
from kilter.net.tls import Identity

EXPERIMENT = {"method": "fedavg", "data": "digits", "model": "mlp:8", "rounds": 2, "seed": 3, "rows": 400}
EXPERIMENT |= {"partition": "iid", "clients": 3, "valid": 0.2, "local": {"lr": 0.1, "batch": 16}}
PEOPLE = {"server": "server", "alice": "submitter", "bob": "submitter", "eve": "observer"}


def enrol(folder: Path, name: str, role: str, days: int = 90) -> Path:
    """Request, sign and install a certificate; the key stays in the folder of its owner."""
    if not (folder / "authority").exists():
        enrolment.authority(folder / "authority", "study", None, 900)
    enrolment.request(name, folder / name)
    signed = folder / f"signed-{name}"
    enrolment.sign(folder / name / "request.pem", folder / "authority", name, role, days, signed)  # type: ignore[arg-type]
    enrolment.install(signed, folder / name)
    return folder / name


@dataclass
class HubPlace:
    """A folder with keys, data, configurations and what runs there."""

    folder: Path
    sites: tuple[str, ...] = ("a", "b")
    place: Place = field(init=False)
    hub: Process = field(init=False)
    agents: dict[str, Process] = field(default_factory=dict)
    clients: dict[str, HubClient] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, role in {**PEOPLE, **dict.fromkeys(self.sites, "site")}.items():
            enrol(self.folder, name, role)
        site_files(self.folder, self.sites)
        (self.folder / "certs").mkdir()
        self.place = Place(self.folder, dict(EXPERIMENT), self.sites)
        (self.port,) = free_ports(1)
        self.address = f"127.0.0.1:{self.port}"

    def start_hub(self, **settings: Any) -> None:
        values = {"listen": self.address, "tls": "server", "sites": list(self.sites), "patience": 3.0, "parallel": 2}
        (self.folder / "hub.toml").write_text(tomli_w.dumps({**values, "data": {"digits": "digits"}, **settings}))
        self.restart_hub()

    def restart_hub(self) -> None:
        self.hub = self.place.kilter("hub", "run", "--config", "hub.toml", name="hub")
        self.hub.until("listens on")

    def start_agent(self, site: str, policy: str = LENIENT, **settings: Any) -> None:
        (self.folder / f"policy-{site}.toml").write_text(policy)
        values = {"hub": self.address, "tls": site, "data": f"{site}.npz", "state": f"state-{site}", "parallel": 2}
        values |= {"policy": f"policy-{site}.toml", **settings}
        (self.folder / f"site-{site}.toml").write_text(tomli_w.dumps(values))
        self.restart_agent(site)

    def restart_agent(self, site: str) -> None:
        self.agents[site] = self.place.kilter("site", "run", "--config", f"site-{site}.toml", name=f"agent-{site}")

    def kill_and_restart(self, name: str) -> None:
        """kill -9 the hub or the agent of a site, and start it again."""
        if name == "hub":
            self.hub.kill()
            self.restart_hub()
        else:
            self.agents[name].kill()
            self.restart_agent(name)

    def client(self, name: str = "alice") -> HubClient:
        if name not in self.clients:
            self.clients[name] = HubClient(self.address, Identity.read(self.folder / name))
        return self.clients[name]

    def submit(self, text: str = "", by: str = "alice", grace: float = 5.0, **options: Any) -> int:
        """Queue an experiment, or any text; its number."""
        text = text or tomli_w.dumps(EXPERIMENT)
        return self.client(by).submit(SubmitRequest(text, "trial", grace=grace, **options)).job

    def view(self, job: int) -> JobView:
        return self.client("eve").job(job)[0]

    def until(self, job: int, *states: str, seconds: float = WAIT, reason: str = "") -> JobView:
        """Wait until a job is in one of these states (and its reason contains this text)."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                view = self.view(job)
            except Exception:
                time.sleep(0.3)
                continue
            if view.state in states and reason in view.reason:
                return view
            assert view.state not in {"finished", "failed", "cancelled"} - set(states), self.story(view)
            time.sleep(0.1)
        raise AssertionError(self.story(self.view(job)))

    def story(self, view: JobView) -> str:
        """Everything that helps to understand a failure."""
        logs = [self.folder / f"hub-state/jobs/{view.job}/log.txt", self.hub.log]
        logs += [self.folder / f"state-{site}/runs/{view.job}/log.txt" for site in self.sites]
        logs += [agent.log for agent in self.agents.values()]
        parts = [f"--- {log.name}\n{log.read_text()[-3000:]}" for log in logs if log.exists()]
        return "\n".join([str(view), *parts])

    def run_folder(self, job: int) -> Path:
        return self.folder / f"hub-state/jobs/{job}/run"

    def results(self, folder: Path) -> dict[str, Any]:
        return json.loads((folder / "summary.json").read_text())

    def end(self) -> None:
        for client in self.clients.values():
            client.close()
        self.place.end()
