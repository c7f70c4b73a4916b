"""At the end of a deployed run every site has its models and can predict without the network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from place import Place

from kilter.core import Data, Node, Rows
from kilter.experiment import Experiment
from kilter.inference.model_folder import load_model
from kilter.inference.predict import predict
from kilter.inference.rows import read_rows
from kilter.net.site_models import save_models
from kilter.records.wire import Malformed
from kilter.runtimes.evaluation import received_models


@pytest.mark.parametrize("method", ["fedavg", "fedrep"])
def test_every_site_receives_its_models(tmp_path: Path, method: str) -> None:
    here = Place(tmp_path, {"method": method, "rounds": 2})
    try:
        server = here.serve()
        sites = here.all()
        server.wait()
        for site in sites:
            site.wait()
    finally:
        here.end()
    assert sorted(here.summary()["received"]) == ["a", "b", "c"]
    for name in here.sites:
        (folder,) = (tmp_path / f"state-{name}/models").iterdir()
        assert (folder / "README.md").exists()
        client = name if method == "fedrep" else ""
        model = load_model(folder, client=client)
        rows = predict(model, read_rows(model, tmp_path / f"{name}.npz"))
        assert rows.num_rows > 10
        if method == "fedavg":
            at_server = load_model(tmp_path / "run", "last")
            assert torch.equal(load_model(folder, "last").params["head.weight"], at_server.params["head.weight"])


@pytest.mark.parametrize(("method", "restarted"), [("fedavg", True), ("fedrep", False)])
def test_a_site_that_comes_back_after_the_end_receives_its_models(
    place: Callable[..., Place], method: str, restarted: bool
) -> None:
    here = place(method=method, rounds=8)
    server = here.serve("--grace", "0.5", "--quorum", "2", "--linger", "0" if restarted else "60")
    a, b, c = here.all()
    server.until("round 1/8")
    c.kill()
    if restarted:
        server.wait()
        server = here.serve("--linger", "60", "--grace", "1", port=here.port)
    server.until("c did not receive the final models: waiting up to 60 s")
    assert sorted(here.summary()["received"]) == ["a", "b"]
    for site in (a, b):
        site.wait()  # the others leave at once
    assert "the final models are in" in here.join("c").wait()
    server.wait()
    assert sorted(here.summary()["received"]) == ["a", "b", "c"]
    (folder,) = (here.folder / "state-c/models").iterdir()
    model = load_model(folder, "last" if method == "fedavg" else "", "" if method == "fedavg" else "c")
    assert predict(model, read_rows(model, here.folder / "c.npz")).num_rows > 10
    assert (folder / "README.md").exists()


def test_a_model_of_another_network_is_refused(tmp_path: Path) -> None:
    method = Experiment.of({"model": "mlp:8"}).make((1, 8, 8), 10)
    info = Experiment.of({"model": "mlp:8"}).model_info(method)
    nothing = Rows({}, torch.empty(0, dtype=torch.int64))
    node = Node("a", Data(nothing, nothing, nothing))
    good = method.task.init(0)
    for bad in ({}, {**good, "head.bias": torch.zeros(3)}, {**good, "extra": torch.zeros(1)}):
        with pytest.raises(Malformed):
            received_models(method, node, {"state": bad, "best": None, "card": "x"})
    with pytest.raises(Malformed, match="card"):
        received_models(method, node, {"state": good, "best": None, "card": 3})
    with pytest.raises(Malformed, match="expected"):
        received_models(method, node, {"state": good})
    models, card = received_models(method, node, {"state": good, "best": good, "card": "# card"})
    assert set(models) == {"model.safetensors", "best.safetensors"}
    save_models(tmp_path / "m", models, card, None, info)
    assert torch.equal(load_model(tmp_path / "m").params["head.bias"], good["head.bias"])
