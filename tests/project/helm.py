"""Renders the few constructs of Helm's templates that our chart uses; anything else is an error."""

from __future__ import annotations

import re
from typing import Any

import yaml

ACTION = re.compile(r"\{\{(-?)\s*(.+?)\s*(-?)\}\}")
IF = re.compile(r'if eq (\S+) "(\w+)"')


def lookup(path: str, context: dict[str, Any]) -> Any:
    value: Any = context
    for part in path.removeprefix(".").split("."):
        value = value[part]
    return value


def evaluate(action: str, context: dict[str, Any]) -> str:
    source, *pipes = [part.strip() for part in action.split("|")]
    plain = lookup(source.removeprefix("toYaml").strip(), context)
    text = yaml.safe_dump(plain).strip() if source.startswith("toYaml") else str(plain)
    for pipe in pipes:
        name, _, argument = pipe.partition(" ")
        if name != "nindent":
            raise ValueError(f"the chart uses {name}, which the test cannot render")
        text = "\n" + "\n".join(" " * int(argument) + line if line else "" for line in text.splitlines())
    return text


def render(template: str, context: dict[str, Any]) -> str:
    """The text of a template."""
    out, at = [], 0
    visible = [True]
    for match in ACTION.finditer(template):
        before = template[at : match.start()]
        at = match.end()
        if visible[-1]:
            out.append(before.rstrip() if match[1] else before)
        if condition := IF.fullmatch(match[2]):
            visible.append(visible[-1] and lookup(condition[1], context) == condition[2])
        elif match[2] == "end":
            visible.pop()
        elif visible[-1]:
            out.append(evaluate(match[2], context))
    assert visible == [True], "an if has no end"
    return "".join([*out, template[at:]])
