"""Ten thousand clients, a hundred of them in a round, in less than 2 GB: all processes together, evaluation included."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, resource, sys
from kilter.experiment import Experiment
from kilter.federate import federate

workers = int(sys.argv[1])
experiment = Experiment.of(dict(
    data="mnist", clients=10_000, partition="iid", valid=0, cohort=0.01, rounds=2, model="bench-cnn", evaluate_every=2
))
method, fed = experiment.build(workers)
with fed:
    result = federate(method, fed, 2, evaluate_every=2)
own, child = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
print(json.dumps([[len(r.participants) for r in result.rounds], len(result.clients), own, child]))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("workers", [1, 2])
def test_ten_thousand_clients_fit_into_two_gigabytes(workers: int, data_dir: Path) -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT, str(workers)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    taking_part, examined, own, child = json.loads(run.stdout.splitlines()[-1])
    assert taking_part == [0, 100, 100]
    assert examined == 10_000
    kilobytes = (
        own + (workers if workers > 1 else 0) * child
    )  # shared pages are counted again and again: an upper bound
    assert kilobytes < 2_000_000
