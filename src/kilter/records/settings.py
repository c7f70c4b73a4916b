"""The settings of a run, as its checkpoint keeps them: a run resumes only under the same ones."""

from __future__ import annotations

from collections.abc import Mapping

Settings = Mapping[str, object]


def changed_settings(old: Settings | None, new: Settings | None) -> list[str]:
    """The settings that differ, one level deep. A setting that only one version of Kilter knows has not changed.

    >>> changed_settings({"lr": 1, "local": {"a": 1}}, {"lr": 2, "local": {}, "device": "cpu"})
    ['lr', 'local.a']
    """
    changed = []
    for name in [name for name in old or {} if name in (new or {})]:
        one, other = (old or {})[name], (new or {})[name]
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            changed += [f"{name}.{inner}" for inner in one if one.get(inner) != other.get(inner)]
        elif one != other:
            changed.append(name)
    return changed
