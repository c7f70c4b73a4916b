"""One switch turns all accelerated code off, and nothing breaks where it is missing or fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import kilter.fast
from kilter import SGD, Simulation, Task, federate
from kilter.fast import foreach, stack, switch
from kilter.fast.fits import run
from kilter.methods.fedavg import FedAvg
from kilter.models import build
from small import bench, near, skewed

ACCELERATED = {"stack.py", "tape.py", "winograd.py", "layers.py"}
FAST = str(Path(kilter.fast.__file__).parent)


def net() -> torch.nn.Module:
    return build("cnn:4", (1, 8, 8), 10)


def simulate(**options: Any) -> Any:
    method = FedAvg(task=Task(net), local=SGD(lr=0.05, batch=16))
    with Simulation(skewed(4), bench=bench(), **options) as fed:
        return federate(method, fed, rounds=1)


def files_used(**options: Any) -> set[str]:
    used: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(FAST) and frame.f_code.co_name != "<module>":
            used.add(Path(path).name)

    sys.setprofile(note)
    try:
        simulate(**options)
    finally:
        sys.setprofile(None)
    return used


def test_plain_uses_no_accelerated_code() -> None:
    assert not files_used(plain=True) & ACCELERATED
    assert {"stack.py", "tape.py", "layers.py"} <= files_used()


def test_plain_gives_the_same_model_up_to_rounding() -> None:
    assert near(simulate(plain=True).model, simulate().model, 1e-4)


def test_an_unexpected_error_falls_back_and_names_the_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> None:
        raise KeyError("conv9")

    monkeypatch.setattr(stack, "_train", broken)
    with pytest.raises(KeyError):  # in tests
        simulate()
    monkeypatch.setattr(stack, "strict", False)
    switch.forget_reports()
    result = simulate()
    assert near(result.model, simulate(plain=True).model, 1e-4)
    (warning,) = [r.message for r in caplog.records if "cannot be stacked" in r.message]
    assert "KeyError: 'conv9'" in warning


def test_threads_are_given_back() -> None:
    torch.set_num_threads(2)
    try:
        simulate()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


WITHOUT = """
import sys, torch
{hide}
import kilter
from kilter import SGD, Simulation, Task, federate
from kilter.data import load, split
from kilter.methods.fedavg import FedAvg
clients = split(load("digits"), "iid", clients=3, seed=0)
task = Task(lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)))
with Simulation(clients.clients, bench=clients.test) as fed:
    federate(FedAvg(task=task, local=SGD(lr=0.1, momentum=0.9)), fed, rounds=1)
    federate(FedAvg(task=task, local=kilter.Adam(weight_decay=0.1, clip=1.0)), fed, rounds=1)
print("done")
"""


@pytest.mark.parametrize(
    "hide",
    [
        "import torch._functorch.utils as u; del u.enable_single_level_autograd_function",
        "sys.modules['torch.utils._python_dispatch'] = None",
        "import torch.autograd.function as f; del f._SingleLevelFunction",
    ],
)
def test_a_missing_private_name_of_torch_is_a_warning(hide: str) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT.format(hide=hide)], capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr
    assert done.stderr.count("Clients train one by one") == 1


def test_foreach_works_without_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["add", "add_", "mul_", "lerp_", "div_", "addcmul_", "addcdiv_", "sqrt", "norm", "copy_"]
    with monkeypatch.context() as hidden:
        for name in names:
            hidden.delattr(torch, f"_foreach_{name}")
        loops = {name: foreach._operation(name) for name in names}
    others: dict[str, tuple[Any, ...]] = {
        "add": ([torch.ones(2), torch.ones(3)],), "add_": (0.5,), "mul_": (2.0,), "div_": (3.0,), "sqrt": (), "norm": (),
        "lerp_": ([torch.ones(2), torch.ones(3)], 0.1), "copy_": ([torch.ones(2), torch.ones(3)],),
        "addcmul_": ([torch.ones(2), torch.ones(3)], [torch.ones(2), torch.ones(3)], 0.3),
        "addcdiv_": ([torch.ones(2), torch.ones(3)], [torch.ones(2) * 7, torch.ones(3)], 0.3),
    }  # fmt: skip
    for name in names:
        mine, theirs = ([torch.arange(2.0), torch.arange(3.0)] for _ in range(2))
        loop, together = loops[name](mine, *others[name]), getattr(torch, f"_foreach_{name}")(theirs, *others[name])
        for a, b in zip(loop or mine, together or theirs, strict=True):
            assert torch.equal(a, b)


def test_one_client_is_never_stacked() -> None:
    assert run([]) == []
