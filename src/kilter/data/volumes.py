"""Volumes: one .npy or .nii.gz file each. Slices become channels, so every network for images can read them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kilter.data.files import AnyArray
from kilter.errors import Mistake

SUFFIXES = (".npy", ".nii", ".nii.gz")


def is_volume(path: Path) -> bool:
    """Whether this file holds a volume."""
    return path.name.lower().endswith(SUFFIXES)


def read_volume(path: Path) -> AnyArray:
    """(Slices, height, width): bytes as they are, anything else standardised by its own mean and deviation."""
    volume: AnyArray = np.load(path, allow_pickle=False) if path.suffix == ".npy" else _read_nifti(path)
    if volume.ndim == 2:
        volume = volume[None]
    if volume.ndim != 3 or volume.dtype.kind not in "iufb" or volume.size == 0:
        raise ValueError(f"it has type {volume.dtype} and shape {volume.shape}, not (slices, height, width)")
    if volume.dtype == np.uint8:
        return volume
    numbers = volume.astype(np.float64)
    if not np.isfinite(numbers).all():
        raise ValueError("it has values that are not finite")
    return ((numbers - numbers.mean()) / (numbers.std() or 1.0)).astype(np.float32)


def _read_nifti(path: Path) -> AnyArray:
    try:
        import nibabel
    except ModuleNotFoundError:
        raise Mistake(
            f"'{path}' is a NIfTI file, which needs the library nibabel: `pip install 'kilter[volumes]'`."
        ) from None
    return np.moveaxis(np.asarray(nibabel.Nifti1Image.from_filename(path).dataobj), -1, 0)  # slices first
