"""Save an ensemble of models as one safetensors file; load it from there or from the folder of a FEDSBME run."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from kilter.blocks.ensemble import Ensemble
from kilter.errors import Mistake
from kilter.records import wire
from kilter.records.run_folder import CHECKPOINT, write


def save(path: str | Path, e: Ensemble) -> None:
    """Write an ensemble to one file: `save("ensemble.safetensors", result.state["ensemble"])`."""
    write(Path(path), wire.encode(e))


def load(path: str | Path) -> Ensemble:
    """Read an ensemble from a file that `save` wrote, or from a run folder."""
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
            f"'{path}' holds no ensemble: use a file that kilter.records.ensemble_file.save wrote, or a run of fedsbme."
        ) from None
    return cast(Ensemble, ensemble)
