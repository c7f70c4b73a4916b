"""One file for each method. To add a method, add a file with a class derived from `Method`: its name is the file's name."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from importlib.metadata import entry_points

from kilter.core import Method
from kilter.errors import Mistake, unknown
from kilter.plugins import is_file_spec, load_object


@cache
def methods() -> dict[str, type[Method]]:
    """Every method by name: the built-in ones, and those that other packages offer in the entry-point group `kilter.methods`."""
    by_name: dict[str, type[Method]] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        (by_name[info.name.replace("_", "-")],) = (
            value
            for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, Method) and value.__module__ == module.__name__
        )
    for point in entry_points(group="kilter.methods"):
        by_name[point.name] = point.load()
    return by_name


def check_use(name: str, task: str, personal: bool) -> None:
    """Refuse what a method cannot do: learn a task, or leave layers at clients."""
    kind = find(name)
    if kind.tasks and task not in kind.tasks:
        raise Mistake(f"{name} cannot learn the task {task}, because {kind.tasks_reason}: choose another method.")
    if personal and kind.needs:
        raise Mistake(f"{name} does more than pool models, so its layers cannot stay at clients: see --personal.")


def find(name: str) -> type[Method]:
    """A method by its name, or from a user's file: `my_method.py:MyMethod`."""
    if is_file_spec(name):
        kind = load_object(name)
        if not (isinstance(kind, type) and issubclass(kind, Method)):
            raise Mistake(f"'{name}' is not a method: it must be a class derived from kilter.Method.")
        if missing := sorted(kind.__abstractmethods__):
            raise Mistake(f"The method '{name}' has no `{missing[0]}`: define {' and '.join(missing)}.")
        return kind
    if name not in methods():
        raise unknown("method", name, methods())
    return methods()[name]
