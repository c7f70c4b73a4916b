"""Kilter: federated learning for data that is off kilter."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kilter.core import Data, Each, Federation, Fit, Mail, Method, Node, Post, Replies, Rows, step
    from kilter.errors import Mistake
    from kilter.federate import Result, federate
    from kilter.options import option
    from kilter.records.run_folder import Store
    from kilter.runtimes.simulation import Simulation
    from kilter.tasks import Task
    from kilter.train import SGD, Adam, Plan

__version__ = "0.2.0"
__all__ = [
    "SGD",
    "Adam",
    "Data",
    "Each",
    "Federation",
    "Fit",
    "Mail",
    "Method",
    "Mistake",
    "Node",
    "Plan",
    "Post",
    "Replies",
    "Result",
    "Rows",
    "Simulation",
    "Store",
    "Task",
    "federate",
    "option",
    "step",
]

# Names are imported on first use, so that `kilter --help` does not wait for torch.
MODULES = {
    "kilter.core": ("Data", "Each", "Federation", "Fit", "Mail", "Method", "Node", "Post", "Replies", "Rows", "step"),
    "kilter.errors": ("Mistake",),
    "kilter.federate": ("Result", "federate"),
    "kilter.options": ("option",),
    "kilter.records.run_folder": ("Store",),
    "kilter.runtimes.simulation": ("Simulation",),
    "kilter.tasks": ("Task",),
    "kilter.train": ("SGD", "Adam", "Plan"),
}


def __getattr__(name: str) -> object:
    for module, names in MODULES.items():
        if name in names:
            value: object = getattr(import_module(module), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'kilter' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


class _Package(ModuleType):
    """`kilter.federate` is the function, also after Python has imported the module of that name."""

    def __setattr__(self, name: str, value: object) -> None:
        is_module = name == "federate" and isinstance(value, ModuleType)
        super().__setattr__(name, getattr(value, name) if is_module else value)


sys.modules[__name__].__class__ = _Package
