"""Write data.npz: ten clients with overlapping covariate shift in two features, and a boundary that no linear model fits."""

from __future__ import annotations

from pathlib import Path

import numpy as np

CLIENTS, ROWS, NOISE = 10, 300, 0.05


def main() -> None:
    """x ~ N((m_k, 0), 1) with m_k from -2 to 2; y = 1 above the parabola 0.6 x_1^2 - 1.2, with 5 % of the labels flipped."""
    rng = np.random.default_rng(0)
    xs, ys, groups = [], [], []
    for k in range(CLIENTS):
        x = np.array([-2 + 4 * k / (CLIENTS - 1), 0.0]) + rng.normal(size=(ROWS, 2))
        y = (x[:, 1] > 0.6 * x[:, 0] ** 2 - 1.2).astype(int)
        ys.append(np.where(rng.random(ROWS) < NOISE, 1 - y, y))
        xs.append(x)
        groups.append(np.full(ROWS, k))
    np.savez_compressed(
        Path(__file__).with_name("data.npz"),
        x=np.concatenate(xs).astype(np.float32),
        y=np.concatenate(ys),
        group=np.concatenate(groups),
    )


if __name__ == "__main__":
    main()
