"""Residual networks (He et al. 2016). Names in the body are those of torchvision, so that its weights can be loaded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import Tensor, nn

from kilter.models.small import Network, Shape, image, projection

Norm = Literal["bn", "gn"]  # GroupNorm with 32 groups


def resnet18(shape: Shape, classes: int, norm: Norm = "bn", project: int = 0) -> Network:
    """ResNet-18; 3x3 stem, or ImageNet's 7x7 stem and pool from 128 pixels on; `project` (256) adds MOON's projection."""
    return _resnet(shape, classes, Basic, (2, 2, 2, 2), norm, project)


def resnet50(shape: Shape, classes: int, norm: Norm = "bn", project: int = 0) -> Network:
    """ResNet-50; 3x3 stem, or ImageNet's 7x7 stem and pool from 128 pixels on; `project` (256) adds MOON's projection."""
    return _resnet(shape, classes, Bottleneck, (3, 4, 6, 3), norm, project)


class Basic(nn.Module):
    """Two 3x3 convolutions with a shortcut."""

    widen = 1

    def __init__(self, inputs: int, width: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu1 = _conv(inputs, width, 3, stride), norm(width), nn.ReLU()
        self.conv2, self.bn2, self.relu2 = _conv(width, width, 3), norm(width), nn.ReLU()
        self.downsample = _shortcut(inputs, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Same size as x, or `width` channels at 1/`stride` of the size."""
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        out: Tensor = self.relu2(y + self.downsample(x))
        return out


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1, with a shortcut. The 3x3 has the stride (as in torchvision)."""

    widen = 4

    def __init__(self, inputs: int, width: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        outputs = width * self.widen
        self.conv1, self.bn1, self.relu1 = _conv(inputs, width, 1), norm(width), nn.ReLU()
        self.conv2, self.bn2, self.relu2 = _conv(width, width, 3, stride), norm(width), nn.ReLU()
        self.conv3, self.bn3, self.relu3 = _conv(width, outputs, 1), norm(outputs), nn.ReLU()
        self.downsample = _shortcut(inputs, outputs, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """4 x `width` channels at 1/`stride` of the size."""
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.relu2(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        out: Tensor = self.relu3(y + self.downsample(x))
        return out


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def _shortcut(inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module]) -> nn.Sequential:
    """The shortcut: empty if the shapes agree, else a 1x1 convolution."""
    same = stride == 1 and inputs == outputs
    return nn.Sequential() if same else nn.Sequential(_conv(inputs, outputs, 1, stride), norm(outputs))


def _resnet(
    shape: Shape, classes: int, block: type[Basic | Bottleneck], depths: tuple[int, ...], norm: Norm, project: int
) -> Network:
    channels, height, width = image(shape)
    large = min(height, width) >= 128
    new_norm: Callable[[int], nn.Module] = nn.BatchNorm2d if norm == "bn" else partial(nn.GroupNorm, 32)
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    parts["conv1"] = _conv(channels, 64, 7, 2) if large else _conv(channels, 64, 3)
    parts["bn1"], parts["relu"] = new_norm(64), nn.ReLU()
    if large:
        parts["maxpool"] = nn.MaxPool2d(3, 2, padding=1)
    inputs = 64
    for stage, depth in enumerate(depths):
        blocks = []
        for i in range(depth):
            blocks.append(block(inputs, 64 << stage, 2 if stage > 0 and i == 0 else 1, new_norm))
            inputs = (64 << stage) * block.widen
        parts[f"layer{stage + 1}"] = nn.Sequential(*blocks)
    parts["avgpool"], parts["flatten"] = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    if project:
        parts["projection"] = projection(inputs, project)
    return Network(nn.Sequential(parts), nn.Linear(project or inputs, classes))
