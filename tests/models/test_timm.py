"""Networks of timm as bodies. timm needs a torchvision that fits torch, so most tests have a stand-in for it."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from kilter.errors import Mistake
from kilter.experiment import Experiment
from kilter.inference.model_folder import load_model
from kilter.models import build
from kilter.records.run_folder import Store


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls of `timm.create_model`, which here creates one small network and knows no other."""
    made: list[dict[str, Any]] = []

    def create_model(name: str, **arguments: Any) -> nn.Module:
        made.append({"name": name, **arguments})
        if name != "tiny":
            raise RuntimeError(f"Unknown model ({name})")
        return nn.Sequential(nn.Conv2d(arguments["in_chans"], 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())

    library = ModuleType("timm")
    library.create_model = create_model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", library)
    return made


def test_it_is_a_body_with_a_new_head(calls: list[dict[str, Any]]) -> None:
    net = build("timm:tiny", (3, 32, 32), 5)
    assert net(torch.rand(2, 3, 32, 32)).shape == (2, 5)
    assert net.get_submodule("head").weight.shape == (5, 16)
    build("timm:tiny:pretrained", (1, 8, 8), 2)
    assert [call["pretrained"] for call in calls] == [False, True]
    assert [(call["in_chans"], call["num_classes"]) for call in calls] == [(3, 0), (1, 0)]


def test_it_trains_and_predicts(calls: list[dict[str, Any]], tmp_path: Path) -> None:
    experiment = Experiment.of({"model": "timm:tiny", "clients": 3, "rows": 200, "partition": "iid", "rounds": 1})
    method, fed = experiment.build()
    with fed:
        experiment.run(method, fed, Store(tmp_path))
    assert load_model(tmp_path).outputs(torch.rand(4, 1, 8, 8)).shape == (4, 10)


@pytest.mark.parametrize(
    ("spec", "shape", "says"),
    [
        ("timm:unheard", (3, 32, 32), r"The model 'timm:unheard' cannot be loaded \(Unknown model"),
        ("timm:tiny:best", (3, 32, 32), "Write timm:tiny or timm:tiny:pretrained"),
        ("timm:tiny", (13,), "timm:tiny needs images"),
        ("timm:tiny", (3, 1, 1), "cannot read rows of shape"),
    ],
)
def test_what_does_not_fit_is_one_sentence(
    calls: list[dict[str, Any]], spec: str, shape: tuple[int, ...], says: str
) -> None:
    with pytest.raises(Mistake, match=says) as error:
        build(spec, shape, 5)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'timm'"),
        ModuleNotFoundError("No module named 'torchvision'"),
        RuntimeError("operator torchvision::nms does not exist\nand more"),
        OSError("libcudart.so.12: cannot open shared object file"),
    ],
)
def test_without_the_libraries_one_sentence_says_so(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def fail(name: str, *rest: Any, **more: Any) -> ModuleType:
        if name == "timm":
            raise error
        return load(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(Mistake, match="need the libraries timm and torchvision, which must fit torch") as mistake:
        build("timm:resnet10t", (3, 32, 32), 5)
    assert str(error).splitlines()[0] in str(mistake.value)
    assert "\n" not in str(mistake.value)


def test_the_real_library_is_a_body() -> None:
    try:
        import timm  # noqa: F401
    except (ModuleNotFoundError, RuntimeError, OSError) as error:
        pytest.skip(f"timm cannot be imported here: {error}")
    assert build("timm:resnet10t", (3, 32, 32), 5)(torch.rand(2, 3, 32, 32)).shape == (2, 5)
