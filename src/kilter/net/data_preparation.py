"""The phase before a method's set-up: sites that have approved the terms send statistics, and one preparation is fitted for all."""

from __future__ import annotations

from collections.abc import Mapping

from kilter.data.preparation import AnyPreparation, Plain, fit, fit_channels
from kilter.errors import Mistake
from kilter.net.data_description import DataDescription
from kilter.net.server import ServerRuntime
from kilter.runtimes.ledger import Ledger
from kilter.runtimes.step_names import SUMMARISE


def collect_statistics(fed: ServerRuntime, description: DataDescription) -> dict[str, Plain]:
    """Ask the connected sites for statistics. The letters count as traffic of the set-up."""
    fed.wait()
    fed.schema = description.schema
    replies = fed.call(SUMMARISE, alike=False)
    fed.opened = (fed.round, 1)  # the method's first call comes after this one
    fed.opening, fed.ledger = fed.ledger, Ledger()
    if not replies:
        reasons = "; ".join(f"{failure.node}: {failure.reason}" for failure in fed.opening.failures[:3])
        raise Mistake(f"No site sent statistics of its rows, so the data cannot be prepared ({reasons}).")
    return dict(replies.items())


def pool_statistics(description: DataDescription, statistics: Mapping[str, Plain]) -> AnyPreparation:
    """One preparation for all sites."""
    parts = list(statistics.values())
    return fit_channels(parts) if description.schema is None else fit(description.schema, parts)
