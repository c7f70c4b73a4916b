"""A hub with agents: runs come out of the queue as they would come out of a simulation, whatever is killed meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli_w
from hub_place import EXPERIMENT, HubPlace
from place import LENIENT
from told import simulate, told

from kilter.errors import Mistake
from kilter.hub.messages import SubmitRequest

Make = Callable[..., HubPlace]


def same_as_simulated(here: HubPlace, folder: Path) -> bool:
    simulated = simulate(here.place)
    models = [f / "model.safetensors" for f in (folder, simulated)]
    return told(folder) == told(simulated) and models[0].read_bytes() == models[1].read_bytes()


def test_a_job_survives_a_killed_hub_and_gives_the_numbers_of_the_simulation(hub_place: Make, tmp_path: Path) -> None:
    here = hub_place()
    here.start_hub()
    for site in here.sites:
        here.start_agent(site)
    job = here.submit()
    here.until(job, "running")
    here.hub.kill()
    here.restart_hub()
    here.until(job, "finished")
    assert same_as_simulated(here, here.run_folder(job))
    count = here.client("eve").fetch(job, tmp_path / "copy")
    assert count >= 8
    assert json.loads((tmp_path / "copy/summary.json").read_text()) == here.results(here.run_folder(job))
    assert not (tmp_path / "copy/checkpoint.safetensors").exists()
    assert b"round 2/2" in b"".join(here.client().logs(job, follow=True))
    (answer,) = here.client().jobs()
    assert (answer.state, answer.rounds, answer.owner) == ("finished", 2, "alice")
    check_roles(here, job)


def check_roles(here: HubPlace, job: int) -> None:
    """Submitters see their own jobs, observers all of them and change none, sites see none."""
    assert here.client("bob").jobs() == []
    for forbidden in (here.client("bob").job, here.client("bob").cancel):
        with pytest.raises(Mistake, match="no job 1 that bob may see"):
            forbidden(job)
    with pytest.raises(Mistake, match="no job 1 that bob may see"):
        list(here.client("bob").logs(job, follow=False))
    with pytest.raises(Mistake, match="Observers cannot cancel"):
        here.client("eve").cancel(job)
    with pytest.raises(Mistake, match="role submitter"):
        here.submit(by="eve")
    with pytest.raises(Mistake, match="states the role site"):
        here.client("a").jobs()
    with pytest.raises(Mistake, match="is finished already"):
        here.client().cancel(job)
    with pytest.raises(Mistake, match="'zz' is not a site of this hub"):
        here.submit(sites=["zz"])
    with pytest.raises(Mistake, match="runs no submitted code"):
        here.client().submit(SubmitRequest('method = "evil.py:Evil"\ndata = "digits"', "evil"))


@pytest.mark.slow
def test_terms_wait_for_an_approval_and_a_refusal_fails_the_job(hub_place: Make) -> None:
    here = hub_place()
    here.start_hub()
    here.start_agent("a", LENIENT.replace('"policy"', '"person"'))
    here.start_agent("b")
    job = here.submit()
    view = here.until(job, "waiting", reason="wait for an approval")
    digest = next(word for word in view.reason.split() if len(word) == 32)
    explained = (here.folder / f"state-a/pending/{digest}.txt").read_text()
    assert "fedavg" in explained
    listed = here.place.kilter("approve", "--state-dir", "state-a", name="approve").wait()
    assert f"{digest}  waits for an approval" in listed
    here.place.kilter("approve", digest, "--state-dir", "state-a", name="approve").wait()
    here.until(job, "finished")
    audit = here.place.kilter("audit", "--state-dir", f"state-a/runs/{job}", name="audit").wait()
    assert "all genuine" in audit
    refused = here.submit(tomli_w.dumps({**EXPERIMENT, "rounds": 20_000}))
    assert "rounds from 1 to 10000" in here.until(refused, "failed").reason


@pytest.mark.slow
def test_a_run_without_its_quorum_blocks_nobody(hub_place: Make) -> None:
    here = hub_place("a", "b", "c")
    here.start_hub(parallel=1)
    for site in ("a", "b"):
        here.start_agent(site, parallel=1)
    waiting = here.submit()
    job = here.submit(sites=["a", "b"])
    here.until(waiting, "waiting", reason="not connected: c")
    here.until(job, "finished")
    assert here.view(waiting).state == "waiting"
    here.start_agent("c")
    here.until(waiting, "running", "finished")
    here.agents["c"].kill()
    here.until(waiting, "waiting", "finished", reason="")
    here.restart_agent("c")
    here.until(waiting, "finished")
    assert same_as_simulated(here, here.run_folder(waiting))


@pytest.mark.slow
def test_a_job_can_be_cancelled(hub_place: Make) -> None:
    here = hub_place()
    here.start_hub()
    for site in here.sites:
        here.start_agent(site)
    job = here.submit(tomli_w.dumps({**EXPERIMENT, "rounds": 5000}))
    here.until(job, "running")
    here.hub.until("runs as process")
    assert here.client().cancel(job).state == "cancelled"
    after = here.submit()
    here.until(after, "finished")
    assert here.view(job).reason == "cancelled by alice"
