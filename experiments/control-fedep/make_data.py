"""Write data.npz: digits among ten clients; eight share classes 0 to 6, and two have classes 7 to 9, which nobody else has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

CLIENTS, UNUSUAL, ROWS, TEST = 10, 2, 100, 500


def main() -> None:
    """All clients have the same size; the test rows have all classes."""
    rng = np.random.default_rng(0)
    x, y = load_digits(return_X_y=True)
    x = (x.reshape(-1, 8, 8) / 16).astype(np.float32)
    test, rest = np.split(rng.permutation(len(y)), [TEST])
    common, rare = rest[y[rest] < 7], rest[y[rest] >= 7]
    usual = CLIENTS - UNUSUAL
    train = np.concatenate([common[: usual * ROWS], rare[: UNUSUAL * ROWS]])
    np.savez_compressed(
        Path(__file__).with_name("data.npz"),
        x_train=x[train], y_train=y[train], group_train=np.repeat(np.arange(CLIENTS), ROWS),
        x_test=x[test], y_test=y[test], group_test=np.full(TEST, -1),
    )  # fmt: skip


if __name__ == "__main__":
    main()
