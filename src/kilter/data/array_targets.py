"""The targets of arrays: classes, numbers, times with events, several labels, masks or next tokens. And the groups of rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kilter.data.files import AnyArray, Arrays
from kilter.data.targets import TASKS, Targets, from_numbers, next_tokens
from kilter.errors import Mistake


def array_targets(name: str, y: AnyArray, class_names: AnyArray | None, task: str, x: Tensor) -> Targets:
    """The targets of arrays, for any task."""
    classes = () if class_names is None else tuple(str(c) for c in class_names)
    if task == "next-token":
        return Targets(next_tokens(x.numpy()), np.zeros(len(x), dtype=np.int64), ("token",))
    if task in TASKS:
        if y.dtype.kind not in "iufb" or not np.isfinite(y.astype(np.float64)).all():
            raise Mistake(f"Data '{name}': the targets of the task {task} must be finite numbers, not {y.dtype}.")
        return from_numbers(task, y.astype(np.float64), "", classes)
    if task == "segmentation":
        if y.ndim != 3 or y.shape[1:] != tuple(x.shape[2:]):
            raise Mistake(f"Data '{name}': segmentation needs a class for each pixel, and y has the shape {y.shape}.")
        flat, classes = labels(name, y.reshape(-1), class_names)
        masks = flat.reshape(y.shape)
        counts = np.stack([(masks == c).sum((1, 2)) for c in range(1, len(classes))], axis=1)
        strata = np.where(counts.sum(1) > 0, counts.argmax(1) + 1, 0).astype(np.int64)  # the largest class of an image
        return Targets(masks, strata, classes)
    numbers, classes = labels(name, y, class_names)
    return Targets(numbers, numbers, classes)


def labels(name: str, y: AnyArray, class_names: AnyArray | None) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Class numbers 0..C-1 and class names. Labels that are names are numbered in the order of `class_names`, or sorted."""
    classes = None if class_names is None else tuple(str(c) for c in class_names)
    if y.dtype.kind in "US":
        words = y.astype(str)
        names = classes or tuple(np.unique(words).tolist())
        unlisted = sorted(set(words.tolist()) - set(names))
        if unlisted:
            raise Mistake(
                f"Data '{name}': label '{unlisted[0]}' is not among the classes {', '.join(names)}: "
                "correct one or the other."
            )
        number = {word: at for at, word in enumerate(names)}
        return np.array([number[word] for word in words.tolist()], dtype=np.int64), names
    if y.dtype.kind not in "iufb":
        raise Mistake(f"Data '{name}': labels are of type {y.dtype}: give class numbers 0, 1, 2, ... or names.")
    if y.dtype.kind == "f" and not (np.isfinite(y).all() and (y == np.floor(y)).all()):
        raise Mistake(
            f"Data '{name}': a label is missing or not a whole number: give class numbers 0, 1, 2, ... or names."
        )
    if (y < 0).any():
        raise Mistake(f"Data '{name}': label {int(y.min())} is negative: number the classes 0, 1, 2, ....")
    top = int(y.max())
    if classes is not None and top >= len(classes):
        raise Mistake(
            f"Data '{name}': label {top} is out of range, there are {len(classes)} classes (0..{len(classes) - 1})."
        )
    if classes is None and top >= max(1000, len(y)):
        raise Mistake(f"Data '{name}': label {top} is too large to be a class number: number the classes 0, 1, 2, ....")
    return y.astype(np.int64), classes or tuple(str(c) for c in range(top + 1))


def in_listed_order(name: str, arrays: Arrays, listed: tuple[str, ...] | None) -> Arrays:
    """The arrays with the listed classes in place of their own. Class numbers that refer to names of their own are renumbered."""
    if listed is None:
        return arrays
    own = tuple(str(c) for c in arrays.get("classes", ()))
    are_numbers = listed == tuple(str(c) for c in range(len(listed)))
    renumbered: Arrays = {}
    for key in ("y", "y_train", "y_test") if own and own != listed and not are_numbers else ():
        if key not in arrays or arrays[key].dtype.kind in "US":
            continue
        if arrays[key].ndim > 1:
            raise Mistake(
                f"Data '{name}' has the classes {', '.join(own)}, not {', '.join(listed)}: give it the same ones."
            )
        used = [own[at] for at in labels(name, arrays[key], arrays["classes"])[0]]
        foreign = sorted(set(used) - set(listed))
        if foreign:
            raise Mistake(f"Data '{name}' has the class '{foreign[0]}', which is not among {', '.join(listed)}.")
        renumbered[key] = np.array([listed.index(c) for c in used], dtype=np.int64)
    return {**arrays, **renumbered, "classes": np.array(listed)}


def natural_groups(name: str, group: AnyArray, listed: AnyArray | None) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Group numbers and names."""
    if group.dtype.kind not in "iuUSb":
        raise Mistake(f"Data '{name}': groups are of type {group.dtype}: give whole numbers or names.")
    if listed is not None and group.dtype.kind in "iu":
        if int(group.min()) < 0 or int(group.max()) >= len(listed):
            raise Mistake(f"Data '{name}': a group number is outside 0..{len(listed) - 1}, the range of group_names.")
        return group.astype(np.int64), tuple(str(g) for g in listed)
    names, numbers = np.unique(group.astype(str) if group.dtype.kind == "S" else group, return_inverse=True)
    return numbers.astype(np.int64), tuple(str(g) for g in names.tolist())
