"""Pre-trained weights from files: our own, torchvision's, and damaged ones."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from kilter.errors import Mistake
from kilter.models import build, load_weights

SMALL = ("linear", "mlp", "cnn", "bench-cnn", "lenet", "simple-cnn")


def fresh(name: str, shape: tuple[int, ...] = (1, 28, 28), classes: int = 10, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return build(name, shape, classes)


def save(tensors: dict[str, Any], path: Path) -> Path:
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path)
    return path


@pytest.mark.parametrize("file", ["w.safetensors", "w.pt", "w.pth"])
@pytest.mark.parametrize("name", ["linear", "cnn", "simple-cnn"])
def test_weights_round_trip(name: str, file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = fresh(name, seed=1)
    if name == "cnn":
        source(torch.rand(4, 1, 28, 28))  # move the running statistics
    target = fresh(name, seed=2)
    assert load_weights(target, save(source.state_dict(), tmp_path / file)) is target
    for key, value in source.state_dict().items():
        assert torch.equal(value, target.state_dict()[key])
    assert not caplog.records


def test_flat_dicts_and_wrapped_dicts_load(tmp_path: Path) -> None:
    source = fresh("cnn", seed=1)
    buffers = {name for name, _ in source.named_buffers()}
    flat = {("~" if k in buffers else "") + k: v for k, v in source.state_dict().items() if "num_batches" not in k}
    for tensors in (save(flat, tmp_path / "a.safetensors"), save({"state_dict": flat}, tmp_path / "b.pt")):
        target: Any = load_weights(fresh("cnn", seed=2), tensors)
        assert torch.equal(target.head.weight, source.head.weight)


def test_another_number_of_classes_keeps_a_fresh_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, target = fresh("cnn", classes=10, seed=1), fresh("cnn", classes=3, seed=2)
    head = target.head.weight.clone()
    with caplog.at_level(logging.WARNING, "kilter"):
        load_weights(target, save(source.state_dict(), tmp_path / "w.safetensors"))
    assert torch.equal(target.head.weight, head)
    assert torch.equal(target.body[0].weight, source.body[0].weight)
    assert "head.weight, head.bias not loaded" in caplog.text


def torchvision_resnet18() -> dict[str, Tensor]:
    """Random tensors under torchvision's names and shapes, written out from its layout."""
    tensors: dict[str, Tensor] = {}

    def unit(conv: str, norm: str, outputs: int, inputs: int, size: int) -> None:
        tensors[f"{conv}.weight"] = torch.randn(outputs, inputs, size, size) * (2 / (inputs * size**2)) ** 0.5
        for part in ("weight", "bias", "running_mean"):
            tensors[f"{norm}.{part}"] = torch.randn(outputs) * 0.2
        tensors[f"{norm}.running_var"] = torch.rand(outputs) + 0.5
        tensors[f"{norm}.num_batches_tracked"] = torch.tensor(7)

    torch.manual_seed(5)
    unit("conv1", "bn1", 64, 3, 7)
    inputs = 64
    for layer, width in enumerate((64, 128, 256, 512), 1):
        for block in range(2):
            at = f"layer{layer}.{block}"
            unit(f"{at}.conv1", f"{at}.bn1", width, inputs, 3)
            unit(f"{at}.conv2", f"{at}.bn2", width, width, 3)
            if inputs != width:
                unit(f"{at}.downsample.0", f"{at}.downsample.1", width, inputs, 1)
            inputs = width
    return tensors | {"fc.weight": torch.randn(1000, 512) * 0.05, "fc.bias": torch.randn(1000)}


def torchvision_forward(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """What torchvision's ResNet-18 computes in eval mode, from its named tensors."""

    def unit(x: Tensor, conv: str, norm: str, stride: int) -> Tensor:
        weight = w[f"{conv}.weight"]
        x = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
        mean, var, scale, shift = (w[f"{norm}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
        return F.batch_norm(x, mean, var, scale, shift)

    x = F.max_pool2d(F.relu(unit(x, "conv1", "bn1", 2)), 3, 2, 1)
    for at in (f"layer{layer}.{block}" for layer in (1, 2, 3, 4) for block in (0, 1)):
        wide = f"{at}.downsample.0.weight" in w
        y = unit(F.relu(unit(x, f"{at}.conv1", f"{at}.bn1", 1 + wide)), f"{at}.conv2", f"{at}.bn2", 1)
        x = F.relu(y + (unit(x, f"{at}.downsample.0", f"{at}.downsample.1", 2) if wide else x))
    return F.linear(x.mean((2, 3)), w["fc.weight"], w["fc.bias"])


@torch.no_grad()
def test_torchvision_weights_load_and_compute_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = torchvision_resnet18()
    path = save(tensors, tmp_path / "resnet18.pth")
    x = torch.rand(2, 3, 128, 128)
    whole = load_weights(fresh("resnet18", (3, 224, 224), 1000), path).eval()
    assert torch.allclose(whole(x), torchvision_forward(tensors, x), atol=1e-3)
    assert not caplog.records
    for name in ("resnet18", "resnet18:bn:256"):
        caplog.clear()
        three: Any = load_weights(fresh(name, (3, 224, 224), 3), path)
        assert torch.equal(three.body.layer4[1].conv2.weight, tensors["layer4.1.conv2.weight"])
        assert three.head.out_features == 3
        assert "head.weight" in caplog.text or "projection" in caplog.text


def test_torchvision_names_of_resnet50() -> None:
    names = set(build("resnet50", (3, 224, 224), 3).state_dict())
    expected = ("layer1.0.downsample.1.running_var", "layer3.5.conv3.weight", "layer4.2.bn3.bias", "bn1.weight")
    assert {f"body.{name}" for name in expected} <= names
    assert "body.layer1.1.downsample.0.weight" not in names


def test_a_checkpoint_of_the_wrong_network(tmp_path: Path) -> None:
    tensors = fresh("cnn", seed=1).state_dict()
    path = save(tensors, tmp_path / "w.pt")
    for name, shape, says in (
        ("mlp", (1, 28, 28), "not in the network"),
        ("cnn", (3, 28, 28), "body.0.weight is 16x1x5x5 in the file and 16x3x5x5 in the network"),
    ):
        net = fresh(name, shape)
        before = {k: v.clone() for k, v in net.state_dict().items()}
        with pytest.raises(Mistake, match=says):
            load_weights(net, path)
        assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items()), "nothing is half loaded"
    part = {k: v for k, v in tensors.items() if k != "body.4.weight"}
    with pytest.raises(Mistake, match=r"body\.4\.weight not in the file"):
        load_weights(fresh("cnn"), save(part, tmp_path / "part.pt"))
    tensors["head.bias"][0] = float("nan")
    with pytest.raises(Mistake, match=r"head\.bias has NaN"):
        load_weights(fresh("cnn"), save(tensors, tmp_path / "nan.pt"))
    with pytest.raises(Mistake, match="no weights for this network"):
        load_weights(fresh("linear", classes=3), save(fresh("linear").state_dict(), tmp_path / "linear.pt"))


class Trap:
    """A pickle that would leave a trace if it were run."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("import pathlib; pathlib.Path('trap-was-run').touch()",)


def test_damaged_and_foreign_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    net = fresh("mlp")
    whole = save(net.state_dict(), tmp_path / "whole.safetensors").read_bytes()
    pickled = save(net.state_dict(), tmp_path / "whole.pt").read_bytes()
    for file, content in {
        "cut.safetensors": whole[: len(whole) // 2],
        "empty.safetensors": b"",
        "noise.safetensors": bytes(range(256)) * 4,
        "cut.pt": pickled[: len(pickled) // 2],
        "empty.pth": b"",
        "noise.pt": b"not a checkpoint at all",
    }.items():
        (tmp_path / file).write_bytes(content)
        with pytest.raises(Mistake, match="damaged or contains more than tensors"):
            load_weights(net, tmp_path / file)
    torch.save(Trap(), "trap.pt")
    torch.load("trap.pt", weights_only=False)
    Path("trap-was-run").unlink()  # so the trap works
    for foreign, says in ((Trap(), "more than tensors"), ([1, 2], "named tensors"), ({"a": 1}, "named tensors")):
        torch.save(foreign, tmp_path / "foreign.pt")
        with pytest.raises(Mistake, match=says):
            load_weights(net, tmp_path / "foreign.pt")
    assert not Path("trap-was-run").exists()
    with pytest.raises(Mistake, match="There is no file"):
        load_weights(net, tmp_path / "absent.pt")
    with pytest.raises(Mistake, match=r"give a \.safetensors"):
        load_weights(net, tmp_path / "weights.pkl")
