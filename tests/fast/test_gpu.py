"""A real accelerator agrees with the CPU within a tolerance, and with itself bit for bit. `make test-gpu` runs these tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kilter import SGD, Simulation, Task, federate
from kilter.methods.fedavg import FedAvg
from kilter.models import build
from kilter.runtimes import devices
from small import bench, federation, method, mlp_task, near, normed_task, same, skewed, topologies

DEVICE = next((kind for kind in devices.KINDS if devices.count(kind)), "")
TOLERANCE = 1e-3  # of weights after two rounds; float32 sums are taken in a different order

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not DEVICE, reason="there is no accelerator here (cuda, mps or xpu): nothing was tested"),
]


def state(name: str, device: str, **options: Any) -> Any:
    with federation(topology=topologies(name)[0], device=device, **options) as fed:
        return federate(method(name, normed_task()), fed, rounds=2).state


@pytest.mark.parametrize("stack", [True, False])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedprox"])
def test_agrees_with_the_cpu(name: str, stack: bool) -> None:
    from kilter.trees import leaves

    there, here = (
        {p: v for p, v in leaves(state(name, d, stack=stack)) if torch.is_tensor(v)} for d in (DEVICE, "cpu")
    )
    assert near(there, here, TOLERANCE)


def test_the_same_device_gives_the_same_bits() -> None:
    assert same(state("fedavg", DEVICE), state("fedavg", DEVICE))


@pytest.mark.parametrize("model", ["cnn", "resnet18"])
def test_convolutions(model: str) -> None:
    def trained(device: str) -> Any:
        fedavg = FedAvg(task=Task(lambda: build(model, (1, 8, 8), 10)), local=SGD(lr=0.01, batch=16))
        with Simulation(skewed(3), bench=bench(), device=device) as fed:
            return federate(fedavg, fed, rounds=1).state

    assert near(trained(DEVICE), trained("cpu"), 10 * TOLERANCE)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_learns(precision: str) -> None:
    with federation(device=DEVICE, precision=precision) as fed:
        result = federate(method("fedavg", mlp_task()), fed, rounds=3)
    assert result.rounds[-1].loss < result.rounds[1].loss
