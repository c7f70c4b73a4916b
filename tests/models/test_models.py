"""Networks by name: sizes as published, the body/head convention, weights from files, and users' own networks."""

from __future__ import annotations

import doctest
import logging
import operator
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from kilter import models
from kilter import plugins as plugin
from kilter.errors import Mistake
from kilter.models import MODELS, Network, build, load_weights
from kilter.plugins import load_object

SMALL = ("linear", "mlp", "cnn", "bench-cnn", "lenet", "simple-cnn")
SPECS = (*SMALL, "mlp:32:2", "cnn:32", "resnet18", "resnet18:gn", "resnet18:bn:256", "resnet50")
PLAIN = (nn.Conv2d, nn.Linear, nn.BatchNorm2d, nn.GroupNorm, nn.MaxPool2d, nn.AdaptiveAvgPool2d, nn.Flatten, nn.ReLU)


def fresh(name: str, shape: tuple[int, ...] = (1, 28, 28), classes: int = 10, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return build(name, shape, classes)


def count(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def norms(net: nn.Module) -> int:
    return sum(count(m) for m in net.modules() if isinstance(m, nn.BatchNorm2d))


def test_docs() -> None:
    for module in (models, plugin):
        assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("name", "shape", "classes", "bare", "full"),
    [
        ("cnn:32", (1, 32, 32), 2, 39_314, 39_442),  # X-ray
        ("cnn:128", (1, 28, 28), 62, 446_894, 447_406),  # FEMNIST
        ("cnn", (1, 28, 28), 10, 11_114, 11_178),  # MNIST
        ("cnn", (3, 28, 28), 10, 11_914, 11_978),
    ],
)
def test_feddisk_counts(name: str, shape: tuple[int, ...], classes: int, bare: int, full: int) -> None:
    net = build(name, shape, classes)
    assert (count(net) - norms(net), count(net)) == (bare, full)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "expected"),
    [
        ("simple-cnn", (3, 32, 32), 10, 92_626),
        ("simple-cnn", (3, 32, 32), 100, 115_756),
        ("simple-cnn", (1, 28, 28), 10, 75_046),
        ("lenet", (1, 28, 28), 10, 61_706),
        ("lenet", (1, 32, 32), 10, 61_706),
        ("linear", (1, 28, 28), 10, 7_850),
        ("mlp", (1, 28, 28), 10, 50_890),
        ("mlp:200:2", (784,), 10, 199_210),
        ("bench-cnn", (1, 28, 28), 10, 46_730),
        ("resnet18", (3, 224, 224), 1000, 11_689_512),
        ("resnet50", (3, 224, 224), 1000, 25_557_032),
        ("resnet18", (3, 32, 32), 10, 11_173_962),
        ("resnet18:gn", (3, 32, 32), 10, 11_173_962),
        ("resnet50", (3, 32, 32), 10, 23_520_842),
    ],
)
def test_counts(name: str, shape: tuple[int, ...], classes: int, expected: int) -> None:
    assert count(build(name, shape, classes)) == expected


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (1, 64, 64), (1, 20, 33)])
@pytest.mark.parametrize("name", [*SMALL, "resnet18", "resnet18:gn"])
def test_forward_shapes(name: str, shape: tuple[int, ...]) -> None:
    net = fresh(name, shape, 7)
    for mode in (True, False):
        assert net.train(mode)(torch.rand(2, *shape)).shape == (2, 7)


def test_large_images_and_plain_features() -> None:
    with torch.no_grad():
        large = fresh("resnet18", (3, 224, 224), 5).eval()
        assert large(torch.rand(1, 3, 224, 224)).shape == (1, 5)
        before_pool = nn.Sequential(*list(large.body)[:-2])
        assert before_pool(torch.rand(1, 3, 224, 224)).shape == (1, 512, 7, 7)
        small = fresh("resnet18", (3, 32, 32), 5).eval()
        assert nn.Sequential(*list(small.body)[:-2])(torch.rand(1, 3, 32, 32)).shape == (1, 512, 4, 4)
    for name in ("linear", "mlp", "mlp:32:2"):
        assert build(name, (13,), 3)(torch.rand(4, 13)).shape == (4, 3)


def test_only_small_images_are_padded() -> None:
    def pads(name: str, size: int) -> list[object]:
        return [m.padding for m in build(name, (1, size, size), 2).modules() if isinstance(m, nn.Conv2d)]

    for name in ("cnn", "simple-cnn", "bench-cnn"):
        assert pads(name, 15) == [(2, 2), (2, 2)]
        assert pads(name, 16) == [(0, 0), (0, 0)]
    assert pads("lenet", 28) == [(2, 2), (0, 0)]
    assert pads("lenet", 32) == [(0, 0), (0, 0)]


@pytest.mark.parametrize("name", SPECS)
def test_body_and_head(name: str) -> None:
    net = fresh(name, (3, 32, 32), 10).eval()
    x = torch.rand(2, 3, 32, 32)
    assert isinstance(net, Network)
    assert isinstance(net.head, nn.Linear)
    features = net.body(x)
    assert features.shape == (2, net.head.in_features)
    assert torch.equal(net(x), net.head(features))
    assert all(key.startswith(("body.", "head.")) for key in net.state_dict())
    assert [m for m in net.modules() if isinstance(m, nn.Linear)][-1] is net.head


def test_projection_is_what_the_body_gives() -> None:
    for name in ("simple-cnn", "resnet18:bn:256"):
        z = fresh(name, (3, 32, 32)).body(torch.rand(8, 3, 32, 32))
        assert z.shape == (8, 256)
        assert (z < 0).any(), "MOON's projection ends without a ReLU"


@pytest.mark.parametrize("name", SPECS)
def test_fx_sees_plain_layers(name: str) -> None:
    net = fresh(name, (3, 32, 32)).eval()
    traced = torch.fx.symbolic_trace(net)
    for node in traced.graph.nodes:
        assert node.op in ("placeholder", "output", "call_module", "call_function")
        if node.op == "call_module":
            assert isinstance(traced.get_submodule(node.target), PLAIN)
        if node.op == "call_function":
            assert node.target is operator.add
    x = torch.rand(2, 3, 32, 32)
    assert torch.equal(traced(x), net(x))
    assert not any(m.inplace for m in net.modules() if isinstance(m, nn.ReLU))


@pytest.mark.parametrize("name", ["mlp", "cnn", "simple-cnn", "resnet18"])
def test_the_seed_decides(name: str) -> None:
    one, same, other = (fresh(name, seed=s).state_dict() for s in (1, 1, 2))
    assert all(torch.equal(one[k], same[k]) for k in one)
    assert not torch.equal(one["head.weight"], other["head.weight"])


@pytest.mark.parametrize("name", ["cnn", "resnet18"])
def test_batchnorm_nets_vmap_in_train_mode(name: str) -> None:
    nets = [fresh(name, (1, 8, 8), seed=s) for s in range(3)]
    params, buffers = stack_module_state(nets)
    x = torch.rand(3, 4, 1, 8, 8)

    def logits(params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = functional_call(nets[0], (params, buffers), (x,))
        return out

    stacked = vmap(logits)(params, buffers, x)
    for i, net in enumerate(nets):
        before = {k: v.clone() for k, v in net.named_buffers()}
        assert torch.allclose(stacked[i], net(x[i]), atol=1e-4)
        for key, value in net.named_buffers():
            assert torch.allclose(buffers[key][i], value, atol=1e-4)
            assert not torch.equal(value, before[key])


def test_descriptions_are_one_line_with_options() -> None:
    assert set(MODELS) == {*SMALL, "resnet18", "resnet50"}
    assert all(text and "\n" not in text for text in MODELS.values())
    assert "cnn:channels (channels 16)" in MODELS["cnn"]
    assert "resnet18:norm:project (norm bn|gn, project none)" in MODELS["resnet18"]


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("ccn", (1, 28, 28), "Unknown model 'ccn': did you mean 'cnn'"),
        ("", (1, 28, 28), "Unknown model ''"),
        ("mlp:wide", (784,), "width must be a whole number above 0, not 'wide'"),
        ("mlp:0", (784,), "above 0"),
        ("mlp:-3", (784,), "above 0"),
        ("mlp:", (784,), "above 0"),
        ("mlp:1:2:3", (784,), "takes 2 options, not 3: write mlp:width:depth"),
        ("cnn:1:2", (1, 28, 28), "takes one option, not 2"),
        ("lenet:5", (1, 28, 28), "takes no options"),
        ("resnet18:ln", (3, 32, 32), "Unknown norm of model resnet18 'ln'"),
        ("cnn", (1, 3, 28), "3x28 are too small"),
        ("lenet", (1, 2, 2), "too small"),
        ("lenet", (30,), "30 plain features: use mlp or linear"),
        ("resnet50", (30,), "needs images"),
        ("mlp", (28, 28), "shape (28, 28)"),
        ("mlp", (), "shape ()"),
        ("mlp", (0,), "shape (0,)"),
    ],
)
def test_bad_names(name: str, shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(Mistake) as mistake:
        build(name, shape, 10)
    assert says in str(mistake.value)


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


OWN = """
from dataclasses import dataclass
from torch import nn
from beside import WIDTH

class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.body, self.head = nn.Linear(shape[0], WIDTH), nn.Linear(WIDTH, classes)
    def forward(self, x):
        return self.head(self.body(x))

@dataclass
class Setting:
    width: int = 3

def ten(*, classes=10, bias=True): return nn.Linear(5, classes, bias)
def nothing(): return nn.Identity()
def greedy(shape, colour): return nn.Identity()
def number(): return 3
made = nn.Identity()
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "beside.py").write_text("WIDTH = 6\n")
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def test_a_users_network(own: str) -> None:
    assert build(f"{own}:Net", (5,), 4)(torch.rand(2, 5)).shape == (2, 4)
    assert build(f"{own}:ten", (5,), 4)(torch.rand(2, 5)).shape == (2, 4)
    assert isinstance(build(f"{own}:nothing", (5,), 4), nn.Identity)
    assert load_object(f"{own}:Net") is load_object(f"{own}:Net")
    Path(own).write_text(OWN.replace("nn.Linear(5, classes, bias)", "nn.Linear(7, classes, bias)"))
    assert build(f"{own}:ten", (7,), 4)(torch.rand(2, 7)).shape == (2, 4), "an edited file is read anew"


def test_bad_users_files(own: str, tmp_path: Path) -> None:
    for spec, says in {
        f"{own}:Nett": "did you mean 'Net'",
        f"{own}:made": "not a class or function",
        f"{own}:greedy": "requires colour",
        f"{own}:number": "returned a int",
        f"{tmp_path}/absent.py:Net": "No such file",
        own: "write path/to/file.py:Name",
        f"{own}:": "write path/to/file.py:Name",
    }.items():
        with pytest.raises(Mistake) as mistake:
            build(spec, (5,), 4)
        assert says in str(mistake.value)
    for text, says in {
        "x = 1\ndef f(:\n": "line 2: SyntaxError",
        "\nimport no_such_package\n": "line 2: ModuleNotFoundError: No module named 'no_such_package'",
        "a = 1\nb = a / 0\n": "line 2: ZeroDivisionError",
        "x = 1\n": "defines neither 'Net'",
        "x = '\0'\n": "source code string cannot contain null bytes",
        "import json\njson.loads('{')\n": "line 2: JSONDecodeError",
    }.items():
        (tmp_path / "bad.py").write_text(text)
        with pytest.raises(Mistake) as mistake:
            load_object(f"{tmp_path}/bad.py:Net")
        assert says in str(mistake.value)
