"""Kilter as an NVFlare job, with its Collab API: `FlareServer` leads the run, `FlareSite` answers at each site (docs/engines.md).

A site's name is the one NVFlare provisioned: the server calls a client by it, and a site answers only to a call whose origin is
the server. Both classes must be on the class allow-list of whoever runs them; no code travels with the job.
"""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path
from typing import Any

from nvflare.collab import collab
from rich.console import Console

from kilter.engines.nvflare_transport import CallTransport
from kilter.engines.settings import RunSettings, make_site
from kilter.engines.site_endpoint import answer_letter, refuse
from kilter.errors import Mistake
from kilter.net.site import Site
from kilter.net.tls import Identity
from kilter.records.toml_file import read_toml

log = logging.getLogger("kilter.net")

SETTINGS = "kilter.toml"  # in the folder `local` of a site's startup kit


class FlareServer:
    """The run: `settings` as in docs/engines.md."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    @collab.main  # type: ignore[untyped-decorator]
    def lead(self) -> None:
        """Lead the run. The job is finished when this returns, and has failed when it raises."""
        run = RunSettings.read(self.settings).server_run()
        sites = {one.name: one for one in collab.clients}
        missing = [name for name in run.sites if name not in sites]
        if missing:
            raise Mistake(f"NVFlare's job does not run at {', '.join(missing)}.")

        def call(name: str, letter: bytes) -> Any:
            return sites[name](timeout=run.deadline).visit(letter)

        run.run(CallTransport(call, run.sites), "server", Console(file=sys.stderr, highlight=False))


class FlareSite:
    """This site, as its own settings describe it; created when it is first asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # NVFlare answers calls in many threads
        self._site: Site | None = None

    @collab.publish  # type: ignore[untyped-decorator]
    def visit(self, letter: bytes) -> bytes:
        """Answer one letter of the server."""
        if collab.caller != "server":
            return refuse("only the server may ask", Mistake(f"{collab.caller} asked, and only the server may."))
        with self._lock:
            if self._site is None:
                try:
                    self._site = _site(collab.workspace, collab.site_name)
                except Exception as e:
                    return refuse("its settings do not work; see that site's log", e)
            return answer_letter(self._site, letter)


def _site(workspace: Any, name: str) -> Site:
    """The site of this startup kit; the kit's certificate vouches for its key for sealed letters."""
    kit = Identity.read(Path(workspace.get_startup_kit_dir()), ("client.key", "client.crt", "rootCA.pem"), strict=False)
    return make_site(read_toml(Path(workspace.get_site_config_dir()) / SETTINGS), name, kit)
