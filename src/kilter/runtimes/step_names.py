"""Step names as they appear on the wire, in records and in logs. This is the only module that formats or parses them.

train                        a step of the method
spread:train                 peers: run `train`, then send the result to every neighbour
gather:combine               peers: run `combine` on the letters that arrived
gather:trimmed:0.2:combine   the same, after the robust rule `trimmed:0.2` was applied to the letters
submit:train                 groups: run `train`, then send the result to the group's aggregator
merge:combine                groups: run `combine` on what the group sent, then send the result to the other aggregators
:exchange, :follow           groups: average the groups' states; start from the aggregator's state
:evaluate, :look, :adopt, :summarise, :receive   other steps of the framework
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kilter.errors import Mistake
from kilter.runtimes.robust import parse as parse_robust

LONGEST = 200  # characters in a step name


class StepKind(Enum):
    """Who defines a step, and what the runtime does with its result."""

    METHOD = "method"  # a step of the method; its reply goes to the aggregator
    SPREAD = "spread"  # peers, first half of `pool`: train, then write to the neighbours
    GATHER = "gather"  # peers, second half of `pool`: combine what the neighbours wrote
    SUBMIT = "submit"  # groups: train, then write to the group's aggregator
    MERGE = "merge"  # groups: combine what the group wrote, then write to the other aggregators
    FRAMEWORK = "framework"  # evaluation and set-up, the same for every method


@dataclass(frozen=True)
class StepName:
    """The name of a step. `str(name)` is its text on the wire; `StepName.parse` reads that text."""

    step: str  # the function that runs, for example "train"; random numbers are derived from this part only
    kind: StepKind = StepKind.METHOD
    robust: str = ""  # GATHER and MERGE only: the robust rule, for example "trimmed:0.2"; empty for none

    def __str__(self) -> str:
        if self.kind is StepKind.METHOD:
            return self.step
        if self.kind is StepKind.FRAMEWORK:
            return f":{self.step}"
        return ":".join(part for part in (self.kind.value, self.robust, self.step) if part)

    @property
    def writes_letters(self) -> bool:
        """Whether the framework makes letters of what the step returns."""
        return self.kind in (StepKind.SPREAD, StepKind.SUBMIT, StepKind.MERGE) or self == EXCHANGE

    @property
    def reads_letters(self) -> bool:
        """Whether the step cannot run without letters."""
        return self.kind in (StepKind.GATHER, StepKind.MERGE) or self in (EXCHANGE, FOLLOW)

    @staticmethod
    def spread(step: str) -> StepName:
        """The first half of `pool` between peers."""
        return StepName(step, StepKind.SPREAD)

    @staticmethod
    def gather(step: str, robust: str = "") -> StepName:
        """The second half of `pool` between peers."""
        return StepName(step, StepKind.GATHER, robust)

    @staticmethod
    def parse(text: str) -> StepName:
        """Read a step name, or raise a Mistake if the text is not one.

        >>> StepName.parse("gather:trimmed:0.2:combine").robust
        'trimmed:0.2'
        """
        prefix, colon, step = text.rpartition(":")
        kind, _, robust = prefix.partition(":")
        if len(text) > LONGEST or not (step.isascii() and step.isidentifier()):
            raise _not_a_step(text)
        if not colon:
            return StepName(step)
        if not prefix and text in FRAMEWORK_STEPS:
            return StepName(step, StepKind.FRAMEWORK)
        if prefix in ("spread", "submit"):
            return StepName(step, StepKind(prefix))
        if kind in ("gather", "merge") and (robust or prefix == kind) and not robust.endswith(":"):
            if robust:
                parse_robust(robust)
            return StepName(step, StepKind(kind), robust)
        raise _not_a_step(text)


def _not_a_step(text: str) -> Mistake:
    shown = "".join(c if c.isprintable() else "?" for c in text[:60])
    return Mistake(f"'{shown}' is not the name of a step.")


EVALUATE = StepName("evaluate", StepKind.FRAMEWORK)  # measure models on a node's own rows
LOOK = StepName("look", StepKind.FRAMEWORK)  # a simulator's processes share the common test set
ADOPT = StepName("adopt", StepKind.FRAMEWORK)  # peers: start from this state
SUMMARISE = StepName("summarise", StepKind.FRAMEWORK)  # statistics of a site's rows, for the preparation of the data
RECEIVE = StepName("receive", StepKind.FRAMEWORK)  # sites get the final models
EXCHANGE = StepName("exchange", StepKind.FRAMEWORK)  # groups: average the groups' states
FOLLOW = StepName("follow", StepKind.FRAMEWORK)  # groups: start from the state of the group's aggregator
FRAMEWORK_STEPS = tuple(map(str, (EVALUATE, LOOK, ADOPT, SUMMARISE, RECEIVE, EXCHANGE, FOLLOW)))
