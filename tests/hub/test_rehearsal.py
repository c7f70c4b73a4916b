"""A rehearsal of everything: a hub, three agents, experiments, a study, kills, a renewed and a revoked certificate."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable

import pytest
import tomli_w
from hub_place import EXPERIMENT, HubPlace, enrol
from test_hub import same_as_simulated

from kilter.net.revocation import revoke

STRICT = """
approval = "policy"
methods = ["fedavg"]
sends = ["model", "counts"]
lr = { at_least = 0.0, at_most = 0.2 }
rounds = { at_least = 1, at_most = 1000 }
evaluation = ["test", "valid", "own_test", "own_valid", "own_bench", "local", "common"]
"""
STUDY = {"methods": ["fedavg", "fedprox"], "seeds": [3], "name": "rehearsal"}
STUDY |= {"experiment": {k: v for k, v in EXPERIMENT.items() if k not in ("method", "seed")}}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_everything_ends_as_it_should(hub_place: Callable[..., HubPlace]) -> None:
    here = hub_place("a", "b", "c")
    list_of_revoked = revoke(enrol(here.folder, "spare", "site") / "cert.pem", here.folder / "authority")
    here.start_hub(revoked=str(list_of_revoked), parallel=3)
    for site in ("a", "b"):
        here.start_agent(site, parallel=3)
    here.start_agent("c", STRICT, parallel=3)

    experiment = here.submit()
    in_turn = here.submit(tomli_w.dumps({**EXPERIMENT, "topology": "rotating", "rounds": 3}), data="none")
    study = here.submit(tomli_w.dumps(STUDY), sites=["a", "b"])
    refused = here.submit(tomli_w.dumps({**EXPERIMENT, "method": "scaffold"}))
    choice = random.Random(7)
    killed = []
    for _ in range(3):
        time.sleep(choice.uniform(2.0, 6.0))
        killed.append(choice.choice(["hub", *here.sites]))
        here.kill_and_restart(killed[-1])
    here.until(experiment, "finished", seconds=200)
    assert same_as_simulated(here, here.run_folder(experiment)), killed
    here.until(in_turn, "finished", seconds=200)
    assert here.results(here.run_folder(in_turn))["rounds"] == 3
    assert "c does not take part" in here.until(refused, "failed", seconds=200).reason

    long = here.submit(tomli_w.dumps({**EXPERIMENT, "rounds": 500}), quorum=2)
    here.until(long, "running", seconds=200)
    enrol(here.folder, "a", "site", days=200)  # renewed
    here.kill_and_restart("hub")
    here.agents["a"].until("the certificate of a was renewed")
    end = time.monotonic() + 120
    while here.view(long).rounds < 2 and time.monotonic() < end:
        time.sleep(0.2)
    revoke(here.folder / "c/cert.pem", here.folder / "authority")
    here.agents["c"].until("its certificate was revoked")
    here.until(long, "finished", seconds=240)
    here.until(study, "finished", seconds=200)
    rounds = [json.loads(line) for line in (here.run_folder(long) / "rounds.jsonl").read_text().splitlines()]
    assert (len(rounds), rounds[-1]["participants"]) == (501, ["a", "b"])
    assert "c" in rounds[2]["participants"]
    table = (here.folder / f"hub-state/jobs/{study}/study/table.md").read_text()
    assert "fedprox" in table
