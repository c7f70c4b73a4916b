"""Commands that need the libraries of the network."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from kilter.errors import Mistake

P = ParamSpec("P")
R = TypeVar("R")


def needs_network(command: Callable[P, R]) -> Callable[P, R]:
    """Say which library is missing, in one sentence."""

    @functools.wraps(command)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except ModuleNotFoundError as e:
            if (e.name or "").split(".")[0] not in ("grpc", "cryptography"):
                raise
            raise Mistake(f"The network needs the library {e.name}: `pip install 'kilter[net]'`.") from None

    return checked
