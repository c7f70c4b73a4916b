"""Arrays of several inputs: x.image and x.table in place of x. They lie side by side in a row, in the order of their names."""

from __future__ import annotations

from math import prod

import numpy as np

from kilter.data.files import AnyArray, Arrays
from kilter.data.preparation import PlainInput
from kilter.errors import Mistake

PARTS = ("x", "x_train", "x_test")


def join_inputs(name: str, arrays: Arrays) -> tuple[Arrays, tuple[PlainInput, ...]]:
    """The arrays with x in place of x.NAME (and x_train, x_test), and what lies in a row. Without such names, nothing changes."""
    if not any(key.startswith(tuple(f"{part}." for part in PARTS)) for key in arrays):
        return arrays, ()
    joined: Arrays = {}
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for part in PARTS:
        own = {
            key.partition(".")[2]: arrays[key] for key in sorted(arrays) if key.partition(".")[0] == part and "." in key
        }
        if not own:
            continue
        if part in arrays:
            raise Mistake(f"Data '{name}' has an array '{part}' and arrays '{part}.NAME': use one or the other.")
        rows = {key: len(array) for key, array in own.items()}
        if len(set(rows.values())) > 1:
            listed = ", ".join(f"{part}.{key} has {count}" for key, count in rows.items())
            raise Mistake(
                f"Data '{name}': arrays differ in their number of rows ({listed}): give one entry for each row."
            )
        joined[part] = np.concatenate([_flat(name, f"{part}.{key}", array) for key, array in own.items()], axis=1)
        shapes[part] = {key: tuple(array.shape[1:]) or (1,) for key, array in own.items()}
    first, *others = shapes.values()
    if any(other != first for other in others):
        raise Mistake(f"Data '{name}': x_train and x_test have inputs of other names or shapes: use the same in both.")
    rest = {key: array for key, array in arrays.items() if key.partition(".")[0] not in PARTS}
    return {**rest, **joined}, tuple((key, shape, 0, 0) for key, shape in first.items())


def _flat(name: str, key: str, array: AnyArray) -> AnyArray:
    if array.dtype.kind not in "iufb" or array.ndim == 0 or not prod(array.shape):
        raise Mistake(
            f"Data '{name}': {key} has type {array.dtype} and shape {array.shape}: give numbers, one entry a row."
        )
    numbers = array.reshape(len(array), -1).astype(np.float32)
    return numbers / 255 if array.dtype == np.uint8 and array.ndim > 2 else numbers  # bytes of images
