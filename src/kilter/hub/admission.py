"""What a submitted experiment or study may contain. Submitters are known, but their files are data: they name no file at the hub.

Runs in a process of its own, because reading an experiment imports torch, which the hub does not.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass

from kilter.errors import Mistake, unknown
from kilter.experiment import FILES, Experiment
from kilter.net.names import printable
from kilter.plugins import is_file_spec
from kilter.study.grid import Study

MOST_RUNS = 10_000  # of a study


@dataclass(frozen=True)
class Admitted:
    """What the hub needs to know about a submission."""

    kind: str
    name: str
    rounds: int
    data: str  # the hub's data, by name
    refused: str = ""

    def text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: str) -> Admitted:
        return Admitted(**json.loads(text))


def admit(text: str, preset: str, data: str, own_data: Collection[str]) -> Admitted:
    """Check a TOML text; a Mistake says what the hub does not accept."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise Mistake(f"The submitted file is not TOML: {printable(str(e))}.") from None
    _check_names(values)
    is_study = "methods" in values
    if is_study:
        study = Study.of(values, preset)
        experiments = [job.experiment for job in study.jobs()]
        if len(experiments) > MOST_RUNS:
            raise Mistake(f"The study has {len(experiments)} runs, and a hub accepts {MOST_RUNS}.")
    elif preset:
        raise Mistake("Only studies have presets: leave out --preset.")
    else:
        experiments = [Experiment.of(values)]
    chosen = {_data_name(each.data, data, own_data) for each in experiments}
    if len(chosen) > 1:
        raise Mistake(f"The study names several data sets ({', '.join(sorted(chosen))}): submit one study for each.")
    name = study.name if is_study else experiments[0].method
    rounds = 0 if is_study else experiments[0].rounds
    return Admitted("study" if is_study else "experiment", name, rounds, chosen.pop())


def _data_name(named: str, wanted: str, own: Collection[str]) -> str:
    """The hub's data for an experiment: what the submitter says, or what the experiment names."""
    if wanted == "none":
        return "none"
    name = wanted or named
    if name in own:
        return name
    if not own:
        raise Mistake("This hub has no data of its own: submit with --data none.")
    known = unknown("data set of the hub", name, own)
    raise Mistake(f"{known} Or submit with --data none: then the hub has no test set, and the sites evaluate.")


def _check_names(values: Mapping[str, object]) -> None:
    """No path may be named, and no code in a file."""
    for key, text in _texts(values):
        if is_file_spec(text):
            raise Mistake(
                f"'{printable(text, 80)}' is a file, and a hub runs no submitted code: install it at the hub and the sites "
                "as a package with an entry point kilter.methods."
            )
        if key in FILES and key != "data" and text:
            raise Mistake(f"{key} names a file, which the hub does not have: leave it out.")
        if text.startswith("edges:"):
            raise Mistake("edges:FILE names a file, which the hub does not have: choose another topology.")


def _texts(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _texts(part, str(name))
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part, key)
    elif isinstance(value, str):
        yield key, value


def main() -> None:
    """Read a submission from standard input, as JSON, and print what the hub needs to know about it."""
    spec = json.load(sys.stdin)
    try:
        admitted = admit(spec["text"], spec["preset"], spec["data"], spec["own_data"])
    except Mistake as e:
        admitted = Admitted("", "", 0, "", str(e))
    print(admitted.text())


if __name__ == "__main__":
    main()
