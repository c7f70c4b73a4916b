"""A method that only sends, for the latency of `map` behind an engine."""

from dataclasses import dataclass

import torch

from kilter import Federation, Method, Node, step
from kilter.core import Tree


@dataclass(frozen=True, kw_only=True)
class Echo(Method):
    """Every round is one `map`: a message to all sites, and back."""

    size: int = 50_000  # bytes of the message

    def setup(self, fed: Federation) -> None:
        return None

    def round(self, fed: Federation, state: None) -> None:
        assert len(fed.map(self.echo, {"w": torch.ones(self.size // 4)})) == len(fed.ids)

    @step
    def echo(self, node: Node, message: Tree) -> Tree:
        return message

    def model(self, state: None) -> None:
        return None
