"""What did not happen in a run, counted over its rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kilter.records.types import FailureKind, Notice, Round

FAILURES: dict[FailureKind, str] = {
    "absent": "a reply did not come",
    "error": "a client's step raised an error",
    "not finite": "a reply was refused: it is not finite",
    "shape": "a reply was refused: it differs in shape from the others",
    "too large": "a reply was refused: it is far too large",
    "unreadable": "a reply was refused: it cannot be read",
    "no replies": "no valid reply: the model is unchanged",
}


def count_notices(rounds: Iterable[Round], whole_run: Sequence[str] = ()) -> list[Notice]:
    """Notices and failures of all rounds, equal ones together, and those about the whole run."""
    places: dict[str, list[tuple[int, str]]] = {}
    for record in rounds:
        for notice in record.notices:
            places.setdefault(notice.what, []).append((record.round, notice.node))
        for failure in record.failures:
            places.setdefault(FAILURES[failure.kind], []).append((record.round, failure.node))
    counted = [
        Notice(what, len(at), sorted({round for round, _ in at}), sorted({node for _, node in at}))
        for what, at in places.items()
    ]
    return counted + [Notice(what, 1, [], []) for what in whole_run]


def no_valid_replies(rounds: Iterable[Round]) -> bool:
    """Whether no reply could be used in any round, so that the model is still the initial one."""
    trained = [record for record in rounds if record.round > 0]
    return bool(trained) and all(record.failures and not record.replies for record in trained)


def failure_counts(rounds: Iterable[Round]) -> str:
    """How often each kind of failure happened, in words.

    >>> from kilter.records.types import Failure
    >>> failure_counts([Round(round=1, failures=[Failure("a", "train", "its reply is not finite at w", "not finite")])])
    'not finite: 1'
    """
    kinds = [failure.kind for record in rounds for failure in record.failures if failure.kind != "no replies"]
    return ", ".join(f"{kind}: {kinds.count(kind)}" for kind in dict.fromkeys(kinds))


def describe(notice: Notice) -> str:
    """A notice in one line.

    >>> describe(Notice("shares were lost", 3, [1, 2, 3, 5], ["b"]))
    'shares were lost: 3 times, rounds 1-3 and 5, at b'
    """
    if not notice.rounds:
        return notice.what
    times = "once" if notice.count == 1 else f"{notice.count} times"
    nodes = ", ".join(notice.nodes) if len(notice.nodes) <= 4 else f"{len(notice.nodes)} nodes"
    return f"{notice.what}: {times}, {_rounds(notice.rounds)}, at {nodes}"


def _rounds(numbers: Sequence[int]) -> str:
    spans: list[list[int]] = []
    for n in numbers:
        if spans and n == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], n]
        else:
            spans.append([n])
    words = ["-".join(map(str, span)) for span in spans[:4]] + (["more"] if len(spans) > 4 else [])
    named = ["the set-up" if word == "0" else word for word in words]
    text = named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"
    return text if numbers == [0] else ("round " if len(numbers) == 1 else "rounds ") + text


def nothing_trained(records: Sequence[Round]) -> str:
    """Why no reply could be used, in one sentence."""
    kinds = {failure.kind for record in records for failure in record.failures}
    advice = "lower the learning rate, or check the method's settings and the clients' data"
    if kinds <= {"absent", "no replies"}:
        advice = "find out why no client answered"
    return (
        f"No reply of any client could be used in any round ({failure_counts(records)}), so the model is still the initial "
        f"one: {advice}."
    )
