"""3x3 convolutions with fewer multiplications: the minimal algorithms of Toom, Cook and Winograd.

A tile of (m+2) x (m+2) inputs gives m x m outputs y = A [(G w G') * (B x B')] A'. The product *, summed over channels, is a matrix
product for each of the (m+2)^2 places in a tile: for m = 4, 36 multiplications instead of 144. Gradients use the same three
matrices.

The points determine the rounding error. Relative to float64 it is about 4e-7 for m = 2 and 1e-6 for m = 4; torch's kernels have
2e-7 to 2e-6. After two steps of ResNet-18, both are about 1e-2 of the update away from float64 (a slow test measures it).
"""

from __future__ import annotations

from functools import cache
from math import inf, prod

import torch
from torch import Tensor

POINTS = {2: (0.0, 1.0, -1.0), 4: (0.0, 2 / 3, -2 / 3, 3 / 2, -3 / 2)}  # and infinity
BLOCK = 1 << 20  # numbers of transformed input at a time, so that they stay in the cache
LARGEST = 1 << 23  # numbers of one transformed row: beyond that, memory is short
GAIN = 1.2  # use it only for this many times fewer multiplications


def tile(rows: int, high: int, wide: int, inputs: int, outputs: int) -> int:
    """The m with the fewest multiplications for this many outputs and channels; 0: the usual algorithm is as good."""

    def work(m: int) -> float:
        """Multiplications per input and output channel: products, transforms of inputs and outputs, transforms of filters."""
        places, tiles = (m + 2) ** 2, -(-high // m) * -(-wide // m)
        if places * tiles * max(inputs, outputs) > LARGEST:
            return inf
        return places * (rows * tiles * (1 + places / outputs + m * m / inputs) + 64)

    best = min(POINTS, key=work)
    return best if GAIN * work(best) < 9 * rows * high * wide else 0


@cache
def matrices(m: int) -> tuple[Tensor, Tensor, Tensor]:
    """G, B and A for both directions at once: of a filter's 9, a tile's (m+2)^2, and for its m^2 outputs."""
    points = POINTS[m]
    at = torch.tensor(points, dtype=torch.float64)
    a, g = torch.zeros(m, m + 2, dtype=torch.float64), torch.zeros(m + 2, 3, dtype=torch.float64)
    a[:, :-1] = at ** torch.arange(m)[:, None]
    scale = torch.tensor([prod(p - q for q in points if q != p) for p in points])
    g[:-1] = at[:, None] ** torch.arange(3) / scale[:, None]
    a[-1, -1] = g[-1, -1] = 1  # infinity
    # B is what makes it a convolution: output i is the sum over k of filter k times input i + k.
    products = (a[:, None] * g.t()).reshape(m * 3, m + 2)
    wanted = torch.zeros(m, 3, m + 2, dtype=torch.float64)
    for i in range(m):
        wanted[i, :, i : i + 3] = torch.eye(3)
    b = torch.linalg.lstsq(products, wanted.view(m * 3, m + 2)).solution
    g, b, a = (torch.kron(k, k).float() for k in (g, b, a))
    return g, b, a


def convolve(x: Tensor, w: Tensor, padding: tuple[int, int], m: int) -> Tensor:
    """x (rows, in, height, width) with filters w (out, in, 3, 3)."""
    g, _, _ = matrices(m)
    return _convolve(x, torch.mm(g, _flat(w)).view(-1, *w.shape[:2]).transpose(1, 2), padding, m)


def input_gradient(grad: Tensor, w: Tensor, padding: tuple[int, int], m: int) -> Tensor:
    """Of a convolution with this padding: its output's gradient with the filters turned by half a circle."""
    g, _, _ = matrices(m)
    return _convolve(grad, torch.mm(g.flip(1), _flat(w)).view(-1, *w.shape[:2]), (2 - padding[0], 2 - padding[1]), m)


def weights_gradient(x: Tensor, grad: Tensor, padding: tuple[int, int], m: int) -> Tensor:
    """Of a convolution with this padding: the products' gradient is that of the outputs, each at every place of its tile."""
    g, _, a = matrices(m)
    rows, outputs, high, wide = grad.shape
    down, across = -(-high // m), -(-wide // m)
    padded = grad.new_zeros(rows, down * m, across * m, outputs)
    padded[:, :high, :wide] = grad.permute(0, 2, 3, 1)
    products = x.new_zeros(len(g), outputs, x.shape[1])
    for part in _parts(rows, down * across * max(x.shape[1], outputs) * len(g)):
        of = padded[part].view(-1, down, m, across, m, outputs).permute(2, 4, 0, 1, 3, 5).reshape(m * m, -1)
        spread = torch.mm(a.t(), of).view(len(g), -1, outputs)
        products.baddbmm_(spread.transpose(1, 2), _tiles(x[part], (down, across), padding, m))
    flat = torch.mm(g.t(), products.view(len(g), -1)).view(3, 3, outputs, -1)
    return flat.permute(2, 0, 1, 3).contiguous().permute(0, 3, 1, 2)


def _convolve(x: Tensor, filters: Tensor, padding: tuple[int, int], m: int) -> Tensor:
    """With transformed filters (place, in, out)."""
    _, _, a = matrices(m)
    rows, inputs, height, width = x.shape
    outputs = filters.shape[2]
    high, wide = height + 2 * padding[0] - 2, width + 2 * padding[1] - 2
    down, across = -(-high // m), -(-wide // m)
    out = x.new_empty(rows, down, m, across, m, outputs)
    for part in _parts(rows, down * across * max(inputs, outputs) * len(filters)):
        product = torch.bmm(_tiles(x[part], (down, across), padding, m), filters)
        outs = torch.mm(a, product.view(len(filters), -1)).view(m, m, -1, down, across, outputs)
        out[part] = outs.permute(2, 3, 0, 4, 1, 5)
    whole = out.view(rows, down * m, across * m, outputs)[:, :high, :wide]
    return whole.contiguous().permute(0, 3, 1, 2)


def _tiles(x: Tensor, count: tuple[int, int], padding: tuple[int, int], m: int) -> Tensor:
    """The input's tiles, transformed: (place, tile, channel)."""
    _, b, _ = matrices(m)
    rows, channels, height, width = x.shape
    (above, left), (down, across) = padding, count
    framed = x.new_zeros(rows, down * m + 2, across * m + 2, channels)
    seen = framed[:, above : above + height, left : left + width]
    seen.copy_(x.permute(0, 2, 3, 1)[:, : seen.shape[1], : seen.shape[2]])
    per_row, per_line, per_place, _ = framed.stride()
    shape = (m + 2, m + 2, rows, down, across, channels)
    tiles = framed.as_strided(shape, (per_line, per_place, per_row, m * per_line, m * per_place, 1))
    return torch.mm(b, tiles.reshape(len(b), -1)).view(len(b), -1, channels)


def _flat(w: Tensor) -> Tensor:
    """Filters as (9, out * in)."""
    return w.permute(2, 3, 0, 1).reshape(9, -1)


def _parts(rows: int, each: int) -> list[slice]:
    """The rows in blocks; each takes so many numbers."""
    size = max(1, BLOCK // each)
    return [slice(k, k + size) for k in range(0, rows, size)]
