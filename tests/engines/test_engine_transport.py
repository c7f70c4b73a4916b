"""Runs behind an engine, the engine being a fake: the simulator's numbers, and whose answer counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from types import SimpleNamespace as Thing
from typing import Any

import pytest
from fakes import FakeGrid, envelope
from place import Place
from rich.console import Console
from told import booked, simulate, told

from kilter.engines import engine_transport, flower_transport, nvflare_transport
from kilter.engines.flower_transport import FlowerTransport
from kilter.engines.settings import RunSettings, make_site
from kilter.engines.site_endpoint import answer_letter
from kilter.errors import Mistake
from kilter.experiment import Experiment
from kilter.net import server_run
from kilter.net.data_description import DataDescription
from kilter.net.frames import pack_letter, unpack_letter
from kilter.net.messages import Order
from kilter.net.terms import Terms
from kilter.records import wire
from kilter.runtimes.step_names import StepName
from kilter.topology import topology


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_transport, "POLL", 0.01)
    monkeypatch.setattr(flower_transport, "LOOK", 0.05)
    monkeypatch.setattr(engine_transport, "FIRST_PAUSE", 0.05)


@pytest.fixture
def place(tmp_path: Path) -> Callable[..., Place]:
    return lambda sites=("a", "b", "c"), **experiment: Place(tmp_path / "place", experiment, sites)


def lead(here: Place, grid: FakeGrid, **settings: Any) -> Path:
    """The run folder of this experiment, led through the fake grid."""
    folder = here.folder / "run"
    plain = {"experiment": here.folder / "experiment.toml", "sites": ",".join(here.sites), "out": folder, **settings}
    made = RunSettings.read(plain).server_run()
    try:
        made.run(FlowerTransport(grid, envelope, made.sites, made.deadline), "server", Console(file=StringIO()))
    finally:
        made.store.close()
    return folder


def test_a_blind_relay_through_an_engine_gives_the_numbers_of_the_simulation(place: Callable[..., Place]) -> None:
    here = place(sites=("a", "b", "c", "d"), method="fedavg", topology="ring", rounds=1)
    real = lead(here, FakeGrid(here, tls=True))
    simulated = simulate(here, bench=None)
    assert booked(real, relayed=True) == booked(simulated, relayed=True)
    assert told(real) == told(simulated)


def test_what_errs_or_restarts_goes_on_and_the_numbers_stay(
    place: Callable[..., Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies get lost after the step was carried out, and the run is started again after a round: nothing is done twice."""
    here = place(method="scaffold")

    def meddle(name: str, count: int, reply: Any) -> Any:
        if name == "a" and count == 2:
            return Thing(metadata=reply.metadata, has_error=lambda: True, error=Thing(code=0))
        if name == "b" and count == 2:
            grid.since["b"] = "tuesday"
            return None
        return reply

    def interrupt(progress: Any, record: dict[str, Any]) -> None:
        if record.round == 1:
            raise KeyboardInterrupt

    grid = FakeGrid(here, meddle=meddle)
    with monkeypatch.context() as patched:
        patched.setattr(server_run.Progress, "see", interrupt)
        with pytest.raises(KeyboardInterrupt):
            lead(here, grid)
    real = lead(here, grid)
    simulated = simulate(here)
    assert booked(real) == booked(simulated)
    assert told(real) == told(simulated)
    assert grid.calls["a"] == grid.calls["b"] == grid.calls["c"] + 2  # a second hello, and the order again


def test_only_the_engine_says_who_is_who(place: Callable[..., Place]) -> None:
    """A reply under another's node, and a node that calls itself by another's name, do not count."""
    here = place(method="fedavg", rounds=1)

    def meddle(name: str, count: int, reply: Any) -> Any:
        if name == "a" and count > 1:
            reply.metadata.src_node_id = 101
        return reply

    grid = FakeGrid(here, meddle=meddle)
    grid.settings["b"]["name"] = "a"
    real = lead(here, grid, quorum=1, deadline=2, grace=0.5)
    last = json.loads((real / "rounds.jsonl").read_text().splitlines()[-1])
    assert last["participants"] == ["c"]
    assert {f["node"] for f in last["failures"]} == {"a", "b"}


def test_a_site_that_does_not_agree_is_left_out_with_its_reason(
    place: Callable[..., Place], caplog: pytest.LogCaptureFixture
) -> None:
    here = place(method="fedavg", rounds=1)
    grid = FakeGrid(here)
    grid.settings["b"]["allow-methods"] = "scaffold"
    with caplog.at_level("WARNING", "kilter.net"):
        real = lead(here, grid, quorum=2, deadline=2, grace=0.5)
    assert json.loads((real / "rounds.jsonl").read_text().splitlines()[-1])["participants"] == ["a", "c"]
    assert any("b: it does not agree to the terms" in r.message and "scaffold" in r.message for r in caplog.records)


def test_an_order_whose_letters_nobody_vouches_for_is_refused(place: Callable[..., Place]) -> None:
    here = place(method="fedavg", topology="full")
    site = make_site(
        {"data": here.folder / "a.npz", "state-dir": here.folder / "state", "policy": here.folder / "site.toml"}, "a"
    )
    run, experiment = "0" * 32, Experiment.of(here.experiment)
    order = Order(run, "1" * 32, 1, 1, 1, StepName.spread("train"))
    graph = topology("full", here.sites, 0)
    terms = Terms.write(run, "1" * 32, experiment, DataDescription.of(site.dataset), graph, "a")
    head, _ = unpack_letter(answer_letter(site, pack_letter({**order.head(), "terms": terms.head()})))
    assert head["kind"] == "refusal"
    assert "vouches" in head["why"]


def test_what_goes_wrong_at_a_site_stays_there(place: Callable[..., Place]) -> None:
    here = place(method="fedavg")
    site = make_site(
        {"data": here.folder / "a.npz", "state-dir": here.folder / "state", "policy": here.folder / "site.toml"}, "a"
    )
    for letter in (
        b"",
        b"\0" * 100,
        pack_letter({"kind": "order"}),
        pack_letter({"kind": "order", "terms": {}}),
        b"\xff" * 40,
    ):
        head, body = unpack_letter(answer_letter(site, letter))
        assert (head["kind"], body) == ("refusal", b"")
        assert str(here.folder) not in head["why"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"data": "x.npz"}, "state-dir"),
        ({"datas": "x.npz"}, "Unknown setting of a site"),
        ({"data": "{here}/a.npz", "state-dir": "{here}/s", "tls": "{here}/certs/b"}, "the certificate's name is 'b'"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    settings: dict[str, str], says: str, place: Callable[..., Place]
) -> None:
    here = place(method="fedavg")
    with pytest.raises(Mistake, match=says):
        make_site({k: v.format(here=here.folder) for k, v in settings.items()}, "a")


def test_a_run_must_say_who_takes_part() -> None:
    with pytest.raises(Mistake, match="must name sites"):
        RunSettings.read({"experiment": "experiment.toml"})


def test_a_letter_in_one_piece_is_whole_or_refused() -> None:
    letter = pack_letter({"kind": "reply", "round": 3}, b"abc")
    assert unpack_letter(letter) == ({"kind": "reply", "round": 3}, b"abc")
    for bad in (letter[:-1], letter + b"x", letter[:10], b"\xff" * 8):
        with pytest.raises(wire.Malformed):
            unpack_letter(bad)
    with pytest.raises(wire.Malformed, match="limit is 2"):
        unpack_letter(letter, largest=2)


def test_a_call_that_brings_no_answer_is_made_again(
    place: Callable[..., Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine with remote calls: one fails, one brings nonsense, the next finds the site here."""
    monkeypatch.setattr(nvflare_transport, "LOOK", 0.02)
    here = place(method="fedavg")
    site = make_site(
        {"data": here.folder / "a.npz", "state-dir": here.folder / "state", "policy": here.folder / "site.toml"}, "a"
    )
    tries: list[bytes] = []

    def call(name: str, letter: bytes) -> Any:
        tries.append(letter)
        if len(tries) == 1:
            raise TimeoutError
        return "hello" if len(tries) == 2 else answer_letter(site, letter)

    desk = nvflare_transport.CallTransport(call, ["a"])
    with desk.changed:
        assert desk.changed.wait_for(lambda: "a" in desk.sites, 20)
    assert len(set(tries)) == 3  # no letter is like another, so its number cannot be guessed
    desk.close()
