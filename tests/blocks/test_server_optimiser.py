"""Server optimisers: where they are the method itself, known answers, torch.optim as referee, every method that pools."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kilter.blocks.server_optimiser import ServerOptimiser, parse
from kilter.core import Method
from kilter.errors import Mistake
from kilter.federate import federate
from kilter.runtimes.simulation import Simulation
from small import method, near, same, skewed


def final(made: Method, topology: str = "star", rounds: int = 3) -> object:
    with Simulation(skewed(3), topology=topology) as fed:
        result = federate(made, fed, rounds)
        return result.state if topology == "star" else fed.states


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold"])
def test_rate_one_without_momentum_is_the_method_itself(name: str) -> None:
    made = method(name)
    plain, served = final(made), final(replace(made, server=parse("momentum:lr=1,beta1=0")))
    assert same(made.model(plain), made.model(served))


def test_momentum_is_that_of_torch() -> None:
    """x + lr m with m <- b m + D is SGD with momentum on the gradient -D."""
    ours = {"w": torch.zeros(3)}
    theirs = torch.nn.Parameter(torch.zeros(3))
    referee = torch.optim.SGD([theirs], lr=0.5, momentum=0.9)
    optimiser, moments = parse("momentum:lr=0.5"), {}
    rng = torch.Generator().manual_seed(0)
    for _ in range(50):
        change = torch.randn(3, generator=rng)
        ours = optimiser.step(ours, {"w": ours["w"] + change}, moments)
        theirs.grad = -change
        referee.step()
    assert torch.allclose(ours["w"], theirs, atol=1e-5)


def test_adagrad_is_that_of_torch_with_the_root_of_v_at_tau() -> None:
    ours, theirs = {"w": torch.zeros(2)}, torch.nn.Parameter(torch.zeros(2))
    referee = torch.optim.Adagrad([theirs], lr=0.1, eps=1e-3, initial_accumulator_value=1e-6)
    optimiser, moments = parse("adagrad:lr=0.1"), {}
    for k in range(20):
        change = torch.tensor([0.5, -0.2]) * (k % 3)
        ours = optimiser.step(ours, {"w": ours["w"] + change}, moments)
        theirs.grad = -change
        referee.step()
    assert torch.allclose(ours["w"], theirs, atol=1e-5)


def test_adam_and_yogi_by_hand() -> None:
    x, new = {"w": torch.tensor([1.0])}, {"w": torch.tensor([1.5])}
    for name, v in (("adam", 0.99 * 1e-6 + 0.01 * 0.25), ("yogi", 1e-6 + 0.01 * 0.25)):
        moved = parse(f"{name}:lr=0.1").step(x, new, {})
        assert float(moved["w"]) == pytest.approx(1 + 0.1 * 0.05 / (v**0.5 + 1e-3), rel=1e-5)


def test_buffers_are_those_of_the_average() -> None:
    moved = parse("adam").step(
        {"w": torch.zeros(1), "~b": torch.zeros(1)}, {"w": torch.ones(1), "~b": torch.ones(1)}, {}
    )
    assert float(moved["~b"]) == 1.0
    assert 0 < float(moved["w"]) < 1


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedbn", "fedrep", "feddc"])
def test_every_averaging_method_takes_one(name: str) -> None:
    made = replace(method(name), server=parse("adam:lr=0.01"))
    assert torch.isfinite(torch.cat([v.flatten().float() for v in _tensors(final(made))])).all()


def _tensors(tree: object) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [t for child in children for t in _tensors(child)]


def test_over_a_full_graph_peers_do_what_the_star_does() -> None:
    made = replace(method("fedavg"), server=parse("adam:lr=0.01"))
    star, peers = final(made), final(made, "full")
    assert near(star, next(iter(peers.values()))["~pool"], 1e-4)


def test_a_method_without_one_averaged_model_refuses() -> None:
    made = replace(method("fedem"), server=parse("adam"))
    with pytest.raises(Mistake, match="nothing to move"):
        final(made)


@pytest.mark.parametrize(
    ("spec", "says"),
    [("adm", "did you mean 'adam'"), ("adam:lr=x", "NUMBER"), ("adam:rate=1", "setting"), ("adam:lr=-1", "lr")],
)
def test_wrong_specs_are_refused(spec: str, says: str) -> None:
    with pytest.raises(Mistake, match=says):
        parse(spec)


def test_defaults_by_name() -> None:
    assert parse("momentum") == ServerOptimiser("momentum", 1.0, 0.9)
    assert parse("") is None
