"""Image folders: client/class/*.png or class/*.png, with or without folders train and test, or a table of paths and labels.

Images are decoded once, into one memory-mapped file in the cache folder ($KILTER_CACHE or ~/.cache/kilter). Training reads rows
from that file, so data larger than memory works. An image that cannot be decoded is skipped, named and counted.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
from PIL import Image, ImageOps

from kilter.data.channel_moments import LARGE, channel_sums
from kilter.data.files import AnyArray
from kilter.data.holdout import Index, hold_out, hold_out_share
from kilter.data.mapped import open_mapped
from kilter.data.schema import class_order, quoted
from kilter.data.volumes import SUFFIXES as VOLUMES
from kilter.data.volumes import is_volume, read_volume
from kilter.errors import Mistake

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
GREY = {"1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "F"}  # modes of Pillow
PHOTOS = ("JPEG", "MPO", "WEBP")  # formats of cameras
ORIENTATION = 0x0112  # the tag of a photo that says how to turn it
DEFAULT_SIZE = 64  # for images of different sizes
LARGEST_SIZE = 256  # larger images are resized to DEFAULT_LARGE
DEFAULT_LARGE = 224
HEADERS = 5_000  # images whose size and mode are looked at before decoding
FORMAT = 3  # of the cache; changes with what decoding does
AHEAD = 128  # images decoded before they are written


@dataclass(frozen=True)
class ImageOptions:
    """How to read images."""

    size: str = ""  # 64 or 64x48 (height x width); empty: their own size if they have the same
    mode: str = ""  # grey or rgb; empty: grey if all are
    test_size: float = 0.0  # the share of test rows; 0: one row in five


@dataclass(frozen=True)
class ImageFile:
    """One image, and what its folders or the table say about it."""

    path: Path
    label: str
    client: str = ""
    part: str = ""  # train, test, or empty


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Decoded images with their labels and clients."""

    x: AnyArray  # (N, C, H, W), memory-mapped
    y: Index
    train: Index
    test: Index
    classes: tuple[str, ...]
    groups: Index | None
    group_names: tuple[str, ...]
    notes: tuple[str, ...]  # what was decided and what was skipped, for the first lines of a run
    sums: Index | None  # (N, C, 2), of large colour images: see channel_sums
    skipped: tuple[str, ...]  # the client of each image that cannot be read; empty where folders name none
    paths: tuple[Path, ...]  # of the images in `x`


def is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES or is_volume(path)


def from_rows(paths: Sequence[str], labels: Sequence[str], clients: Sequence[str], folder: Path) -> list[ImageFile]:
    """The images that a table lists; paths are relative to the table's folder."""
    files = [
        ImageFile(folder / path, label, client) for path, label, client in zip(paths, labels, clients, strict=True)
    ]
    missing = [str(f.path) for f in files if not f.path.is_file()]
    if missing:
        raise Mistake(f"The table lists images that do not exist: {quoted(missing, 3)}. Correct the paths.")
    return files


# Decoding -------------------------------------------------------------------------------------------------------------


def load_images(name: str, files: list[ImageFile], options: ImageOptions, classes: tuple[str, ...] | None) -> ImageSet:
    """Decode images, or find them decoded in the cache, and divide them into training and test rows."""
    if not files:
        raise Mistake(f"'{name}' has no images: put them into class/ or client/class/.")
    volumes = {is_volume(f.path) for f in files}
    if len(volumes) > 1:
        raise Mistake(f"'{name}' holds images and volumes ({', '.join(VOLUMES)}): keep one kind.")
    notes: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)  # such an image is skipped
        size, mode = ((0, 0), "") if volumes == {True} else choose_format(files, options, notes)
        x, sums, kept, skipped = _decoded(files, size, mode)
    if skipped:
        shown = "; ".join(f"'{path}' ({why})" for path, why in skipped[:3]) + (" ..." if len(skipped) > 3 else "")
        notes.append(f"Skipped {len(skipped)} of {len(files)} images that cannot be read: {shown}.")
    if not kept:
        raise Mistake(
            f"None of the {len(files)} images of '{name}' can be read, such as {notes[-1].partition(': ')[2]}"
        )
    is_kept = set(kept)
    skipped_clients = tuple(file.client for at, file in enumerate(files) if at not in is_kept)
    files = [files[at] for at in kept]
    names = classes or class_order([f.label for f in files])
    foreign = sorted({f.label for f in files} - set(names))
    if foreign:
        raise Mistake(f"'{name}': class '{foreign[0]}' is not among the classes {quoted(names)}: correct one of them.")
    place = {label: at for at, label in enumerate(names)}
    y = np.array([place[f.label] for f in files], dtype=np.int64)
    groups, group_names = _groups(files)
    train, test = _divide(name, files, y, groups, options)
    paths = tuple(file.path for file in files)
    return ImageSet(x, y, train, test, names, groups, group_names, tuple(notes), sums, skipped_clients, paths)


def _groups(files: Sequence[ImageFile]) -> tuple[Index | None, tuple[str, ...]]:
    if not files[0].client:
        return None, ()
    names, numbers = np.unique([f.client for f in files], return_inverse=True)
    return numbers.astype(np.int64), tuple(str(n) for n in names)


def _divide(
    name: str, files: Sequence[ImageFile], y: Index, groups: Index | None, options: ImageOptions
) -> tuple[Index, Index]:
    parts = np.array([f.part for f in files])
    if (parts == "").all():
        return hold_out_share(y, groups, options.test_size) if options.test_size else hold_out(y, groups)
    if options.test_size and (parts != "").any():
        raise Mistake(f"'{name}' has test rows of its own: leave out --test-size.")
    if (parts == "").any() or not {"train", "test"} <= set(parts.tolist()):
        raise Mistake(f"'{name}' needs images in folders train and test, or neither of the two.")
    train, test = np.flatnonzero(parts == "train"), np.flatnonzero(parts == "test")
    untrained = sorted({f.label for f in files if f.part == "test"} - {f.label for f in files if f.part == "train"})
    if untrained:
        raise Mistake(
            f"The test images of '{name}' have the class {quoted(untrained)}, which no training image has: move some."
        )
    return train, test


def choose_format(files: Sequence[ImageFile], options: ImageOptions, notes: list[str]) -> tuple[tuple[int, int], str]:
    """(Height, width) and the mode of Pillow, from the options or from the headers of the images."""
    sizes: set[tuple[int, int]] = set()
    modes: set[str] = set()
    frames = 0  # images with several
    looked_at = np.unique(np.linspace(0, len(files) - 1, min(len(files), HEADERS)).astype(int))
    for at in map(int, looked_at):
        try:
            with Image.open(files[at].path) as image:
                sizes.add(_size(image))
                modes.add(image.mode)
                frames += getattr(image, "is_animated", False)
        except Exception:  # a damaged file, which decoding names
            continue
    mode = {"grey": "L", "rgb": "RGB"}.get(options.mode) or ("L" if modes <= GREY else "RGB")
    notes += _losses(modes, frames)
    if len(modes) > 1 and not options.mode:
        shown = "grey" if mode == "L" else "RGB"
        notes.append(
            f"Images have several modes ({', '.join(sorted(modes))}): all become {shown}. Change it with --image-mode."
        )
    if options.size:
        return parse_size(options.size), mode
    if len(sizes) == 1 and max(next(iter(sizes))) <= LARGEST_SIZE:
        return next(iter(sizes)), mode
    side = DEFAULT_LARGE if len(sizes) == 1 else DEFAULT_SIZE
    what = "different sizes" if len(sizes) != 1 else "{}x{} pixels".format(*next(iter(sizes)))
    notes.append(f"Images have {what}: all become {side}x{side}. Change it with --image-size.")
    return (side, side), mode


def _size(image: Image.Image) -> tuple[int, int]:
    """(Height, width) of an image as a viewer shows it: cameras store some lying on their side."""
    return (image.width, image.height) if _turn(image) >= 5 else (image.height, image.width)


def _turn(image: Image.Image) -> int:
    """How a photo has to be turned: 1, not at all; from 5 on, width and height change places."""
    return int(image.getexif().get(ORIENTATION, 1)) if image.format in PHOTOS else 1


def _losses(modes: set[str], frames: int) -> list[str]:
    """What decoding leaves out, in plain words."""
    notes = []
    if modes & {"RGBA", "LA", "PA", "RGBa", "La"}:
        notes.append("Some images are transparent: what is not opaque shows the colour that is stored there.")
    if any(mode.startswith("I") for mode in modes):
        notes.append("Some images have 16 bits: 0 to 65535 become 0 to 255. Save .npy volumes to keep all of them.")
    if "F" in modes:
        notes.append(
            "Some images hold decimal numbers: each is divided by its largest. Save .npy volumes to keep them."
        )
    if frames:
        notes.append(
            f"{frames} images have several frames or pages: only the first is read. Save .npy volumes to keep all."
        )
    return notes


def parse_size(text: str) -> tuple[int, int]:
    """(Height, width) from 64 or 64x48."""
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() and 1 <= int(side) <= 4096 for side in sides):
        raise Mistake(f"--image-size takes a number of pixels, such as 64 or 64x48 (height x width), not '{text}'.")
    return int(sides[0]), int(sides[-1])


def decode(path: Path, size: tuple[int, int], mode: str) -> AnyArray:
    """One image as bytes of shape (channels, height, width), or a volume."""
    if is_volume(path):
        return read_volume(path)
    with Image.open(path) as image:
        if image.format == "JPEG" and (image.mode != mode or image.width >= 4 * size[1]):
            image.draft(mode, (2 * size[1], 2 * size[0]))  # decodes at a fraction of the size where that is enough
        if image.mode == "F" or image.mode.startswith("I"):
            pixels = np.asarray(image, dtype=np.float64)
            top = 65535.0 if image.mode.startswith("I") else max(float(pixels.max()), 1e-12)
            loaded = Image.fromarray((pixels.clip(0, top) * (255 / top)).astype(np.uint8)).convert(mode)
        else:
            loaded = image.convert(mode)
        if _turn(image) != 1:
            loaded = ImageOps.exif_transpose(loaded)
        if (loaded.height, loaded.width) != size:
            loaded = loaded.resize((size[1], size[0]), Image.Resampling.BILINEAR)
        pixels = np.asarray(loaded)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


Decoded = tuple[AnyArray | str, Index | None]  # an image, or why it cannot be read, and its channel_sums if it is large


def _try(path: Path, size: tuple[int, int], mode: str) -> Decoded:
    """Decode an image."""
    try:
        pixels = np.ascontiguousarray(decode(path, size, mode))
        large = len(pixels) == 3 and pixels.size > LARGE and pixels.dtype == np.uint8
        return pixels, channel_sums(pixels) if large else None
    except Mistake:
        raise
    except Exception as error:  # Pillow raises many kinds for damaged files
        reason = (str(error).splitlines() or [""])[0].replace(f" {str(path)!r}", "").replace(str(path), "it")
        return reason[:100] or type(error).__name__, None


Skipped = list[tuple[str, str]]  # path and reason


def _decoded(
    files: Sequence[ImageFile], size: tuple[int, int], mode: str
) -> tuple[AnyArray, Index | None, list[int], Skipped]:
    """All images in one memory-mapped array, their sums, the places of the files that are in it, and the others."""
    folder = Path(os.environ.get("KILTER_CACHE") or Path.home() / ".cache" / "kilter") / "images"
    path = folder / f"{_key(files, size, mode)}.npy"
    index = path.with_suffix(".json")
    if not index.exists() or not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        if mode:  # volumes tell their size only when they are read
            _check_space(folder, len(files) * size[0] * size[1] * Image.getmodebands(mode))
        kept, skipped, sums = _write(path, files, size, mode)
        if sums:
            np.save(path.with_suffix(".sums.npy"), np.stack(sums))
        index.write_text(json.dumps({"kept": kept, "skipped": skipped, "sums": bool(sums)}))
    record = json.loads(index.read_text())
    kept, skipped = record["kept"], [(str(name), str(why)) for name, why in record["skipped"]]
    x = open_mapped(path) if kept else np.zeros((0, 1, 1, 1), np.uint8)
    return x, np.load(path.with_suffix(".sums.npy")) if record["sums"] else None, kept, skipped


def _check_space(folder: Path, needed: int) -> None:
    """A Mistake if the decoded images do not fit on the disk."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise Mistake(
            f"The decoded images take {needed / 1e9:.3g} GB and '{folder}' has {free / 1e9:.3g} GB free: set KILTER_CACHE to a "
            "folder on a larger disk, or make the images smaller with --image-size."
        )


def _key(files: Sequence[ImageFile], size: tuple[int, int], mode: str) -> str:
    """Changes when a file or the format does."""
    digest = blake2b(repr((FORMAT, size, mode)).encode(), digest_size=16)
    for file in files:
        status = file.path.stat()
        digest.update(
            f"{file.path.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode("utf-8", "surrogateescape")
        )
    return digest.hexdigest()


def _write(
    path: Path, files: Sequence[ImageFile], size: tuple[int, int], mode: str
) -> tuple[list[int], Skipped, list[Index]]:
    """Decode into a .npy file, which is complete or does not exist: the files in it, the others, and sums of large images."""
    kept: list[int] = []
    all_sums: list[Index] = []
    skipped: Skipped = []
    shape: tuple[int, ...] = ()
    kind: np.dtype[np.generic] = np.dtype(np.uint8)
    with NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        try:
            file.write(b"\0" * 128)  # the header, written at the end
            for at, (pixels, sums) in enumerate(_decode_all([f.path for f in files], size, mode)):
                if isinstance(pixels, str):
                    skipped.append((str(files[at].path), pixels))
                    continue
                if shape and pixels.shape != shape:
                    raise Mistake(
                        f"'{files[at].path}' has the shape {pixels.shape} and others have {shape}: use one shape for all."
                    )
                shape, kind = pixels.shape, pixels.dtype
                file.write(pixels.data)
                kept.append(at)
                all_sums += [] if sums is None else [sums]
            file.seek(0)
            file.write(_header((len(kept), *shape), kind))
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    return kept, skipped, all_sums


def _header(shape: tuple[int, ...], kind: np.dtype[np.generic]) -> bytes:
    """The first 128 bytes of a .npy file."""
    text = repr({"descr": kind.str, "fortran_order": False, "shape": shape})
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + text.ljust(117).encode() + b"\n"


def _decode_all(paths: Sequence[Path], size: tuple[int, int], mode: str) -> Iterator[Decoded]:
    """Images in order, decoded by as many threads as there are processors (Pillow lets them run at the same time).

    The threads are at most AHEAD images ahead of whoever writes them down, so they never wait and memory stays bounded.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = iter(paths)
        ahead = deque(pool.submit(_try, path, size, mode) for path in islice(waiting, AHEAD))
        while ahead:
            pixels = ahead.popleft().result()
            ahead.extend(pool.submit(_try, path, size, mode) for path in islice(waiting, 1))
            yield pixels
