"""Devices, tested on one that exists only in Python: it computes on the CPU and refuses to mix devices, as a GPU would.

Results equal the CPU's bit for bit. A stack on the CPU is computed by the same rules for that comparison (no special kernels).
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mock_device
from kilter import SGD, Adam, Data, Rows, Simulation, Task, federate
from kilter.errors import Mistake
from kilter.fast import placement, stack, switch
from kilter.fast.fits import run
from kilter.methods import methods
from kilter.models import build
from kilter.runtimes import devices
from kilter.trees import leaves
from small import bench, federation, method, mlp_task, near, normed_task, public, same, skewed, topologies

mock_device.register()
MOCK = torch.device("mock", 0)


@pytest.fixture
def _same_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernels and tapes that only the CPU has: then a stack takes the same operations on both devices."""
    monkeypatch.setattr(switch, "cpu_kernels", lambda: False)
    monkeypatch.setattr(switch, "cpu_layout", lambda: False)


@pytest.fixture(autouse=True)
def _known_device(monkeypatch: pytest.MonkeyPatch) -> None:
    real = devices.parse
    monkeypatch.setattr(devices, "parse", lambda spec: (MOCK,) if spec == "mock" else real(spec))


def outcome(name: str, task: Task, device: str, **options: Any) -> list[Any]:
    with federation(topology=topologies(name)[0], device=device, **options) as fed:
        result = federate(method(name, task), fed, rounds=2)
        return [result.state, fed.states, result.rounds[-1].loss, result.clients]


def on_cpu(tree: Any) -> bool:
    return all(leaf.device.type == "cpu" for _, leaf in leaves(tree) if isinstance(leaf, Tensor))


@pytest.mark.usefixtures("_same_rules")
@pytest.mark.parametrize("stack", [True, False])
@pytest.mark.parametrize("name", sorted(methods()))
def test_every_method_gives_the_results_of_the_cpu(name: str, stack: bool, caplog: pytest.LogCaptureFixture) -> None:
    switch.forget_reports()
    there, here = (outcome(name, normed_task(), device, stack=stack) for device in ("mock", "cpu"))
    assert same(there[:2], here[:2])
    assert there[2:] == here[2:]
    assert on_cpu(there[:2])
    assert "cannot be stacked" not in caplog.text


@pytest.mark.usefixtures("_same_rules")
@pytest.mark.parametrize("plan", [SGD(lr=0.1, momentum=0.9, weight_decay=0.1, clip=1.0), Adam(batch=8, epochs=2)])
@pytest.mark.parametrize("model", ["cnn:4", "linear"])
def test_networks_and_optimisers(model: str, plan: Any) -> None:
    from kilter.methods.fedavg import FedAvg

    def trained(device: str) -> Any:
        fedavg = FedAvg(task=Task(lambda: build(model, (1, 8, 8), 10)), local=plan)
        with Simulation(skewed(4), bench=bench(), device=device) as fed:
            return federate(fedavg, fed, rounds=1).state

    assert same(trained("mock"), trained("cpu"))


class Noisy(nn.Module):
    """Draws random numbers, and has a buffer that is not a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.3))
        self.head = nn.Linear(8, 10)
        self.register_buffer("offset", torch.full((8,), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x) + self.offset
        return self.head(h + 0.1 * torch.randn_like(h))


@pytest.mark.usefixtures("_same_rules")
@pytest.mark.parametrize("stack", [True, False])
def test_random_numbers_are_the_same_on_every_device(stack: bool) -> None:
    there, here = (outcome("fedavg", Task(Noisy), device, stack=stack) for device in ("mock", "cpu"))
    assert same(there[0], here[0])


def test_a_device_in_the_wrong_place_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mock device notices if one copy to the device is forgotten."""
    monkeypatch.setattr(placement, "place", lambda fit: fit)
    with pytest.raises(RuntimeError, match="mixes the devices"):
        outcome("fedavg", mlp_task(), "mock", stack=False)


def test_no_copy_to_the_host_within_a_stacked_epoch() -> None:
    def copies(epochs: int) -> int:
        mock_device.transfers.to_host = 0
        from kilter.core import Node

        task, plan = mlp_task(), SGD(lr=0.1, batch=8, epochs=epochs)
        fits = [Node(i, data).fit(lambda w, b, _: task.loss(w, b), task.init(0), plan) for i, data in skewed(4).items()]
        loss = fits[0].loss
        fits = [type(f)(loss, f.params, f.rows, f.plan, f.seed) for f in fits]
        with placement.use(MOCK):
            run(fits)
        return mock_device.transfers.to_host

    assert copies(1) == copies(5) > 0


@pytest.mark.usefixtures("_same_rules")
@pytest.mark.parametrize("stack", [True, False])
def test_rows_that_do_not_fit_are_gathered_ahead_in_another_thread(
    stack: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = outcome("fedavg", mlp_task(), "cpu", stack=stack)
    threads, pinned = set(), placement._pinned

    def gathered(gather: Any, pin: bool) -> Any:
        threads.add(threading.current_thread())
        batch = pinned(gather, pin)
        assert on_cpu(batch)
        return batch

    monkeypatch.setattr(placement, "_resident", {})  # of earlier tests with the same tables
    monkeypatch.setattr(placement, "_pinned", gathered)
    monkeypatch.setattr(placement, "free_memory", lambda device: 0.0)
    assert same(outcome("fedavg", mlp_task(), "mock", stack=stack)[0], expected[0])
    assert threads
    assert threading.main_thread() not in threads


@pytest.mark.usefixtures("_same_rules")
def test_a_stack_of_tables_that_fit_only_in_part_does_not_mix_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    from kilter.core import Node

    task, plan = mlp_task(), SGD(lr=0.1, batch=8)
    own = {i: Rows.of(x=data.train["x"], y=data.train["y"]) for i, data in skewed(4).items()}  # a table for each

    def loss(params: Any, batch: Any, _: Any) -> Tensor:
        return task.loss(params, batch)

    def fitted(device: torch.device) -> Any:
        params = task.init(0)
        nodes = [Node(i, Data(train=rows, valid=rows, test=rows)) for i, rows in own.items()]
        with placement.use(device):
            return [done.params for done in run([node.fit(loss, params, plan) for node in nodes])]

    left = iter([float("inf"), float("inf")])
    monkeypatch.setattr(placement, "free_memory", lambda device: next(left, 0.0))
    monkeypatch.setattr(stack, "strict", True)
    assert same(fitted(MOCK), fitted(placement.CPU))


def test_batches_for_cuda_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Tensor] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda t: pinned.append(t) or t)
    batch = {"x": torch.ones(2)}
    assert placement._pinned(lambda: batch, True)["x"] is batch["x"]
    assert len(pinned) == 1
    placement._pinned(lambda: batch, False)
    assert len(pinned) == 1


def test_tables_are_copied_once_and_bytes_stay_bytes() -> None:
    x = torch.randint(0, 255, (50, 1, 8, 8), dtype=torch.uint8)
    rows = Rows.of(x=x, y=torch.arange(50) % 10)
    with placement.use(MOCK):
        first, second = placement.resident(rows), placement.resident(rows.take(torch.arange(10)))
    assert first is not None
    assert second is not None
    assert first.tables["x"] is second.tables["x"]
    assert first.tables["x"].dtype == torch.uint8
    assert first.batch(slice(0, 2))["x"].dtype == torch.float32
    key = (id(x), MOCK)
    assert key in placement._resident
    del rows, first, second, x
    assert key not in placement._resident


WORKERS = """
import sys, torch, mock_device
mock_device.register()
from kilter import SGD, Simulation, federate
from kilter.fast import switch
from kilter.methods.fedavg import FedAvg
from kilter.runtimes import devices
from small import bench, mlp_task, same, skewed
devices.parse = lambda spec: (torch.device("mock", 0),) if spec == "mock" else (torch.device("cpu"),)
switch.cpu_kernels = lambda: False
states = []
for device, workers in (("mock", 2), ("mock", 3), ("cpu", 1), ("mock", 1)):
    with Simulation(skewed(6), bench=bench(), workers=workers, device=device) as fed:
        states.append(federate(FedAvg(task=mlp_task(), local=SGD(lr=0.1)), fed, rounds=2).state)
assert all(same(states[0], other) for other in states), "other bits"
print("the same bits")
"""


def test_the_number_of_workers_does_not_show() -> None:
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", WORKERS], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.stdout == "the same bits\n", done.stderr


def test_a_stack_that_does_not_fit_is_halved(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    real, sizes = stack._train, []

    def small_device(fits: Any) -> Any:
        sizes.append(len(fits))
        if len(fits) > 1:
            raise torch.OutOfMemoryError("too much")
        return real(fits)

    monkeypatch.setattr(stack, "_train", small_device)
    switch.forget_reports()
    with federation(device="cpu") as fed:
        result = federate(method("fedavg", mlp_task()), fed, rounds=2)
    assert max(sizes) > 1
    assert near(result.state, outcome("fedavg", mlp_task(), "cpu", stack=False)[0], 1e-4)
    assert "does not fit on the device" in caplog.text
    assert any("does not fit on the device: it is halved" in notice.what for notice in result.summary.notices)


def test_workers_share_the_devices() -> None:
    with federation(device="cpu") as fed:
        fed.devices = (MOCK, torch.device("mock", 1))
        taken = []
        for worker in range(4):
            fed._take_device(worker)
            taken.append(fed.device.index)
    assert taken == [0, 1, 0, 1]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stack", [True, False])
def test_low_precision_learns_nearly_the_same(precision: str, stack: bool) -> None:
    exact = outcome("fedavg", mlp_task(), "cpu", stack=stack)[0]
    rough = outcome("fedavg", mlp_task(), "cpu", stack=stack, precision=precision)[0]
    assert all(v.dtype == torch.float32 for v in rough.values())
    assert not same(exact, rough)
    assert all(torch.allclose(exact[k], rough[k], atol=0.02) for k in exact)


def test_an_overflow_is_a_zero_gradient_and_halves_the_scale() -> None:
    with placement.use(placement.CPU, torch.float16):
        scale = placement.LossScale(2)
        grads = [torch.tensor([[65536.0, 131072.0], [float("inf"), 1.0]]), torch.tensor([65536.0, 2.0])]
        scale.down_(grads)
    assert grads[0].tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert grads[1].tolist() == [1.0, 0.0]
    assert scale._scale.tolist() == [2.0**16, 2.0**15]


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("cuda", "There is no cuda device here"),
        ("cuda:7", "There is no cuda device here"),
        ("toaster", "'toaster' is not a device"),
        ("cpu,cuda", "no cuda device"),
    ],
)
def test_devices_that_are_not_there(spec: str, sentence: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(Mistake, match=sentence):
        Simulation({"a": next(iter(skewed(1).values()))}, device=spec)


def test_auto_is_the_cpu_where_there_is_nothing_better() -> None:
    if not any(devices.count(kind) for kind in devices.KINDS):
        assert devices.parse("auto") == (torch.device("cpu"),)
        assert devices.describe(devices.parse("auto")) == "cpu"


def test_a_gpu_that_is_not_used_is_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "best", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(devices, "_name", str)
    assert devices.describe((torch.device("cpu"),)) == "cpu (cuda:0 is present but unused: use --device auto)"


def test_public_rows_and_data_stay_on_the_cpu() -> None:
    rows = public()
    with federation(device="mock") as fed:
        federate(method("fedpdc", mlp_task()), fed, rounds=1)
        assert rows.index.device.type == "cpu"
        assert all(isinstance(d, Data) and d.train.index.device.type == "cpu" for d in fed.clients.values())


KILLED = """
import os, signal, sys, torch, mock_device
mock_device.register()
from kilter import federate
from kilter.fast import switch
from kilter.records.run_folder import Store
from kilter.runtimes import devices
from small import federation, method, normed_task, topologies
devices.parse = lambda spec: (torch.device("mock", 0),) if spec == "mock" else (torch.device("cpu"),)
switch.cpu_kernels = lambda: False
switch.cpu_layout = lambda: False
name, folder, last = sys.argv[1], sys.argv[2], int(sys.argv[3])

def watch(record):
    if record.round == last:
        os.kill(os.getpid(), signal.SIGKILL)

with federation(topology=topologies(name)[0], device="mock") as fed:
    federate(method(name, normed_task()), fed, rounds=3, store=Store(folder), watch=watch, checkpoint_seconds=0)
"""


@pytest.mark.usefixtures("_same_rules")
@pytest.mark.parametrize("name", ["scaffold", "feddisk", "slfed"])
def test_a_killed_run_resumes_on_the_device_as_if_nothing_had_happened(name: str, tmp_path: Path) -> None:
    from kilter.records.run_folder import Store

    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    command = [sys.executable, "-c", KILLED, name, str(tmp_path / "killed"), "2"]
    killed = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert killed.returncode == -9, killed.stderr

    def run_to_the_end(device: str, folder: Path) -> list[Any]:
        with federation(topology=topologies(name)[0], device=device) as fed:
            result = federate(method(name, normed_task()), fed, rounds=3, store=Store(folder))
            assert on_cpu([result.state, fed.states])
            return [result.state, fed.states, [r.loss for r in result.rounds]]

    resumed = run_to_the_end("mock", tmp_path / "killed")
    whole = run_to_the_end("cpu", tmp_path / "whole")
    assert same(resumed[:2], whole[:2])
    assert resumed[2] == whole[2]
    assert (tmp_path / "killed" / "model.safetensors").exists() == (tmp_path / "whole" / "model.safetensors").exists()


def test_a_site_trains_on_its_device_and_sends_what_the_cpu_would(tmp_path: Path) -> None:
    """The reply of a deployed site, as bytes on the wire."""
    from kilter.core import Node
    from kilter.records import wire
    from kilter.runtimes.step_names import StepName
    from kilter.runtimes.step_runner import resolve, run_step

    fedavg, data = method("fedavg", mlp_task()), skewed(1)["c0"]

    def reply(device: torch.device) -> bytes:
        with placement.use(device):
            (done,) = run_step(resolve(fedavg, StepName("train")), [Node("c0", data)], [mlp_task().init(0)])
        assert done.error is None
        return wire.encode(done.reply)

    with switch.plain(True):
        assert reply(MOCK) == reply(placement.CPU)


def test_predictions_are_computed_on_the_device() -> None:
    task, x = normed_task(), bench()["x"]
    expected = task.predict(task.init(0), x)
    with placement.use(MOCK):
        there = task.predict(task.init(0), x)
    assert there.device.type == "cpu"
    assert torch.equal(there, expected)
