"""kill -9 of hub, agents and the processes of runs, at random moments: nothing is lost, and no bit of the result differs."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
import tomli_w
from hub_place import EXPERIMENT, HubPlace
from test_hub import same_as_simulated

KILLS = 12
ROUNDS = 60


def newest_process(here: HubPlace, name: str) -> int | None:
    """The process of a run that a hub or an agent started last."""
    log = here.hub.log if name == "hub" else here.agents[name].log
    pids = re.findall(r"process (\d+)", log.read_text())
    return int(pids[-1]) if pids else None


def kill(here: HubPlace, choice: random.Random) -> str:
    """Kill the hub or an agent and start it again; or a process of a run, which its parent starts again."""
    name = choice.choice(["hub", *here.sites])
    if choice.random() < 0.5 and (pid := newest_process(here, name)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return f"process of {name}"
    here.kill_and_restart(name)
    return name


@pytest.mark.slow
@pytest.mark.hostile
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [1])
def test_no_kill_changes_a_bit(hub_place: Callable[..., HubPlace], seed: int) -> None:
    here = hub_place()
    here.place.experiment |= {"method": "scaffold", "rounds": ROUNDS}
    here.start_hub(patience=30.0)
    for site in here.sites:
        here.start_agent(site)
    experiment = {**EXPERIMENT, "method": "scaffold", "rounds": ROUNDS}
    job = here.submit(tomli_w.dumps(experiment), grace=300.0)
    choice, killed = random.Random(seed), []
    for _ in range(KILLS):
        time.sleep(choice.uniform(1.0, 9.0))
        killed.append(kill(here, choice))
        if here.run_folder(job).joinpath("summary.json").exists():
            break
    here.until(job, "finished", seconds=400)
    assert same_as_simulated(here, here.run_folder(job)), killed
    assert here.results(here.run_folder(job))["failures"] == 0
    assert len(killed) >= 5
