"""What may be wrong with a user's arrays, for the first lines of a run: they have no schema, and nothing prepares them."""

from __future__ import annotations

from torch import Tensor

LARGE = 100.0  # larger values make a learning rate that suits standardised rows too large


def array_notes(x: Tensor, y: Tensor, names: int, task: str) -> tuple[str, ...]:
    """Notes about classes that no row has, and about large values. `names` counts the classes that labels number, or is 0."""
    notes = []
    absent = sorted(set(range(names)) - set(y.unique().tolist())) if names else []
    if absent:
        shown = ", ".join(map(str, absent[:5])) + (", ..." if len(absent) > 5 else "")
        notes.append(f"No row has class {shown}: labels of arrays count from 0, so the model has outputs for it.")
    if x.is_floating_point() and task not in ("text", "next-token"):
        largest = max((float(part.abs().max()) for part in x.split(65_536)), default=0.0)
        if largest > LARGE:
            notes.append(f"x has values up to {largest:.3g}. Arrays are not standardised: scale them, or save a table.")
    return tuple(notes)
