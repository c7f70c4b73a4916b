"""The models that a site has at the end of a run: in a folder of its own, so that `kilter predict` works without the network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kilter.core import Params
from kilter.data.preparation import FILE as PREPARATION
from kilter.data.preparation import AnyPreparation, Preparation
from kilter.records.model_info import CARD, FILE, PERSONAL, ModelInfo
from kilter.records.run_folder import write, write_model


def save_models(
    folder: Path,
    models: Mapping[str, tuple[Params, Mapping[str, str]]],
    card: str,
    preparation: AnyPreparation | None,
    info: ModelInfo,
) -> None:
    """Write these models (by file: parameters and their names in the module), how to build and use them, and the card."""
    (folder / PERSONAL).mkdir(mode=0o700, parents=True, exist_ok=True)
    for file, (model, names) in models.items():
        write_model(folder / file, model, names)
    write(folder / CARD, card)
    write(folder / FILE, info.text())
    if isinstance(preparation, Preparation):
        write(folder / PREPARATION, preparation.text())
        write(folder / "schema.toml", preparation.schema.text())
