"""The work that is timed, defined once: rows, networks, first weights. Needs torch and numpy only: every venv can import it.

A runner (`run_PEER.py`) trains FedAvg or a relative of it and prints one line of JSON for each round.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

LR, BATCH = 0.01, 32
MU = 0.01  # FedProx's pull
SLOWER = 1.2  # times as long in the first repetition: that setting of a peer is not repeated
TRIAL = 32  # images of each client in a trial, by which W4's settings are chosen


@dataclass(frozen=True)
class Work:
    """A workload: who has how many images, how many take part in a round, which network, how many rounds."""

    data: str
    clients: int
    images: int  # of each client
    sampled: int  # clients in a round
    model: str
    rounds: int  # the first belongs to the start-up, if there are more
    method: str = "fedavg"

    @property
    def steps(self) -> int:
        """Optimiser steps of a round."""
        return self.sampled * -(-self.images // BATCH)


WORKS = {
    "W1": Work("mnist", 100, 600, 10, "cnn", 6),
    "W2": Work("mnist", 1000, 60, 100, "cnn", 6),
    "W3": Work("mnist", 1000, 60, 100, "mlp", 11),
    "W4": Work("cifar10", 10, 500, 10, "resnet", 1),
}
WORKS |= {f"W5-{m}": replace(WORKS["W1"], method=m) for m in ("fedprox", "scaffold", "feddisk")}
WORKS |= {f"G{n}": Work("mnist", n, 60, min(n, 100), "mlp", 6) for n in (10, 100, 1000, 10_000)}
GROWTH = tuple(w for w in WORKS if w.startswith("G"))


# ---- data ----


def rows(work: Work) -> Tensor:
    """(clients, images): whose rows are whose. Each row is with one client; if rows are too few, each client draws its own."""
    rng, total = np.random.default_rng(0), {"mnist": 60_000, "cifar10": 20_000}[work.data]
    if work.clients * work.images <= total:
        return torch.from_numpy(rng.permutation(total)[: work.clients * work.images].reshape(work.clients, -1))
    return torch.from_numpy(rng.integers(0, total, (work.clients, work.images)))


def weights(work: Work) -> Tensor:
    """(clients, images): FedDisk's weight of each row, here drawn and not learnt, for only the weighted loss is timed."""
    return torch.from_numpy(np.random.default_rng(1).uniform(0.1, 1.9, (work.clients, work.images)).astype(np.float32))


def table(folder: Path, data: str, part: str) -> tuple[Tensor, Tensor]:
    """Images (N, C, H, W) in 0..1 and labels, read where they lie on the disk, so that processes share them."""
    x = np.load(folder / f"{data}_x_{part}.npy", mmap_mode="c")
    return torch.from_numpy(x), torch.from_numpy(np.load(folder / f"{data}_y_{part}.npy"))


def convert(source: Path, folder: Path, data: str) -> None:
    """Kilter's .npz of a data set as the .npy files that `table` reads."""
    files = [source / name for name in (f"{data}.npz", f"{data}_25k.npz") if (source / name).is_file()]
    if not files:
        raise SystemExit(f"There is no {data}.npz in '{source}': set KILTER_DATA to the folder that has it.")
    with np.load(files[0]) as arrays:
        for part in ("train", "test"):
            x = arrays[f"x_{part}"]
            x = x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)
            np.save(folder / f"{data}_x_{part}.npy", np.ascontiguousarray(x, dtype=np.float32) / 255)
            np.save(folder / f"{data}_y_{part}.npy", arrays[f"y_{part}"].astype(np.int64))


# ---- networks ----


class Residual(nn.Module):
    """Two 3x3 convolutions with GroupNorm and a way around them."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.norm1, self.relu1 = nn.GroupNorm(32, width), nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2, self.relu2 = nn.GroupNorm(32, width), nn.ReLU()
        self.short: nn.Module = nn.Identity()
        if stride > 1 or inputs != width:
            self.short = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.GroupNorm(32, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu1(self.norm1(self.conv1(x)))
        out: Tensor = self.relu2(self.norm2(self.conv2(y)) + self.short(x))
        return out


def resnet() -> nn.Module:
    """ResNet-18 with a 3x3 stem, for 32x32 images."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.GroupNorm(32, 64), nn.ReLU()]
    width = 64
    for stage in range(4):
        for stride in (2 if stage else 1, 1):
            layers.append(Residual(width, 64 << stage, stride))
            width = 64 << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def cnn() -> nn.Module:
    convolutions = [nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def network(name: str) -> nn.Module:
    """With the first weights that all peers begin from."""
    torch.manual_seed(0)
    return {"cnn": cnn, "mlp": mlp, "resnet": resnet}[name]()


@torch.no_grad()
def accuracy(net: nn.Module, folder: Path, data: str) -> float:
    """On 2,000 test images."""
    x, y = table(folder, data, "test")
    net.cpu().eval()
    right = [net(part).argmax(1) == label for part, label in zip(x[:2000].split(250), y[:2000].split(250), strict=True)]
    return float(torch.cat(right).float().mean())


def weighted_loss(outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return (cross_entropy(outputs, y, reduction="none") * weight).mean()


# ---- what every runner reads and prints ----


@dataclass(frozen=True)
class Order:
    """What a runner is to do."""

    work: Work
    threads: int  # of torch, or processes
    folder: Path  # of the .npy files
    form: str
    device: str  # cpu or cuda
    precision: str


def order() -> Order:
    """From the command line; a smaller work than the named one where it says so."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", choices=WORKS, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--form", default="")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32", help="Kilter only")
    parser.add_argument("--images", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=0)
    a = parser.parse_args()
    smaller = {name: value for name in ("images", "rounds") if (value := getattr(a, name))}
    return Order(replace(WORKS[a.work], **smaller), a.threads, a.data, a.form, a.device, a.precision)


class Watch:
    """Prints a line for each round: its seconds since the last, its steps and its mean loss over the steps."""

    def __init__(self) -> None:
        self.round = 0
        self.began = time.perf_counter()

    def tick(self, steps: int, loss: float) -> None:
        now = time.perf_counter()
        self.round += 1
        self.say({"round": self.round, "seconds": now - self.began, "steps": steps, "loss": loss})
        self.began = time.perf_counter()

    def end(self, **result: Any) -> None:
        """The last line."""
        self.say(result)

    def say(self, line: dict[str, Any]) -> None:
        print(json.dumps(line), file=sys.__stdout__, flush=True)  # which a progress bar may have taken away from sys
