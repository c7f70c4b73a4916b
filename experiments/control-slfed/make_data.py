"""Write data.npz: digits among sixteen peers of two kinds, whose labels mean different things."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

PEERS, ROWS, ALPHA = 16, 100, 1.0


def main() -> None:
    """Peers draw class shares from Dirichlet 1. Odd peers call class c what even peers call c + 5."""
    rng = np.random.default_rng(0)
    x, y = load_digits(return_X_y=True)
    x = (x.reshape(-1, 8, 8) / 16).astype(np.float32)
    left = {c: list(rng.permutation(np.flatnonzero(y == c))) for c in range(10)}
    rows, labels, group = [], [], []
    for peer in range(PEERS):
        shares = rng.dirichlet(np.full(10, ALPHA))
        for _ in range(ROWS):
            there = np.array([shares[c] if left[c] else 0.0 for c in range(10)]) + 1e-9 * np.array(
                [bool(left[c]) for c in range(10)]
            )
            c = int(rng.choice(10, p=there / there.sum()))
            rows.append(left[c].pop())
            labels.append((c + 5 * (peer % 2)) % 10)
            group.append(peer)
    np.savez_compressed(Path(__file__).with_name("data.npz"), x=x[rows], y=np.array(labels), group=np.array(group))


if __name__ == "__main__":
    main()
