"""Augmentation of training batches. Random numbers are the client's own: the same alone and in a stack."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from kilter.errors import Mistake, unknown

Augmentation = Callable[[Tensor], Tensor]
SHIFT = 8  # images are moved by up to 1/8 of their size
STRENGTH = 0.2  # of changes of brightness and contrast
MIXUP = "mixup"


def flip(x: Tensor) -> Tensor:
    """Mirror half of the images left to right."""
    mirrored = torch.rand(x.shape[0], device=x.device) < 0.5
    return torch.where(mirrored[:, None, None, None], x.flip(-1), x)


def crop(x: Tensor) -> Tensor:
    """Move every image by a random number of pixels; the edge is filled with zeros."""
    most = max(x.shape[-1] // SHIFT, 1)
    size = 2 * most + 1
    padded = pad(x, (most, most, most, most))
    down, across = (
        (torch.rand(x.shape[0], device=x.device) * size).long().clamp(max=size - 1)[:, None]
        + torch.arange(x.shape[dim], device=x.device)
        for dim in (-2, -1)
    )
    rows = padded.gather(2, down[:, None, :, None].expand(-1, x.shape[1], -1, padded.shape[3]))
    return rows.gather(3, across[:, None, None, :].expand(-1, x.shape[1], x.shape[2], -1))


def colour(x: Tensor) -> Tensor:
    """Change brightness and contrast of every image at random."""
    shape = (x.shape[0], 1, 1, 1)
    bright, contrast = (1 + STRENGTH * (2 * torch.rand(shape, device=x.device) - 1) for _ in range(2))
    mean = x.mean((1, 2, 3), keepdim=True)
    return ((x - mean) * contrast + mean) * bright


IMAGES: dict[str, Augmentation] = {"flip": flip, "crop": crop, "colour": colour}


def parse_augmentation(text: str) -> tuple[list[Augmentation], bool]:
    """The augmentations of images by name, and whether rows are mixed (mixup)."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in (*IMAGES, MIXUP):
            raise unknown("augmentation", name, [*IMAGES, MIXUP])
    return [IMAGES[name] for name in names if name != MIXUP], MIXUP in names


def check_augmentation(text: str, shape: tuple[int, ...], kind: str, classes: frozenset[str]) -> None:
    """Refuse augmentations that these rows or this task cannot have."""
    images, mixes = parse_augmentation(text)
    if images and len(shape) != 3:
        raise Mistake(
            f"Only images can be flipped, cropped or coloured, and a row has the shape {shape}: see --augment."
        )
    if images and kind == "segmentation":
        raise Mistake("The masks of a segmentation would not follow its images: leave out --augment.")
    if mixes and kind not in (*classes, "regression", "multi-label"):
        raise Mistake(f"mixup mixes rows with their losses, which the task {kind} does not allow: leave it out.")


def mixed_losses(losses: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Mixup (Zhang et al. 2018) with uniform shares: each row is mixed with another, and so are the losses of both targets."""
    share = torch.rand((), device=x.device)
    order = torch.randperm(x.shape[0], device=x.device)
    mixed = share * x + (1 - share) * x.index_select(0, order)
    return share * losses(mixed, y) + (1 - share) * losses(mixed, y.index_select(0, order))
