"""What a method needs of the federation it runs in; checked before a run, so that a run does not fail in the middle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kilter.core import Method
from kilter.errors import Mistake

if TYPE_CHECKING:
    from kilter.runtimes.base import Runtime


def check_needs(fed: Runtime, method: Method) -> None:
    """Refuse a method that cannot run here: one sentence says why, and what to do."""
    name, topology = type(method).__name__, fed.topology
    if "public" in method.needs and not fed.has_public:
        raise Mistake(
            f"{name} needs a small public data set at the aggregator: "
            "set aside some rows of each class (--public 10) or give a file (--public-file)."
        )
    if "everyone" in method.needs and any(len(n) < len(fed.ids) - 1 for n in topology.neighbours.values()):
        raise Mistake(
            f"{name} needs links between all nodes, which the topology '{topology.spec}' lacks: use --topology full."
        )
    if "everyone" in method.needs and fed.robust:
        raise Mistake(f"{name} does not aggregate models that a robust rule could compare: leave out --robust.")
    if "aggregator" in method.needs and topology.kind == "peers":
        raise Mistake(
            f"{name} needs one aggregator and so cannot run under '{topology.spec}': use --topology star or rotating."
        )
    if topology.groups and not method.states_average:
        raise Mistake(
            f"The states that {name} keeps for several groups have no mean, so it cannot run under '{topology.spec}': "
            "use --topology star or rotating."
        )
