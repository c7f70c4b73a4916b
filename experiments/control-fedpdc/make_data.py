"""Write data.npz and public.npz: digits among ten clients, four of which have random labels; a clean test set and public rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

CLIENTS, HARMFUL, TRAIN, PUBLIC = 10, 4, 1200, 100


def main() -> None:
    """Rows go to clients at random; the labels of clients 0 to 3 are drawn anew."""
    rng = np.random.default_rng(0)
    x, y = load_digits(return_X_y=True)
    x = (x.reshape(-1, 8, 8) / 16).astype(np.float32)
    order = rng.permutation(len(y))
    train, public, test = np.split(order, [TRAIN, TRAIN + PUBLIC])
    group = np.arange(TRAIN) % CLIENTS
    labels = np.where(group < HARMFUL, rng.integers(0, 10, TRAIN), y[train])
    folder = Path(__file__).parent
    rest = np.full(len(test), -1)  # the test rows belong to no client
    np.savez_compressed(
        folder / "data.npz",
        x_train=x[train], y_train=labels, group_train=group, x_test=x[test], y_test=y[test], group_test=rest,
    )  # fmt: skip
    np.savez_compressed(folder / "public.npz", x=x[public], y=y[public])


if __name__ == "__main__":
    main()
