"""What may be submitted: no paths, no code, and only data that the hub has."""

from __future__ import annotations

import pytest

from kilter.errors import Mistake
from kilter.hub.admission import Admitted, admit

EXPERIMENT = 'method = "fedavg"\ndata = "digits"\nmodel = "mlp:8"\nrounds = 7\n'
STUDY = 'name = "ours"\nmethods = ["fedavg", "fedprox"]\nseeds = 2\n[experiment]\ndata = "digits"\nmodel = "mlp:8"\n'


def test_experiments_and_studies_are_told_apart() -> None:
    assert admit(EXPERIMENT, "", "", ["digits"]) == Admitted("experiment", "fedavg", 7, "digits")
    assert admit(STUDY, "", "", ["digits"]) == Admitted("study", "ours", 0, "digits")
    assert Admitted.read(admit(STUDY, "", "none", []).text()) == Admitted("study", "ours", 0, "none")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (EXPERIMENT.replace("fedavg", "evil.py:Evil"), "runs no submitted code"),
        (EXPERIMENT.replace("mlp:8", "/tmp/net.py:Net"), "runs no submitted code"),
        (STUDY.replace('"fedprox"', '{ method = "evil.py:Evil" }'), "runs no submitted code"),
        (EXPERIMENT + 'weights = "/etc/passwd"\n', "weights names a file"),
        (EXPERIMENT + 'public_file = "rows.npz"\n', "public_file names a file"),
        (EXPERIMENT + 'topology = "edges:/etc/passwd"\n', "choose another topology"),
        (EXPERIMENT.replace("digits", "/etc/passwd"), "--data none"),
        (EXPERIMENT.replace("fedavg", "fedavgg"), "did you mean 'fedavg'"),
        (EXPERIMENT + "rounds = ", "not TOML"),
        (EXPERIMENT + "speed = 3\n", "Unknown"),
    ],
)
def test_what_the_hub_does_not_accept(text: str, message: str) -> None:
    with pytest.raises(Mistake, match=message):
        admit(text, "", "", ["digits"])


def test_a_hub_without_data_says_so() -> None:
    with pytest.raises(Mistake, match="no data of its own"):
        admit(EXPERIMENT, "", "", [])
