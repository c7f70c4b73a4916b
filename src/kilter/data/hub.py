"""Fetch data sets from the Hugging Face hub as the arrays of our .npz files. Needs the extra `kilter[hub]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kilter.data.files import Arrays


@dataclass(frozen=True)
class Page:
    """The repository of a data set on the hub, and the names of its columns."""

    repo: str
    image: str = "image"
    label: str = "label"
    test: str = "test"  # name of the test split; "" if there is only "train"
    group: str = ""  # column of the natural client
    mode: str = "L"  # mode of PIL: "L" grey, "RGB" colour


def fetch(page: Page) -> Arrays:
    """x_train, y_train, x_test, y_test and classes; or x, y and group if the hub has no test split."""
    from datasets import load_dataset

    parts = {"_train": "train", "_test": page.test} if page.test else {"": "train"}
    arrays: Arrays = {}
    for suffix, name in parts.items():
        rows = load_dataset(page.repo, split=name)
        arrays["x" + suffix] = images(rows, page)
        arrays["y" + suffix] = np.asarray(rows[page.label])
        if page.group:
            arrays["group" + suffix] = np.asarray(rows[page.group])
        names = getattr(rows.features[page.label], "names", None)
        if names:
            arrays["classes"] = np.array(names)
    return arrays


def images(rows: Any, page: Page) -> NDArray[np.uint8]:
    """(N, H, W) grey or (N, H, W, 3) colour bytes."""
    first = np.asarray(rows[0][page.image].convert(page.mode))
    out = np.empty((len(rows), *first.shape), dtype=np.uint8)
    for at, row in enumerate(rows):
        out[at] = np.asarray(row[page.image].convert(page.mode))
    return out
