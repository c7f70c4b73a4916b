"""Networks for sequences of tokens: an LSTM and small transformers. Token 0 is padding."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, layer_norm

from kilter.errors import Mistake
from kilter.models.small import Network, Shape

TOKENS = 1024  # different tokens, as `--text` hashes words


class Tokens(nn.Module):
    """A vector for each token, plus one for its place. Tokens may arrive as floats, as tables hold them."""

    def __init__(self, tokens: int, length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(tokens, width) * 0.02)
        self.place = nn.Parameter(torch.randn(length, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width)"""
        return embedding(x.long(), self.weight) + self.place


class Norm(nn.Module):
    """LayerNorm over the last dimension."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight.shape, self.weight, self.bias)


class Block(nn.Module):
    """Attention and a feed-forward layer, each after LayerNorm and with a shortcut."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        """x (batch, time, width); `hidden` (batch, time) is true for padding."""
        z = self.norm1(x)
        q, k, v = (
            part(z).unflatten(-1, (self.heads, -1)).transpose(-3, -2) for part in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        mask = hidden[..., None, None, :]
        if self.causal:
            length = x.shape[-2]
            later = torch.arange(length, device=x.device)
            mask = mask | (later[None, :] > later[:, None])
        attention = torch.softmax(scores.masked_fill(mask, -1e9), -1) @ v
        x = x + self.out(attention.transpose(-3, -2).flatten(-2))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Blocks on tokens. Returns the features of every token (`causal`), or their mean without padding."""

    def __init__(self, tokens: int, length: int, width: int, depth: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.tokens = Tokens(tokens, length, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal) for _ in range(depth))
        self.norm = Norm(width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width), or (batch, time, width) if causal."""
        hidden = x == 0
        z = self.tokens(x)
        for block in self.blocks:
            z = block(z, hidden)
        z = self.norm(z)
        if self.causal:
            return z
        known = (~hidden).float().unsqueeze(-1)
        return (z * known).sum(-2) / known.sum(-2).clamp(min=1)


class Recurrent(nn.Module):
    """An LSTM on tokens. Returns its state after the last token that is not padding."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width)"""
        states, _ = self.lstm(self.tokens(x.long()))
        last = (x != 0).sum(1).clamp(min=1) - 1
        return states.gather(1, last[:, None, None].expand(-1, 1, states.shape[2]))[:, 0]


def _length(shape: Shape) -> int:
    if len(shape) != 1:
        raise Mistake(f"This network needs rows of tokens, but a sample has the shape {tuple(shape)}: use --task text.")
    return shape[0]


def lstm(shape: Shape, classes: int, width: int = 64, tokens: int = TOKENS) -> Network:
    """LSTM for texts (--task text), `width` units."""
    _length(shape)
    return Network(Recurrent(tokens, width), nn.Linear(width, classes))


def transformer(
    shape: Shape, classes: int, width: int = 64, depth: int = 2, heads: int = 4, tokens: int = TOKENS
) -> Network:
    """Transformer encoder for texts (--task text): `depth` blocks of `width`, the mean over tokens."""
    return _transformer(shape, classes, width, depth, heads, tokens, causal=False)


def causal_transformer(shape: Shape, classes: int, width: int = 64, depth: int = 2, heads: int = 4) -> Network:
    """Transformer that predicts the next token (--task next-token)."""
    return _transformer(shape, classes, width, depth, heads, classes, causal=True)


def _transformer(
    shape: Shape, classes: int, width: int, depth: int, heads: int, tokens: int, *, causal: bool
) -> Network:
    if width % heads:
        raise Mistake(f"A transformer of width {width} cannot have {heads} heads: the width must be a multiple.")
    return Network(Transformer(tokens, _length(shape), width, depth, heads, causal), nn.Linear(width, classes))
