"""Rules for pooled models (robust aggregation, server optimisers) apply only where models are pooled; otherwise the run says so."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from kilter.errors import Mistake
from kilter.experiment import Experiment
from kilter.methods import methods
from kilter.records.run_folder import Store

SMALL = {"data": "digits", "rows": 200, "clients": 4, "partition": "iid", "model": "linear", "rounds": 1}
WORDS = "the method does not pool models, so a robust rule or a server optimiser had no effect"


@pytest.mark.parametrize("name", methods())
def test_a_method_says_whether_it_pools(name: str) -> None:
    kind = methods()[name]
    assert kind.pools == bool(re.search(r"\.pool\(", inspect.getsource(inspect.getmodule(kind))))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "noticed"),
    [
        ({"method": "solo", "robust": "median"}, True),
        ({"method": "solo", "server": "adam"}, True),
        ({"method": "solo"}, False),
        ({"method": "fedavg", "robust": "median"}, False),
    ],
)
def test_a_rule_without_effect_is_in_the_summary(settings: dict[str, str], noticed: bool, tmp_path: Path) -> None:
    experiment = Experiment.of({**SMALL, **settings})
    method, fed = experiment.build()
    with fed:
        result = experiment.run(method, fed, Store(tmp_path / "run"))
    assert (WORDS in [notice.what for notice in result.summary.notices]) == noticed


def test_patience_needs_validation_rows() -> None:
    with pytest.raises(Mistake, match="patience stops a run by its validation rows"):
        Experiment.of({**SMALL, "patience": 1, "valid": 0.0})
