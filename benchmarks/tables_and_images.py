"""Reading a large CSV file and a large folder of images: time and memory, next to pyarrow and Pillow alone.

    python benchmarks/tables_and_images.py --megabytes 1024 --images 100000

The target for tables: at most 1.5 times the time of `pyarrow.csv` alone, and a peak below twice the decoded columns. The target for
images: at most 1.3 times the time of a plain loop over the files in two processes, and a resident size that stays below 2 GB.

Kilter writes the decoded images to its cache, once, and the loop throws them away. `pillow loop, kept` writes them to a file, too:
what it takes longer than the loop is the disk's time. Every later run reads the cache (`again`), where the loop would decode all
images in every epoch.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

COLUMNS = 20


def write_csv(path: Path, megabytes: int) -> None:
    """Twenty columns of numbers, one of words and a label. A block of rows is repeated until the file is large enough."""
    import pyarrow as pa
    from pyarrow import csv

    rng = np.random.default_rng(0)
    numbers = np.round(rng.normal(size=(100_000, COLUMNS)), 6)
    columns: dict[str, object] = {f"f{k}": numbers[:, k] for k in range(COLUMNS)}
    columns |= {"sex": np.where(numbers[:, 0] > 0, "m", "f"), "label": (numbers[:, 1] > 0).astype(int)}
    with open(path, "wb") as file:
        csv.write_csv(pa.table(columns), file, csv.WriteOptions(quoting_style="none"))
        block = pa.BufferOutputStream()
        csv.write_csv(pa.table(columns), block, csv.WriteOptions(include_header=False, quoting_style="none"))
        while file.tell() < megabytes * 2**20:
            file.write(block.getvalue())


def write_images(folder: Path, count: int, size: int) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    for k in range(count):
        path = folder / f"site{k % 5}" / "ab"[k % 2] / f"{k}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        small = rng.integers(0, 255, (size // 8, size // 8, 3), dtype=np.uint8)
        Image.fromarray(small).resize((size, size)).save(path)


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(what: str, path: str) -> dict[str, float]:
    """In a process of its own: seconds, and by how much the peak grew."""
    if what == "csv alone":
        from pyarrow import csv

        before, began = peak_megabytes(), time.perf_counter()
        table = csv.read_csv(path)
        return {
            "seconds": time.perf_counter() - began,
            "peak": peak_megabytes() - before,
            "decoded": table.nbytes / 2**20,
        }
    if what == "pillow loop":
        began = time.perf_counter()
        files = sorted(Path(path).rglob("*.jpg"))
        with multiprocessing.Pool(2) as pool:
            total = sum(pool.imap(plain_decode, files, chunksize=64))
        return {"seconds": time.perf_counter() - began, "peak": peak_megabytes(), "bytes": float(total)}
    if what == "pillow loop, kept":
        began = time.perf_counter()
        with ThreadPoolExecutor(2) as pool, open(Path(path).parent / "kept", "wb") as file:
            files = sorted(Path(path).rglob("*.jpg"))
            for start in range(0, len(files), 128):
                file.writelines(pool.map(plain_pixels, files[start : start + 128]))
        return {"seconds": time.perf_counter() - began, "peak": peak_megabytes()}
    if what == "kilter images, a run":
        return measure_run(path)
    from kilter import data

    before, began = peak_megabytes(), time.perf_counter()
    loaded = data.load(path, prepare=False)
    if what == "kilter tables, prepared":
        loaded = data.split(loaded, "iid", 10).dataset
    return {"seconds": time.perf_counter() - began, "peak": peak_megabytes() - before, "rows": float(len(loaded.y))}


def measure_run(path: str) -> dict[str, float]:
    """One round with a small network on all images, and its evaluation: seconds, and the largest resident size."""
    from kilter.experiment import Experiment
    from kilter.records.run_folder import Store

    began = time.perf_counter()
    local = {"batch": 32, "lr": 0.01}
    experiment = Experiment.of({"data": path, "model": "linear", "rounds": 1, "local": local})
    method, fed = experiment.build(workers=1)
    with fed, tempfile.TemporaryDirectory() as folder:
        experiment.run(method, fed, Store(folder))
    return {"seconds": time.perf_counter() - began, "resident": peak_megabytes()}


def plain_pixels(path: Path) -> bytes:
    from PIL import Image

    with Image.open(path) as image:
        return image.convert("RGB").tobytes()


def plain_decode(path: Path) -> int:
    return len(plain_pixels(path))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(*arguments.measure)))
        return
    with tempfile.TemporaryDirectory() as folder:
        csv, images = Path(folder) / "t.csv", Path(folder) / "images"
        write_csv(csv, arguments.megabytes)
        write_images(images, arguments.images, arguments.size)
        env = {**os.environ, "KILTER_CACHE": str(Path(folder) / "cache")}
        for what, path in (
            ("csv alone", csv),
            ("kilter tables", csv),
            ("kilter tables, prepared", csv),
            ("pillow loop", images),
            ("pillow loop, kept", images),
            ("kilter images", images),
            ("kilter images, again", images),
            ("kilter images, a run", images),
        ):
            words = [sys.executable, __file__, "--measure", what, str(path)]
            done = subprocess.run(words, capture_output=True, text=True, check=True, env=env)
            numbers = json.loads(done.stdout.splitlines()[-1])
            (Path(folder) / "kept").unlink(missing_ok=True)
            print(f"{what:24}", "  ".join(f"{key} {value:.2f}" for key, value in numbers.items()), flush=True)


if __name__ == "__main__":
    main()
