"""A small U-Net (Ronneberger, Fischer, Brox 2015) for segmentation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, max_pool2d

from kilter.errors import Mistake
from kilter.models.small import Shape, image


class Encoder(nn.Module):
    """Down by halves and up again, with a shortcut at every size. Returns `width` features for each pixel."""

    def __init__(self, channels: int, width: int, depth: int) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(_double(a, b) for a, b in zip([channels, *widths], widths, strict=False))
        self.up = nn.ModuleList(_double(widths[k] + widths[k + 1], widths[k]) for k in reversed(range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width, height, width of the image)"""
        kept: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(max_pool2d(x, 2) if level else x)
            kept.append(x)
        for block, same in zip(self.up, reversed(kept[:-1]), strict=True):
            x = block(torch.cat([interpolate(x, scale_factor=2.0, mode="nearest"), same], 1))
        return x


class SegmentationNetwork(nn.Module):
    """A body that computes features of pixels, and a head that turns them into logits."""

    def __init__(self, body: nn.Module, head: nn.Conv2d) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x: Tensor) -> Tensor:
        """Logits, (batch, classes, height, width)."""
        logits: Tensor = self.head(self.body(x))
        return logits


def unet(shape: Shape, classes: int, width: int = 8, depth: int = 2) -> SegmentationNetwork:
    """U-Net with GroupNorm for segmentation; `width` channels at full size, twice as many at each of `depth` halvings."""
    channels, height, across = image(shape)
    if height % (1 << depth) or across % (1 << depth):
        raise Mistake(
            f"A U-Net of depth {depth} needs images whose sides are multiples of {1 << depth}, not {height}x{across}: "
            "use another --image-size or unet:8:1."
        )
    return SegmentationNetwork(Encoder(channels, width, depth), nn.Conv2d(width, classes, 1))


def _double(inputs: int, outputs: int) -> nn.Sequential:
    """Twice: 3x3 convolution, GroupNorm, ReLU."""
    groups = 4 if outputs % 4 == 0 else 1
    parts: list[nn.Module] = []
    for a in (inputs, outputs):
        parts += [nn.Conv2d(a, outputs, 3, padding=1), nn.GroupNorm(groups, outputs), nn.ReLU()]
    return nn.Sequential(*parts)
