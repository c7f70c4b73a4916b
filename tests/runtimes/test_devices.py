"""Devices by name, and what a run records of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kilter.errors import Mistake
from kilter.experiment import Experiment
from kilter.federate import federate
from kilter.runtimes.devices import parse, repeatable


@pytest.fixture
def flags() -> Iterator[None]:
    """Gives torch its settings back."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic
    mode, fills = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    yield
    matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic = before
    torch.set_deterministic_debug_mode(mode)
    torch.utils.deterministic.fill_uninitialized_memory = fills


@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_is_used_only_on_request(flags: None, monkeypatch: pytest.MonkeyPatch, tf32: bool) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not tf32
    with repeatable(torch.device("cuda", 0), "tf32" if tf32 else "fp32"):
        pass
    assert torch.backends.cuda.matmul.allow_tf32 is tf32
    assert torch.backends.cudnn.allow_tf32 is tf32
    assert torch.backends.cudnn.deterministic
    assert torch.are_deterministic_algorithms_enabled()


def test_tf32_is_refused_without_cuda() -> None:
    with pytest.raises(Mistake, match="tf32 needs a cuda device, and this run is on cpu"):
        Experiment.of({"data": "digits", "precision": "tf32"}).build(workers=1)


def test_names_of_devices() -> None:
    assert parse("cpu") == (torch.device("cpu"),)
    for word, reason in {"gpu": "is not a device", "cuda:99": "cuda", "cpu,cuda": "cuda"}.items():
        with pytest.raises(Mistake, match=reason):
            parse(word)


@pytest.mark.parametrize(("options", "width"), [({}, 5), ({"model": "mlp"}, 25), ({"plain": True}, 1)])
def test_the_summary_records_how_many_clients_train_together(options: dict[str, object], width: int) -> None:
    experiment = Experiment.of({"data": "digits", "model": "cnn:4", "clients": 3, "rounds": 1, **options})
    method, fed = experiment.build(workers=1)
    with fed:
        assert federate(method, fed, 1).summary.stack_width == width
