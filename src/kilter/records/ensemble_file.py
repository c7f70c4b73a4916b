"""An ensemble of models as one safetensors file, or from the folder of a FEDSBME run."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from kilter.blocks.ensemble import Ensemble
from kilter.errors import Mistake
from kilter.records import wire
from kilter.records.run_folder import CHECKPOINT, write


def save(path: str | Path, e: Ensemble) -> None:
    """One safetensors file: `save("ensemble.safetensors", result.state["ensemble"])`."""
    write(Path(path), wire.encode(e))


def load(path: str | Path) -> Ensemble:
    """What `save` wrote, or the ensemble of a run by its folder."""
    path = Path(path)
    try:
        if path.is_dir():
            ensemble = wire.decode((path / CHECKPOINT).read_bytes())["progress"]["state"]["ensemble"]
        else:
            ensemble = wire.decode(path.read_bytes())
        if ensemble.keys() != Ensemble.__annotations__.keys():
            raise KeyError
    except (OSError, LookupError, TypeError, AttributeError, wire.Malformed):
        raise Mistake(
            f"'{path}' holds no ensemble: give a file that kilter.records.ensemble_file.save wrote, or a run of fedsbme."
        ) from None
    return cast(Ensemble, ensemble)
