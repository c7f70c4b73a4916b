"""What an engine's own configuration says: for a run the options of `kilter serve`, for a site those of `kilter join`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kilter import data as kdata
from kilter.errors import Mistake, unknown
from kilter.experiment import Experiment
from kilter.net.policy import SitePolicy, narrowed
from kilter.net.server_run import ServerRun
from kilter.net.site import Site
from kilter.net.tls import Identity, words

SITE = ("name", "data", "state-dir", "tls", "policy", "allow-methods", "allow-steps", "trust", "weights")


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run behind an engine."""

    experiment: str = ""
    sites: str = ""
    out: str = ""
    data: str = ""
    quorum: int = 0
    deadline: float = 600.0
    grace: float = 90.0

    @staticmethod
    def read(settings: Mapping[str, object]) -> RunSettings:
        """Checked as far as possible without the files they name."""
        known = RunSettings.__dataclass_fields__
        for key in settings:
            if key not in known:
                raise unknown("setting of a run", key, known)
        for key in ("experiment", "sites", "out"):
            if not settings.get(key):
                raise Mistake(f"The settings of a run must name {key}.")
        text = {key: str(settings.get(key, "")) for key in ("experiment", "sites", "out", "data")}
        try:
            deadline, grace = (float(str(settings.get(key, known[key].default))) for key in ("deadline", "grace"))
            quorum = int(str(settings.get("quorum", 0)))
        except (TypeError, ValueError):
            raise Mistake("quorum, deadline and grace of a run are numbers.") from None
        return RunSettings(text["experiment"], text["sites"], text["out"], text["data"], quorum, deadline, grace)

    def server_run(self) -> ServerRun:
        """The run that these settings describe."""
        experiment = Experiment.read(self.experiment)
        return ServerRun(experiment, words(self.sites), self.quorum, self.deadline, self.grace, self.data, self.out)


def make_site(settings: Mapping[str, object], name: str, identity: Identity | None = None) -> Site:
    """The site that these settings describe, under the name that the engine knows it by."""
    for key in settings:
        if key not in SITE:
            raise unknown("setting of a site", key, SITE)
    values = {key: str(settings.get(key, "")) for key in SITE}
    for key in ("data", "state-dir"):
        if not values[key]:
            raise Mistake(f"The settings of a site must name its {key}.")
    me = Identity.read(Path(values["tls"])) if values["tls"] else identity
    if me is not None and me.name != name:
        raise Mistake(f"This site is '{name}', and the certificate's name is '{me.name}'.")
    policy = SitePolicy.read(Path(values["policy"]) if values["policy"] else None)
    policy = replace(policy, files=tuple(words(values["trust"])), weights=values["weights"])
    policy = narrowed(policy, words(values["allow-methods"]), words(values["allow-steps"]))
    return Site(name, kdata.load(values["data"], prepare=False), Path(values["state-dir"]), policy, values["data"], me)
