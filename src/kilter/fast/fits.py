"""Run the fits that are ready together: stacked where possible, otherwise one by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
        waiting = groups(fits)
        while waiting:
            group = waiting.pop(0)
            try:
                if len(group) > 1 and (results := run_stack([fits[k] for k in group])):
                    done |= dict(zip(group, results, strict=True))
            except torch.OutOfMemoryError:
                half = len(group) // 2
                waiting = [group[:half], group[half:], *waiting]
                switch.report_once(
                    f"A stack of {len(group)} clients does not fit on the device: it is halved", "out of memory"
                )
    return [done[k] if k in done else run_one(fit) for k, fit in enumerate(fits)]
