"""What the README shows works: its Python example is run, its commands exist, its files are there."""

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kilter.cli import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_example_runs(capsys):
    (example,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "federate(" in block]
    exec(compile(example, "README.md", "exec"), {})
    accuracy, sent = capsys.readouterr().out.split()
    assert float(accuracy) > 0.9
    assert int(sent) > 0


def test_the_readme_is_a_landing_page():
    assert len(README.splitlines()) <= 150


def test_the_method_shown_is_the_method_that_runs():
    (shown,) = [
        block for block in re.findall(r"```python[^\n]*\n(.*?)```", README, re.DOTALL) if "class FedProx" in block
    ]
    source = (ROOT / "src/kilter/methods/fedprox.py").read_text()
    for line in shown.splitlines():
        if "def " not in line and line.strip():
            assert line in source, line


@pytest.mark.parametrize("command", sorted(set(re.findall(r"^kilter ([a-z]+)", README, re.MULTILINE))))
def test_commands_exist(command):
    assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0


def test_the_example_method_runs_and_without_momentum_is_fedavg():
    from kilter import federate
    from kilter.experiment import Experiment

    common = {"rows": 300, "clients": 3, "model": "linear", "rounds": 3}
    mine = f"{ROOT / 'examples/fedavgm.py'}:FedAvgM"

    def model(**fields):
        made, fed = Experiment.of({**common, **fields}).build()
        return federate(made, fed, 3).model

    plain, still, moving = (
        model(),
        model(method=mine, settings={"beta": 0.0}),
        model(method=mine, settings={"beta": 0.5}),
    )
    assert all(torch.allclose(plain[k], still[k], atol=1e-6) for k in plain)
    assert not all(torch.allclose(plain[k], moving[k], atol=1e-4) for k in plain)
