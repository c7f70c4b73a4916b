"""What an engine's own configuration says: of a run what `kilter serve` would be told, of a site what `kilter join` would."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kilter import data as kdata
from kilter.errors import Mistake, unknown
from kilter.experiment import Experiment
from kilter.net.server_run import Lead
from kilter.net.site import Site
from kilter.net.terms import Willing
from kilter.net.tls import Identity, words

RUN = {"experiment": "", "sites": "", "out": "", "data": "", "quorum": 0, "deadline": 600.0, "grace": 90.0}
SITE = ("name", "data", "state-dir", "tls", "allow-methods", "allow-steps", "trust", "weights")


def run_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A run's settings, checked as far as one can without its files."""
    for key in settings:
        if key not in RUN:
            raise unknown("setting of a run", key, RUN)
    given: dict[str, Any] = {**RUN, **settings}
    for key in ("experiment", "sites", "out"):
        if not given[key]:
            raise Mistake(f"A run's settings must say {key}.")
    try:
        given |= {"quorum": int(given["quorum"]), "deadline": float(given["deadline"]), "grace": float(given["grace"])}
    except (TypeError, ValueError):
        raise Mistake("quorum, deadline and grace of a run are numbers.") from None
    return given


def lead_of(settings: Mapping[str, Any]) -> Lead:
    """The run that these settings describe."""
    given = run_of(settings)
    return Lead(
        Experiment.read(str(given["experiment"])),
        words(str(given["sites"])),
        given["quorum"],
        given["deadline"],
        given["grace"],
        str(given["data"]),
        str(given["out"]),
    )


def site_of(settings: Mapping[str, Any], name: str, identity: Identity | None = None) -> Site:
    """The site that these settings describe, under the name that the engine knows it by."""
    for key in settings:
        if key not in SITE:
            raise unknown("setting of a site", key, SITE)
    given = {key: str(settings.get(key, "")) for key in SITE}
    for key in ("data", "state-dir"):
        if not given[key]:
            raise Mistake(f"A site's settings must say its {key}.")
    me = Identity.read(Path(given["tls"])) if given["tls"] else identity
    if me is not None and me.name != name:
        raise Mistake(f"This site is '{name}', and the certificate's name is '{me.name}'.")
    willing = Willing(
        words(given["allow-methods"]), words(given["allow-steps"]), tuple(words(given["trust"])), given["weights"]
    )
    return Site(name, kdata.load(given["data"]), Path(given["state-dir"]), willing, given["data"], me)
