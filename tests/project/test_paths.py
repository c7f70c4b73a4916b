"""docs/architecture.md lists the files to read to follow a round, in order; here the lists are compared with a trace.

Every file on a list is used. Every other file that is used is a helper: it calls no file on the list but the vocabulary
(`core.py`) and the run folder.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tracing
from place import Place
from tracing import Calls, recorded

from kilter.commands.study import run_study
from kilter.experiment import Experiment
from kilter.records.run_folder import Store
from kilter.study.grid import Study

PAGE = (Path(__file__).parents[2] / "docs/architecture.md").read_text()
MOST = 12  # files


def listed(name: str) -> list[str]:
    """The files of a list on the page."""
    (text,) = re.findall(rf"<!-- path: {name} -->\n(.*?)<!-- end of path -->", PAGE, re.DOTALL)
    return re.findall(r"^\d+\. `([\w/]+\.py)`", text, re.MULTILINE)


def compare(calls: Calls, path: list[str]) -> None:
    assert set(path) <= set(calls), f"listed but not used: {sorted(set(path) - set(calls))}"
    # What a network (models/) or accelerated code (fast/) calls is the method's loss: the path itself. cli.py starts it.
    for file, called in calls.items():
        if file not in path and not file.startswith(("models/", "fast/", "cli.py")):
            upward = (called & set(path)) - {"core.py", "records/run_folder.py"}
            assert not upward, f"{file} is not on the list, but calls {sorted(upward)}"


@pytest.mark.parametrize("name", ["simulated", "server", "site", "study"])
def test_the_list_is_short(name: str) -> None:
    assert 0 < len(listed(name)) <= MOST


def test_a_simulated_round(tmp_path: Path) -> None:
    experiment = Experiment.of({"method": "fedavg", "model": "linear", "rounds": 2, "clients": 4, "plain": True})
    with recorded() as calls:
        method, fed = experiment.build(workers=1)
        calls.clear()  # only the run itself
        with fed:
            experiment.run(method, fed, Store(tmp_path))
    compare(calls, listed("simulated"))


def test_a_study(tmp_path: Path) -> None:
    runs = {"data": "digits", "clients": 3, "model": "linear", "rounds": 1}
    values = {"name": "tiny", "methods": ["fedavg", "solo"], "seeds": 1, "experiment": runs}
    with recorded() as calls:
        run_study(Study.of(values), tmp_path / "study", "1")
    compare(calls, listed("study"))


def test_a_deployed_round(tmp_path: Path) -> None:
    here = Place(tmp_path / "place", {"method": "fedavg"})
    try:
        traces = {name: tmp_path / f"{name}.json" for name in ("server", "a")}
        processes = [
            here.serve(KILTER_TEST_TRACE=str(traces["server"])),
            here.join("a", KILTER_TEST_TRACE=str(traces["a"])),
        ]
        processes += [here.join(site) for site in here.sites[1:]]
        for process in processes:
            process.wait()
    finally:
        here.end()
    compare(tracing.read(traces["server"]), listed("server"))
    compare(tracing.read(traces["a"]), listed("site"))
