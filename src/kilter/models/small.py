"""Small networks: fully connected ones, and ones with two 5x5 convolutions.

The convolutions have no padding, except for images of fewer than 16 pixels, where two of them would not fit: there both pad by 2.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from math import prod

from torch import Tensor, nn

from kilter.errors import Mistake

Shape = tuple[int, ...]  # of one sample: (channels, height, width) or (features,)


class Network(nn.Module):
    """A body that computes features, and a linear head."""

    def __init__(self, body: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Logits, (batch, classes)."""
        logits: Tensor = self.head(self.body(x))
        return logits


def linear(shape: Shape, classes: int) -> Network:
    """Softmax regression."""
    return Network(nn.Flatten(), nn.Linear(prod(shape), classes))


def mlp(shape: Shape, classes: int, width: int = 64, depth: int = 1) -> Network:
    """Fully connected with `depth` hidden layers of `width`."""
    sizes = [prod(shape)] + [width] * depth
    return Network(nn.Sequential(nn.Flatten(), *_dense(*sizes)), nn.Linear(width, classes))


def _dense(*sizes: int) -> list[nn.Module]:
    """Linear layers of these sizes, each followed by a ReLU."""
    return [part for i, o in pairwise(sizes) for part in (nn.Linear(i, o), nn.ReLU())]


def cnn(shape: Shape, classes: int, channels: int = 16) -> Network:
    """FedDisk's CNN: 2 x (5x5 conv, pool, BatchNorm), 16 hidden units; 16 channels for MNIST, 32 X-ray, 128 FEMNIST."""
    layers, features = _convolutions(shape, (channels, channels), norm=True)
    return Network(nn.Sequential(*layers, *_dense(features, 16)), nn.Linear(16, classes))


def bench_cnn(shape: Shape, classes: int) -> Network:
    """CNN of the benchmarks: 5x5 convolutions of 16 and 32 channels with pooling, 64 hidden units."""
    layers, features = _convolutions(shape, (16, 32))
    return Network(nn.Sequential(*layers, *_dense(features, 64)), nn.Linear(64, classes))


def lenet(shape: Shape, classes: int) -> Network:
    """LeNet-5 with ReLU and max-pooling; images of fewer than 32 pixels are padded by 2, like 28x28 in the original."""
    layers, features = _convolutions(shape, (6, 16), first_pad=2 if min(shape[1:], default=0) < 32 else 0)
    return Network(nn.Sequential(*layers, *_dense(features, 120, 84)), nn.Linear(84, classes))


def simple_cnn(shape: Shape, classes: int) -> Network:
    """CNN of MOON and FedPDC: 5x5 convolutions of 6 and 16 channels, 120 and 84 hidden units, projection to 256."""
    layers, features = _convolutions(shape, (6, 16))
    trunk = nn.Sequential(*layers, *_dense(features, 120, 84))
    body = nn.Sequential(OrderedDict(features=trunk, projection=projection(84, 256)))
    return Network(body, nn.Linear(256, classes))


class TimeMean(nn.Module):
    """The mean over time."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, features) from (batch, features, time, 1)."""
        return x.mean((-2, -1))


def temporal_cnn(shape: Shape, classes: int, channels: int = 32) -> Network:
    """CNN for time series of (channels, time, 1) or (1, time, channels): two convolutions over 5 steps, the mean over time."""
    series, _, width = image(shape)
    layers: list[nn.Module] = []
    for inputs, kernel in ((series, (5, width)), (channels, (5, 1))):
        layers += [nn.Conv2d(inputs, channels, kernel, padding=(2, 0)), nn.BatchNorm2d(channels), nn.ReLU()]
    return Network(nn.Sequential(*layers, TimeMean()), nn.Linear(channels, classes))


def projection(features: int, width: int) -> nn.Sequential:
    """MOON's projection. Its outputs are compared between models."""
    return nn.Sequential(*_dense(features, features), nn.Linear(features, width))


def _convolutions(
    shape: Shape, widths: tuple[int, int], norm: bool = False, first_pad: int = 0
) -> tuple[list[nn.Module], int]:
    """Twice: 5x5 convolution, ReLU, 2x2 max-pool and optional BatchNorm. Also returns the number of flat features."""
    channels, height, width = image(shape)
    pads = (first_pad, 0) if min(height, width) >= 16 else (2, 2)
    layers: list[nn.Module] = []
    for out, pad in zip(widths, pads, strict=True):
        layers += [nn.Conv2d(channels, out, 5, padding=pad), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.BatchNorm2d(out)] if norm else []
        channels, height, width = out, (height + 2 * pad - 4) // 2, (width + 2 * pad - 4) // 2
    if min(height, width) < 1:
        raise Mistake(
            f"Images of {shape[1]}x{shape[2]} are too small for this network, which needs at least 4x4: use mlp or linear."
        )
    return [*layers, nn.Flatten()], channels * height * width


def image(shape: Shape) -> tuple[int, int, int]:
    """Channels, height, width."""
    if len(shape) != 3:
        raise Mistake(f"This network needs images, but a sample has {shape[0]} plain features: use mlp or linear.")
    return shape[0], shape[1], shape[2]
