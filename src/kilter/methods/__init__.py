"""One file a method. A file here with a `Method` in it is a method by the file's name; nothing else needs touching."""

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
    """Every method by name: ours, and those other packages offer in the entry-point group `kilter.methods`."""
    found: dict[str, type[Method]] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        (found[info.name.replace("_", "-")],) = (
            m
            for m in vars(module).values()
            if isinstance(m, type) and issubclass(m, Method) and m.__module__ == module.__name__
        )
    for point in entry_points(group="kilter.methods"):
        found[point.name] = point.load()
    return found


def find(name: str) -> type[Method]:
    """A method by its name, or from a user's file: `my_method.py:MyMethod`."""
    if is_file_spec(name):
        made = load_object(name)
        if not (isinstance(made, type) and issubclass(made, Method)):
            raise Mistake(f"'{name}' is not a method: it must be a class derived from kilter.Method.")
        if missing := sorted(made.__abstractmethods__):
            raise Mistake(f"The method '{name}' has no `{missing[0]}`: define {' and '.join(missing)}.")
        return made
    if name not in methods():
        raise unknown("method", name, methods())
    return methods()[name]
