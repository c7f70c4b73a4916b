"""Networks by name: sizes as published, the body/head convention, weights from files, and users' own networks."""

from __future__ import annotations

import doctest
import operator
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from kilter import models
from kilter import plugins as plugin
from kilter.errors import Mistake
from kilter.models import MODELS, Network, build
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
    sequences = {"temporal-cnn", "unet", "lstm", "transformer", "causal-transformer"}
    assert set(MODELS) == {*SMALL, "resnet18", "resnet50", *sequences}
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


def test_sequences_and_masks_have_the_right_shapes() -> None:
    tokens = torch.tensor([[3.0, 5.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]])
    for name in ("lstm:8", "transformer:8:1:2"):
        net = build(name, (4,), 3).eval()
        longer = torch.cat([tokens, torch.zeros(2, 0)], 1)
        assert net(longer).shape == (2, 3)
    causal = build("causal-transformer:8:1:2", (4,), 10).eval()
    first, changed = causal(tokens), tokens.clone()
    changed[:, 3] = 7
    assert first.shape == (2, 4, 10)
    assert torch.allclose(first[1, :3], causal(changed)[1, :3], atol=1e-6)  # the future is not seen
    assert build("unet:4:1", (1, 8, 8), 3)(torch.zeros(2, 1, 8, 8)).shape == (2, 3, 8, 8)
    with pytest.raises(Mistake, match="multiples of 4"):
        build("unet", (1, 10, 10), 3)
    with pytest.raises(Mistake, match="rows of tokens"):
        build("lstm", (1, 8, 8), 3)
    with pytest.raises(Mistake, match="heads"):
        build("transformer:10:1:4", (8,), 2)


def test_padding_does_not_change_what_a_text_network_says() -> None:
    padded = torch.tensor([[3.0, 5.0, 0.0, 0.0]])
    net = build("lstm:8", (4,), 3).eval()
    assert torch.allclose(net(padded), net(padded[:, :2]), atol=1e-6)
