"""What methods exhibit, as small plain records for a report: numbers by name, a histogram with its extreme rows, pictures."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from kilter.core import Node, Note
from kilter.records.types import Exhibit, Histogram, Picture

BINS = 24
EXTREMES = 4  # rows shown at each end
MOST_PICTURES = 10
LARGEST = 64  # pixels of a picture's side


def plain(node: Node, note: dict[str, object]) -> Note:
    """The note of `Node.exhibit` with an `Exhibit` in place of the values; a notice where they cannot be shown."""
    name, values = str(note["exhibit"]), note["values"]
    if isinstance(values, Mapping):
        numbers = {str(k): float(v) for k, v in values.items() if math.isfinite(v)}
        return {"exhibit": Exhibit(name, node.id, values=numbers)}
    if isinstance(values, Tensor) and values.ndim == 4:
        return {"exhibit": Exhibit(name, node.id, pictures=[picture(x) for x in values[:MOST_PICTURES]])}
    if isinstance(values, Tensor) and values.ndim == 1 and len(values) == len(node.data.train) > 0:
        return {"exhibit": _of_rows(name, node, values.detach().cpu().double())}
    return {"notice": f"'{name}' could not be exhibited"}


def _of_rows(name: str, node: Node, values: Tensor) -> Exhibit:
    """One number for each training row: its histogram, and the rows at both ends."""
    values = values[torch.isfinite(values)] if not torch.isfinite(values).all() else values
    if not len(values):
        return Exhibit(name, node.id, histogram=Histogram([], []))
    low, high = float(values.min()), float(values.max())
    counts = torch.histc(values, BINS, low, high) if high > low else torch.tensor([float(len(values))])
    edges = torch.linspace(low, high, len(counts) + 1)
    histogram = Histogram([round(float(e), 6) for e in edges], [int(c) for c in counts])
    order = values.argsort(descending=True, stable=True)
    ends = order if len(order) <= 2 * EXTREMES else torch.cat([order[:EXTREMES], order[-EXTREMES:]])
    batch = node.data.train.take(ends).batch()
    x, y = batch["x"], batch.get("y")
    captions = [
        f"{float(values[i]):.2f}" + (f", label {float(y[k]):g}" if y is not None and y.ndim == 1 else "")
        for k, i in enumerate(ends)
    ]
    if x.ndim == 4 and x.shape[1] in (1, 3):
        pictures = [picture(row, caption) for row, caption in zip(x, captions, strict=True)]
        return Exhibit(name, node.id, histogram=histogram, pictures=pictures)
    return Exhibit(name, node.id, histogram=histogram, rows=captions)


def picture(x: Tensor, caption: str = "") -> Picture:
    """A picture (channels, h, w). Floats between 0 and 1 are taken as they are, others are stretched."""
    from PIL import Image

    pixels = x.detach().cpu()
    if pixels.dtype != torch.uint8:
        pixels = torch.nan_to_num(pixels.float())
        low, high = float(pixels.min()), float(pixels.max())
        if low < 0 or high > 1:
            pixels = (pixels - low) / max(high - low, 1e-12)
        pixels = (255 * pixels).round().to(torch.uint8)
    array = pixels.permute(1, 2, 0).numpy()
    image = Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array[..., :3])
    image.thumbnail((LARGEST, LARGEST))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return Picture(base64.b64encode(buffer.getvalue()).decode(), caption)
