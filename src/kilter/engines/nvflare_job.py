"""The folder of an NVFlare job, to be submitted with `nvflare job submit`:

    python -m kilter.engines.nvflare_job run.toml job

`run.toml` has the settings of the run. The job names classes and ships no code: sites run what is installed there, if their
class allow-list has it. (NVFlare's own export of a recipe would ship all our files, and need the right to bring code.)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kilter.engines.settings import RunSettings
from kilter.errors import Mistake
from kilter.net.tls import words
from kilter.records.toml_file import read_toml

PATIENCE = 300.0  # seconds in which all sites must have started the job


def write(settings: dict[str, Any], folder: Path) -> None:
    """The job of a run with these settings."""
    sites = words(RunSettings.read(settings).sites)
    files = {
        "meta.json": {
            "name": "kilter",
            "resource_spec": {},
            "min_clients": len(sites),
            "mandatory_clients": sites,
            "deploy_map": {"app": ["server", *sites]},
        },
        "app/config/config_fed_server.json": {
            "format_version": 2,
            "workflows": [
                {
                    "id": "controller",
                    "path": "nvflare.collab.runtime.controller.CollabController",
                    "args": {"server_obj_id": "_server", "collab_obj_ids": [], "sync_task_timeout": PATIENCE},
                }
            ],
            "components": [
                {"id": "_server", "path": "kilter.engines.nvflare.FlareServer", "args": {"settings": settings}}
            ],
        },
        "app/config/config_fed_client.json": {
            "format_version": 2,
            "executors": [
                {
                    "tasks": ["*"],
                    "executor": {
                        "path": "nvflare.collab.runtime.executor.CollabExecutor",
                        "args": {"client_obj_id": "_client", "collab_obj_ids": []},
                    },
                }
            ],
            "components": [{"id": "_client", "path": "kilter.engines.nvflare.FlareSite", "args": {}}],
        },
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    try:
        if len(sys.argv) != 3:
            raise Mistake("Say the settings of the run and a folder: python -m kilter.engines.nvflare_job run.toml job")
        write(read_toml(Path(sys.argv[1])), Path(sys.argv[2]))
    except Mistake as e:
        print(e, file=sys.stderr)
        sys.exit(2)
