"""A rotating federation in this process: real sites with real state directories, and links that a test can cut and listen to."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from kilter import data as kdata
from kilter.core import DISCLOSURES, Rows
from kilter.experiment import Experiment
from kilter.federate import federate
from kilter.methods import methods
from kilter.net import site as site_module
from kilter.net.data_description import DataDescription
from kilter.net.links import Links
from kilter.net.policy import Bounds, SitePolicy
from kilter.net.results import METRICS, SHARES
from kilter.net.rotation import Rotation
from kilter.net.site import Site
from kilter.net.terms import Terms, own_data
from kilter.net.turns import Packet, Waits
from kilter.records.run_folder import Store
from kilter.runtimes import base
from kilter.runtimes.roles import parse_roles
from kilter.runtimes.simulation import Simulation
from kilter.topology import topology

RUN, SESSION = "0" * 32, "1" * 32
LENIENT = SitePolicy(
    approval="policy",
    methods={name: {} for name in methods()},
    sends=frozenset(DISCLOSURES),
    evaluation=frozenset({*METRICS, *SHARES}),
    batch=Bounds(1, 1000),
)
WAIT = 60.0  # seconds for what should take two


class WatchedLinks(Links):
    """Links to the other sites of a `Turns`."""

    def __init__(self, here: Turns, site: Site) -> None:
        super().__init__(RUN, site.seal)
        self.here = here
        self.inbox: queue.Queue[tuple[Packet, bytes] | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def post(self, packet: Packet, sealed: bytes) -> None:
        self.here.carry(packet, sealed)

    def _listen(self) -> None:
        while (item := self.inbox.get()) is not None:
            self.receive(*item)

    def close(self) -> None:
        self.inbox.put(None)


@dataclass
class Turns:
    """The sites, the links between them, and every packet that went over them."""

    folder: Path
    experiment: Experiment
    ids: tuple[str, ...] = ("a", "b", "c")
    policies: dict[str, SitePolicy] = field(default_factory=dict)
    waits: Waits = field(default_factory=lambda: Waits(grace=0.3))
    rotations: dict[str, Rotation] = field(default_factory=dict)
    packets: list[tuple[Packet, bytes]] = field(default_factory=list)
    letters: list[tuple[str, str, dict[str, Any], int]] = field(
        default_factory=list
    )  # from, to, head, bytes of the body
    on_letter: Callable[[str, str, dict[str, Any]], None] = lambda *_: None
    _lock: Any = field(default_factory=threading.RLock)
    _changes: queue.Queue[None] = field(default_factory=queue.Queue)
    _numbers: int = 0
    _connected: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        whole = kdata.load("digits")
        count = len(self.ids)
        self.datasets = {
            name: replace(whole, train=whole.train[k::count][:60], test=whole.test[k::count][:25])
            for k, name in enumerate(self.ids)
        }
        threading.Thread(target=self._tell, daemon=True).start()
        self.public = Rows({"x": whole.x, "y": whole.y}, whole.train[-40:])

    @property
    def members(self) -> tuple[str, ...]:
        return parse_roles(self.experiment.roles).members(self.ids)

    # Sites ----------------------------------------------------------------------------------------------------------

    def start(self, name: str) -> Rotation:
        """Start a site, or start it again."""
        policy = self.policies.get(name, LENIENT)
        site = Site(name, self.datasets[name], self.folder / f"state-{name}", policy, "digits", public=self.public)
        graph = topology(self.experiment.topology, self.members, self.experiment.seed)
        description = DataDescription.of(self.datasets[name])
        site.agree(Terms.write(RUN, SESSION, self.experiment, description, graph, name))
        links = WatchedLinks(self, site)
        rotation = Rotation(site, links, site.state_dir / "rotation", self.waits, lambda *_: None)
        self._listen_in(name, links)
        with self._lock:
            self.rotations[name] = rotation
            self._numbers += 1
            self._connected[name] = self._numbers
        self._announce()
        rotation.start()
        return rotation

    def _listen_in(self, name: str, links: WatchedLinks) -> None:
        quiet = links.send

        def send(to: str, head: dict[str, Any], body: bytes = b"") -> int:
            if head["kind"] in ("order", "hand-over"):
                self.on_letter(name, to, head)
            size = quiet(to, head, body)
            if size:
                self.letters.append((name, to, head, len(body)))
            return size

        links.send = send  # type: ignore[method-assign]

    def kill(self, name: str) -> None:
        """It is gone at once: nothing that it sends from now on arrives."""
        with self._lock:
            self._connected.pop(name, None)
        rotation = self.rotations[name]
        rotation.close()
        rotation.links.close()
        self._announce()

    def cut_off(self, name: str) -> None:
        """It lives, but nothing that it sends arrives, and it knows that it is cut off."""
        with self._lock:
            self._connected.pop(name, None)
        threading.Thread(target=self.rotations[name].links.lost, daemon=True).start()
        self._announce()

    def connect(self, name: str) -> None:
        """After `cut_off`."""
        with self._lock:
            self._numbers += 1
            self._connected[name] = self._numbers
        self._announce()

    def restart(self, name: str) -> Rotation:
        """After `kill`: a new process with the same state directory."""
        rotation = self.rotations[name]
        rotation.join(WAIT)
        rotation.site.close()
        return self.start(name)

    def _announce(self) -> None:
        """Tell everyone who is there, in a thread of its own: the caller may hold a lock that the others need."""
        self._changes.put(None)

    def _tell(self) -> None:
        while True:
            self._changes.get()
            with self._lock:
                sites = {name: (self.rotations[name], number) for name, number in self._connected.items()}
            there = {name: (rotation.ready(), number) for name, (rotation, number) in sites.items()}
            for rotation, _ in sites.values():
                rotation.links.update(there)

    def carry(self, packet: Packet, sealed: bytes) -> None:
        with self._lock:
            if packet.sender in self._connected and packet.to in self._connected:
                self.packets.append((packet, sealed))
                self.rotations[packet.to].links.inbox.put((packet, sealed))  # type: ignore[attr-defined]

    # What came out --------------------------------------------------------------------------------------------------

    def wait(self) -> Path:
        """Until the run is over; the run folder of the site that led the last round."""
        for name in list(self._connected):
            self.rotations[name].done.result(WAIT)
        (summary,) = self.folder.glob("state-*/rotation/turn-*/summary.json")
        return summary.parent

    def end(self) -> None:
        for rotation in self.rotations.values():
            rotation.end()
            rotation.links.close()
            rotation.join(WAIT)
            rotation.site.close()

    def simulated(self) -> Path:
        """The same experiment in simulation: its run folder."""
        folder, experiment = self.folder / "simulated", self.experiment
        store = Store(folder)
        roles = parse_roles(experiment.roles)
        data = {n: own_data(d, n, experiment.seed, experiment.valid) for n, d in self.datasets.items()}
        clients = roles.taking_part(data)
        method = next(iter(self.rotations.values())).site.method
        options: dict[str, Any] = {"topology": experiment.topology, "seed": experiment.seed, "public": self.public}
        with Simulation(clients, stack=False, **options) as fed:
            fed.roles = roles
            federate(method, fed, experiment.rounds, store=store)
        store.close()
        return folder


@pytest.fixture
def turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes rotating federations, and ends them. Steps of different sites run one after another, as torch wants it."""
    one_at_a_time = threading.Lock()
    for module in (site_module, base):
        quick = module.run_step

        def run_step(*args: Any, quick: Any = quick) -> Any:
            with one_at_a_time:
                return quick(*args)

        monkeypatch.setattr(module, "run_step", run_step)
    started: list[Turns] = []

    def make(ids: tuple[str, ...] = ("a", "b", "c"), start: bool = True, **options: Any) -> Turns:
        own = {k: options.pop(k) for k in ("policies", "waits") if k in options}
        settings = {"method": "fedavg", "topology": "rotating", "model": "mlp:8", "rounds": 3, "seed": 3, "valid": 0.2}
        settings |= {"local": {"lr": 0.1, "batch": 16}, **options}
        here = Turns(tmp_path / f"turns{len(started)}", Experiment.of(settings), ids, **own)
        here.folder.mkdir()
        for name in ids:  # every site's secret is the run's seed, as in simulation
            (here.folder / f"state-{name}").mkdir(mode=0o700)
            (here.folder / f"state-{name}" / "secret").write_text(f"{settings['seed']:x}")
        started.append(here)
        if start:
            for name in here.members:
                here.start(name)
        return here

    yield make
    for here in started:
        here.end()
