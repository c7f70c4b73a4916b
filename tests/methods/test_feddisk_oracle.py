"""FedDisk's oracle: weights from raw data."""

from __future__ import annotations

import pytest
import torch

from kilter import Mistake, Simulation, federate
from kilter.blocks.density import ratio
from small import federation, method


@pytest.fixture
def brief(monkeypatch):
    """Judges that learn little: enough to see that the machinery turns."""
    whole = ratio.fit_until_stale

    def short(node, task, w, plan, rows, valid, fits, patience):
        return whole(node, task, w, plan, rows, valid, min(fits, 4), patience)

    monkeypatch.setattr(ratio, "fit_until_stale", short)


def weights_of(fed: Simulation) -> dict[str, torch.Tensor]:
    return {i: fed.states[i]["weight"] for i in fed.ids}


def test_weights_come_from_raw_data_which_counts_as_traffic(brief):
    with federation() as fed:
        result = federate(method("feddisk-oracle"), fed, 1)
        actual = weights_of(fed)
    assert all(float(a.mean()) == pytest.approx(1, abs=1e-5) for a in actual.values())
    raw = sum(4 * 64 * len(d.train) for d in fed.clients.values())
    assert raw < result.rounds[0].bytes_up < raw + 4 * 1000
    with federation(topology="ring") as peers, pytest.raises(Mistake, match="one aggregator"):
        federate(method("feddisk-oracle"), peers, 1)
