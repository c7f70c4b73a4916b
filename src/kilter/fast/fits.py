"""Run the fits that are ready together: stacked where possible, otherwise one by one."""

from __future__ import annotations

from collections.abc import Sequence

from kilter.core import Fit
from kilter.fast import switch
from kilter.train import Fitted, run_one

try:
    from kilter.fast.stack import groups, run_stack

    MISSING = ""
except (ImportError, AttributeError) as error:  # this torch lacks a private name that stacking needs
    MISSING = str(error)


def run(fits: Sequence[Fit], stacked: bool = True) -> list[Fitted]:
    """The results of these fits, in the same order."""
    done: dict[int, Fitted] = {}
    if MISSING:
        switch.report_once("Clients train one by one", MISSING)
    elif stacked and switch.enabled():
        for group in groups(fits):
            if len(group) > 1 and (results := run_stack([fits[k] for k in group])):
                done |= dict(zip(group, results, strict=True))
    return [done[k] if k in done else run_one(fit) for k, fit in enumerate(fits)]
