"""Roles of participants by name, where nodes aggregate in turn or in groups: `roles = "a=aggregator,b=trainer,p=proxy"`.

trainer      trains, and never aggregates
aggregator   trains, and aggregates (in turn, or for its group); if a name has this role, only such names aggregate
proxy        forwards letters between the others, which it cannot read, and never trains
idle         takes no part

A node without a role trains, and aggregates unless others have the role of aggregator.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kilter.errors import Mistake, unknown

ROLES = ("trainer", "aggregator", "proxy", "idle")
T = TypeVar("T")


@dataclass(frozen=True)
class Roles:
    """Who does what. Names that are not listed train, and may aggregate."""

    by_name: Mapping[str, str] = field(default_factory=dict)

    @property
    def proxy(self) -> str:
        """The node through which letters go; empty: they go straight to their receiver."""
        return next((name for name, role in self.by_name.items() if role == "proxy"), "")

    def members(self, ids: Sequence[str]) -> tuple[str, ...]:
        """The nodes that train."""
        return tuple(name for name in ids if self.by_name.get(name) not in ("proxy", "idle"))

    def aggregators(self, ids: Sequence[str]) -> tuple[str, ...]:
        """The nodes that aggregate in turn."""
        chosen = tuple(name for name in ids if self.by_name.get(name) == "aggregator")
        return chosen or tuple(name for name in ids if name not in self.by_name)

    def group_aggregators(self, topology: str, ids: Sequence[str]) -> tuple[str, ...]:
        """The aggregators of the groups (aggregators:k): those with the role, or the first k; empty for other topologies."""
        name, _, count = topology.partition(":")
        if name != "aggregators" or not count.isdecimal():
            return ()
        named = list(self.by_name.values()).count("aggregator")
        if named and named != int(count):
            raise Mistake(f"The topology '{topology}' needs {count} names with the role aggregator, not {named}.")
        return self.aggregators(self.members(ids))[: int(count)]

    def taking_part(self, clients: Mapping[str, T]) -> dict[str, T]:
        """The clients that train. A name that nobody has is a Mistake."""
        self.check(clients)
        return {name: clients[name] for name in self.members(tuple(clients))}

    def check(self, names: Collection[str]) -> None:
        """Refuse roles of names that do not exist, and roles that leave nobody to aggregate."""
        for name in self.by_name:
            if name not in names:
                raise unknown("name in roles", name, names)
        if not self.aggregators(self.members(tuple(names))):
            raise Mistake("With these roles nobody aggregates: give a participant the role aggregator, or none.")


def parse_roles(text: str, topology: str = "rotating") -> Roles:
    """Read NAME=ROLE pairs, separated by commas.

    >>> parse_roles("a=aggregator, b=trainer").aggregators(["a", "b", "c"])
    ('a',)
    """
    roles: dict[str, str] = {}
    for pair in filter(None, map(str.strip, text.split(","))):
        name, _, role = (part.strip() for part in pair.partition("="))
        if not name or not role:
            raise Mistake(f"roles takes NAME=ROLE pairs, such as a=aggregator,b=trainer, not '{pair}'.")
        if role not in ROLES:
            raise unknown("role", role, ROLES)
        if name in roles:
            raise Mistake(f"roles names '{name}' twice.")
        roles[name] = role
    if roles and topology.split(":")[0] not in ("rotating", "aggregators"):
        raise Mistake(
            f"Roles need nodes that aggregate in turn (topology = 'rotating') or in groups ('aggregators:2'), not '{topology}'."
        )
    if list(roles.values()).count("proxy") > 1:
        raise Mistake("roles names several proxies: letters go through one.")
    parsed = Roles(roles)
    parsed.group_aggregators(topology, tuple(roles))
    return parsed
