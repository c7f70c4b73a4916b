"""Write data.npz: digits among sixteen peers with thirty rows each; even peers have classes 0 to 4, odd peers 5 to 9."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

PEERS, ROWS = 16, 30


def main() -> None:
    """The rows that no peer has are the common test set."""
    rng = np.random.default_rng(0)
    x, y = load_digits(return_X_y=True)
    x = (x.reshape(-1, 8, 8) / 16).astype(np.float32)
    train, group, test = [], [], []
    for half in (0, 1):
        mine = rng.permutation(np.flatnonzero((y >= 5) == bool(half)))
        for k in range(PEERS // 2):
            train.extend(mine[k * ROWS : (k + 1) * ROWS])
            group.extend([2 * k + half] * ROWS)
        test.extend(mine[PEERS // 2 * ROWS :])
    np.savez_compressed(
        Path(__file__).with_name("data.npz"),
        x_train=x[train], y_train=y[train], group_train=np.array(group),
        x_test=x[test], y_test=y[test], group_test=np.full(len(test), -1),
    )  # fmt: skip


if __name__ == "__main__":
    main()
