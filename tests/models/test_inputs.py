"""Inputs by name: embedded categories, and networks whose `forward` takes several arguments or a dict."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kilter.data import load
from kilter.errors import Mistake
from kilter.experiment import Experiment
from kilter.inference.model_folder import load_model
from kilter.inference.rows import read_rows
from kilter.models import build
from kilter.models.inputs import EmbedColumns, Input, split_inputs
from kilter.records.run_folder import Store

COLUMNS = [Input("age", (1,)), Input("ward", (1,), values=4, width=3), Input("dose", (2,))]

NETS = """
import torch
from torch import Tensor, nn

class Two(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 8), nn.Linear(11, classes)

    def forward(self, image: Tensor, blood_values: Tensor) -> Tensor:
        return self.head(torch.cat([torch.relu(self.body(image.flatten(1))), blood_values], 1))

class Batch(Two):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return super().forward(batch["image"], batch["blood values"])

class Other(Two):
    def forward(self, image: Tensor, sound: Tensor) -> Tensor:
        return image
"""


def test_a_category_becomes_the_vector_of_its_place_and_the_rest_stays():
    embed = EmbedColumns(COLUMNS)
    table = embed.tables[0]
    x = torch.tensor([[1.5, 2.0, 7.0, 8.0], [0.5, 0.0, 9.0, 1.0]])
    expected = torch.stack(
        [
            torch.cat([x[0, :1], table[2], x[0, 2:]]),
            torch.cat([x[1, :1], table[0], x[1, 2:]]),
        ]
    )
    assert torch.equal(embed(x), expected)
    assert torch.equal(embed(torch.tensor([[0.0, 99.0, 0.0, 0.0]]))[0, 1:4], table[3])  # never out of range


def test_embedded_networks_keep_a_body_and_a_head():
    net = build("mlp:5", (4,), 2, COLUMNS)
    assert {name.split(".")[0] for name, _ in net.named_parameters()} == {"body", "head"}
    assert net.body[1][1].in_features == 1 + 3 + 2
    assert net(torch.zeros(7, 4)).shape == (7, 2)


def test_rows_are_split_into_named_parts():
    x = torch.arange(8.0).reshape(2, 4)
    parts = split_inputs(x, [Input("a", (3,)), Input("b", (1, 1, 1))])
    assert parts["a"].tolist() == [[0, 1, 2], [4, 5, 6]]
    assert parts["b"].shape == (2, 1, 1, 1)


def table(path: Path) -> Path:
    rng = np.random.default_rng(0)
    lines = ["site,ward,dose,label"]
    for k in range(240):
        ward = "ABCD"[rng.integers(4)] if k != 7 else ""
        lines.append(f"{'xy'[k % 2]},{ward},{rng.normal():.3f},{'ill' if ward in 'AB' else 'well'}")
    path.write_text("\n".join(lines) + "\n")
    return path


def trained(folder: Path, **settings: object) -> dict[str, torch.Tensor]:
    run = Experiment.of({"rounds": 3, "client": "site", "local": {"lr": 0.5}, "prepare": "embed=2", **settings})
    method, fed = run.build()
    with fed:
        result = run.run(method, fed, Store(folder))
    assert result.summary.global_accuracy > 0.9
    return load_file(folder / "model.safetensors")


def test_embedded_categories_are_learned_alike_with_and_without_accelerated_code(tmp_path):
    data = str(table(tmp_path / "t.csv"))
    fast, plain = (trained(tmp_path / name, data=data, plain=name == "plain") for name in ("fast", "plain"))
    assert [tuple(t.shape) for name, t in fast.items() if "tables" in name] == [(6, 2)]  # 4 values, the gap and "other"
    for name, weights in fast.items():
        assert torch.allclose(weights, plain[name], atol=1e-5), name


@pytest.fixture
def nets(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(NETS)
    return tmp_path / "nets.py"


def arrays(path: Path) -> Path:
    rng = np.random.default_rng(0)
    y = np.arange(200) % 2
    images = rng.integers(0, 100, (200, 4, 4)) + 100 * y[:, None, None]
    np.savez(path, **{"x.image": images.astype(np.uint8), "x.blood values": rng.normal(size=(200, 3)), "y": y})
    return path


@pytest.mark.parametrize("name", ["Two", "Batch"])
def test_a_network_receives_its_inputs_by_name(tmp_path, nets, name):
    path = arrays(tmp_path / "a.npz")
    data = load(path)
    assert [(i, shape) for i, shape, *_ in data.inputs] == [("blood values", (3,)), ("image", (4, 4))]
    spec = {"data": str(path), "model": f"{nets}:{name}", "rounds": 3, "clients": 2, "local": {"lr": 0.5}}
    run = Experiment.of(spec)
    method, fed = run.build()
    with fed:
        result = run.run(method, fed, Store(tmp_path / "run"))
    assert result.summary.global_accuracy > 0.9
    assert set(load_file(tmp_path / "run" / "model.safetensors")) == {
        "body.weight",
        "body.bias",
        "head.weight",
        "head.bias",
    }
    model = load_model(tmp_path / "run", "last")
    x = read_rows(model, path)
    assert model.outputs(x).argmax(1).eq(data.y).float().mean() > 0.9


def test_other_names_are_refused_in_one_sentence(tmp_path, nets):
    inputs = [Input("image", (4, 4)), Input("blood values", (3,))]
    with pytest.raises(
        Mistake, match="takes 'sound', and the data has no input of this name: it has image, blood_values"
    ):
        build(f"{nets}:Other", (19,), 2, inputs)
    with pytest.raises(Mistake, match="the data has no inputs by name"):
        build(f"{nets}:Two", (1, 4, 4), 2)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"x.a": (3, 2), "x.b": (4, 2), "y": (3,)}, "x.a has 3, x.b has 4"),
        ({"x.a": (4, 2), "x": (4, 2), "y": (4,)}, "use one or the other"),
        ({"x_train.a": (4, 2), "x_test.a": (4, 3), "y_train": (4,), "y_test": (4,)}, "other names or shapes"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(keys, message):
    with pytest.raises(Mistake, match=message):
        load({key: np.zeros(shape, dtype=int if key[0] == "y" else float) for key, shape in keys.items()})
