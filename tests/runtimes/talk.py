"""A method whose steps answer, write, remember, draw and misbehave, and what tests of runtimes share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kilter.core import Method, Node, Post, step
from kilter.errors import Mistake
from kilter.runtimes.simulation import Simulation


@dataclass(frozen=True, kw_only=True)
class Talk(Method):
    """A method for tests: steps that answer, write, remember, draw and misbehave."""

    task: Any = None
    local: Any = None

    def setup(self, fed: Any) -> None:
        return None

    def round(self, fed: Any, state: None) -> None:
        return None

    def model(self, state: None) -> None:
        return None

    @step(alike=False)
    def answer(self, node: Node, message: Any) -> Any:
        return node.id, message

    @step
    def draw(self, node: Node, _: Any) -> Tensor:
        return torch.rand(3, generator=node.rng)

    @step
    def remember(self, node: Node, message: Any) -> int:
        node.state["seen"] = node.state.get("seen", 0) + 1
        node.state["secret"] = torch.full((1000,), 7.0)
        return node.state["seen"]

    @step
    def write(self, node: Node, _: Any) -> Post:
        return Post({peer: f"{node.id} to {peer}" for peer in node.peers})

    @step(alike=False)
    def read(self, node: Node, box: dict[str, str]) -> Any:
        return dict(box)

    @step
    def shout(self, node: Node, _: Any) -> Post:
        return Post({"c2": "hello"})

    @step
    def lie(self, node: Node, reply: dict[str, Any]) -> Any:
        return reply[node.id]

    @step
    def fail(self, node: Node, _: Any) -> None:
        raise Mistake("no such luck") if node.id == "c1" else ValueError("a bug of ours")

    @step
    def note(self, node: Node, _: Any) -> None:
        node.note(f"I am {node.id}")

    @step
    def mutate(self, node: Node, how: str) -> None:
        exec(how, {"torch": torch, "s": node.state})

    def hidden(self, node: Node, _: Any) -> str:
        return "secret"


def talking(fed: Simulation) -> Simulation:
    fed.bind(Talk())
    return fed
