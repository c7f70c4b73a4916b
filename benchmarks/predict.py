"""`kilter predict` on a table of 100,000 rows: seconds after start-up. The target is 3.

python benchmarks/predict.py --rows 100000
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from kilter.experiment import Experiment
from kilter.inference.model_folder import load_model
from kilter.inference.predict import predict, save
from kilter.inference.rows import read_rows
from kilter.records.run_folder import Store, write
from tables_and_images import write_csv


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=100_000)
    rows = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_csv(folder / "all.csv", 1)
        lines = (folder / "all.csv").read_text().splitlines()[: rows + 1]
        (folder / "new.csv").write_text("\n".join(lines) + "\n")
        (folder / "train.csv").write_text("\n".join(lines[:3001]) + "\n")
        experiment = Experiment.of({"data": str(folder / "train.csv"), "rounds": 1, "clients": 3})
        method, fed = experiment.build()
        with fed:
            experiment.run(method, fed, Store(folder / "run"))
        preparation = experiment.split().dataset.preparation
        assert preparation is not None
        write(folder / "run" / "preparation.toml", preparation.text())
        began = time.perf_counter()
        model = load_model(folder / "run")
        x = read_rows(model, folder / "new.csv")
        read = time.perf_counter()
        save(predict(model, x), folder / "predictions.csv")
        done = time.perf_counter()
        print(
            f"{len(x):,} rows: read and prepared in {read - began:.2f} s, predicted and written in {done - read:.2f} s"
        )


if __name__ == "__main__":
    main()
