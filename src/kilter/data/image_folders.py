"""Which images a folder holds: client/class/*.png or class/*.png, with or without folders train and test."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from kilter.data.images import SUFFIXES, ImageFile, is_image
from kilter.data.schema import quoted
from kilter.errors import Mistake

TRAIN, TEST = ("train", "training"), ("test", "testing")
VALID = ("val", "valid", "validation")
SIDE_FILES = ("thumbs.db", "desktop.ini")  # of file managers


def is_image_folder(path: Path) -> bool:
    """Whether this is a folder with images in folders of its own."""
    if not path.is_dir():
        return False
    return any(is_image(Path(name)) for folder, _, names in _walk(path) if folder != path for name in names)


def _walk(root: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Every folder in order, its folders and its files. Hidden ones are left out, and links to folders are not followed."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield Path(folder), folders, sorted(name for name in names if not name.startswith("."))


def find_images(root: Path) -> list[ImageFile]:
    """The images of a folder. The innermost folder is the class; one around it, the client; train and test may be anywhere."""
    files = []
    for folder, _, names in _walk(root):
        parts = folder.relative_to(root).parts
        marks = [part.lower() for part in parts if part.lower() in TRAIN + TEST]
        levels = [part for part in parts if part.lower() not in TRAIN + TEST]
        part = "" if not marks else "train" if marks[0] in TRAIN else "test"
        images = [folder / name for name in names if is_image(Path(name))]
        if images:
            _check_place(root, images[0], levels, marks)
        client = levels[0] if len(levels) == 2 else ""
        files += [ImageFile(path, levels[-1], client, part) for path in images]
    with_client = next((f for f in files if f.client), None)
    without = next((f for f in files if not f.client), None)
    if with_client and without:
        raise Mistake(
            f"'{with_client.path}' has a folder for its client and '{without.path}' has none: use class/ or client/class/ for all."
        )
    return files


def _check_place(root: Path, image: Path, levels: list[str], marks: list[str]) -> None:
    """Refuse an image in a folder that says neither its class nor its part."""
    above = [folder for folder in image.parents if root in folder.parents]
    valid = next((f for f in above if f.name.lower() in VALID and any((f.parent / t).is_dir() for t in TRAIN)), None)
    if valid is not None:
        raise Mistake(
            f"'{valid}' is a folder of validation images: move them to the training images, because every client sets validation "
            "rows of its own aside (--valid)."
        )
    if not 1 <= len(levels) <= 2 or len(marks) > 1:
        raise Mistake(
            f"'{image}' is in {len(levels)} folders: put images into class/ or client/class/ (with train/ and test/ "
            "around or inside, if you like)."
        )


def other_files(root: Path) -> tuple[str, ...]:
    """A note about files that are no images, and about links to folders."""
    others: Counter[str] = Counter()
    links: list[str] = []
    for folder, folders, names in _walk(root):
        links += [str(folder / name) for name in folders if (folder / name).is_symlink()]
        others.update(Path(n).suffix or n for n in names if not is_image(Path(n)) and n.lower() not in SIDE_FILES)
    listed = ", ".join(f"{count} {suffix}" for suffix, count in others.most_common(5)) + ", ..." * (len(others) > 5)
    notes = [f"Not read, because they are no images ({', '.join(SUFFIXES)}): {listed}."] if others else []
    return (*notes, *([f"Not read, because links to folders are not followed: {quoted(links)}."] if links else []))
