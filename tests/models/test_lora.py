"""Frozen weights never travel, and low-rank adapters train a small part of a network."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from kilter.errors import Mistake
from kilter.experiment import Experiment
from kilter.inference.model_folder import load_model
from kilter.models import build
from kilter.models.lora import add_adapters, parse_lora
from kilter.records.run_folder import Store, read_summary
from kilter.tasks import Task

FROZEN_BODY = """
from torch import nn
from kilter.models import build

def Net(shape, classes):
    net = build("mlp:32", shape, classes)
    net.body.requires_grad_(False)
    return net
"""


def run(folder: Path, **fields: object) -> Path:
    settings = {"clients": 3, "rounds": 2, "rows": 300, "partition": "iid", "local": {"lr": 0.3}, **fields}
    experiment = Experiment.of(settings)
    method, fed = experiment.build()
    with fed:
        experiment.run(method, fed, Store(folder))
    return folder


def test_frozen_weights_are_neither_sent_nor_stored_with_a_model(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(FROZEN_BODY)
    small = run(tmp_path / "small", model=f"{tmp_path}/net.py:Net")
    whole = run(tmp_path / "whole", model="mlp:32")
    sent, all_sent = (read_summary(folder).bytes_up for folder in (small, whole))
    assert sent < 0.4 * all_sent
    model = load_model(small)
    assert set(model.params) == {"head.weight", "head.bias"}
    assert (small / "frozen.safetensors").exists()
    before = model.outputs(torch.ones(2, 1, 8, 8))
    (small / "frozen.safetensors").unlink()
    with pytest.raises(Mistake, match="--weights"):
        load_model(small)
    assert before.shape == (2, 10)


def test_frozen_weights_have_a_digest() -> None:
    def half(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        net = build("mlp:8", (4,), 2)
        net.body.requires_grad_(False)
        return net

    one, same, other = Task(half(0)), Task(half(0)), Task(half(1))
    assert one.frozen_digest() == same.frozen_digest() != other.frozen_digest()
    assert Task(build("mlp:8", (4,), 2)).frozen_digest() == ""
    other.set_frozen(one.frozen_weights())
    assert one.frozen_digest() == other.frozen_digest()
    x = torch.randn(3, 4)
    assert torch.equal(one.outputs(one.init(0), x), other.outputs(one.init(0), x))
    with pytest.raises(Mistake, match="another network"):
        other.set_frozen({})


def test_specs_of_adapters() -> None:
    assert parse_lora("") is None
    assert parse_lora("targets=query") is not None
    for wrong, says in (("r=8", "targets="), ("r=0,targets=q", "whole number"), ("rank=1,targets=q", "r=8")):
        with pytest.raises(Mistake, match=says):
            parse_lora(wrong)


def test_without_the_library_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(Mistake, match="peft"):
        add_adapters(build("mlp:8", (4,), 2), "targets=0")


@pytest.mark.slow
def test_adapters_of_a_transformer_travel_for_less_than_two_percent(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    rows = [f"{'abc'[k % 3]},{['good fine', 'bad poor'][k % 2]} film,{'yn'[k % 2]}" for k in range(90)]
    (tmp_path / "reviews.csv").write_text("client,review,label\n" + "\n".join(rows) + "\n")
    fields = {"data": str(tmp_path / "reviews.csv"), "task": "text", "text": "review", "partition": "natural"}
    fields |= {"clients": 0, "rows": 0, "model": "transformer:64:2", "rounds": 3}
    fields |= {"optimiser": "adam", "local": {"lr": 0.02, "epochs": 5}}
    whole = read_summary(run(tmp_path / "whole", **fields))
    folder = run(tmp_path / "lora", **fields, lora="r=2,targets=query+value")
    adapted = read_summary(folder)
    statistics = 2000  # bytes before the first round, the same in both
    assert adapted.bytes_up < 0.02 * whole.bytes_up + statistics
    assert adapted.global_accuracy is not None
    assert adapted.global_accuracy > 0.9
    model = load_model(folder)
    assert any("lora_A" in name for name in model.params)
    assert not any(name.endswith("base_layer.weight") for name in model.params)


@pytest.mark.slow
def test_layers_that_do_not_exist_are_named() -> None:
    pytest.importorskip("peft")
    for targets in ("nothing", "query+nothing"):
        with pytest.raises(Mistake, match=r"no linear layer 'nothing': --lora can adapt .* query"):
            add_adapters(build("transformer:16:1:2", (8,), 2), f"targets={targets}")
