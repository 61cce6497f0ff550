"""Small networks with attention and groups of channels, for the list of architectures."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rotated(x: Tensor, cos: Tensor, sin: Tensor, half: int) -> Tensor:
    """Rotary positions: pairs of dimensions turned by angles."""
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos + turned * sin


class Attention(nn.Module):
    """Attention by hand in a residual block.

    Args:
        width: The width of the residual stream.
        heads: The query heads.
        shared: The heads of keys and values.
        time: The length of sequences, for rotary positions.
        style: The way in which attention is written.
        copies: The operation that copies keys and values to as many heads as queries have.
        ends: The numbers of inputs and outputs.
    """

    def __init__(
        self,
        width: int = 8,
        heads: int = 2,
        shared: int = 2,
        time: int = 0,
        style: str = "matmul",
        copies: str = "interleave",
        ends: tuple[int, int] = (3, 2),
    ) -> None:
        super().__init__()
        self.heads, self.shared, self.dim = heads, shared, width // heads
        self.time, self.style, self.copies = time, style, copies
        angles = torch.arange(time)[:, None] * 10.0 ** -torch.arange(self.dim // 2)
        self.register_buffer("cos", torch.cat([angles.cos()] * 2, -1), persistent=False)
        self.register_buffer("sin", torch.cat([angles.sin()] * 2, -1), persistent=False)
        if style == "alibi":
            self.slopes = nn.Parameter(torch.rand(heads, 1, 1))
            places = torch.arange(5.0)
            distance = -(places[:, None] - places).abs()
            self.register_buffer("distance", distance, persistent=False)
        self.embed, self.norm = nn.Linear(ends[0], width), nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        # A bias of keys has no effect before a softmax.
        self.k = nn.Linear(width, shared * self.dim, bias=False)
        self.v = nn.Linear(width, shared * self.dim)
        self.o, self.head = nn.Linear(width, width), nn.Linear(width, ends[1])

    def forward(self, x: Tensor) -> Tensor:
        """Residual stream, one block, mean over time."""
        x = self.embed(x)
        h = self.norm(x)
        size, time, width = x.shape
        q = self.q(h).view(size, time, self.heads, self.dim).transpose(1, 2)
        k = self.k(h).view(size, time, self.shared, self.dim).transpose(1, 2)
        v = self.v(h).view(size, time, self.shared, self.dim).transpose(1, 2)
        if self.time:
            q, k = (rotated(y, self.cos, self.sin, self.dim // 2) for y in (q, k))
        if self.copies == "axis":
            q = q.reshape(size, self.shared, -1, time, self.dim)
            k, v = k.unsqueeze(2), v.unsqueeze(2)
        elif self.copies == "flag":
            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            return self.head((x + self.o(y.transpose(1, 2).reshape(size, time, width))).mean(1))
        elif self.shared not in (1, self.heads):
            k, v = (self._copied(y, self.heads // self.shared) for y in (k, v))
        if self.style == "function":
            y = F.scaled_dot_product_attention(q, k, v)
        elif self.style == "einsum":
            scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(self.dim)
            y = torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)
        elif self.style == "bmm":
            q, k, v = (y.reshape(size * self.heads, time, self.dim) for y in (q, k, v))
            y = torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1), v)
            y = y.view(size, self.heads, time, self.dim)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(self.dim)
            if self.style == "alibi":
                scores = scores + self.slopes * self.distance
            y = torch.softmax(scores, -1) @ v
        y = y.flatten(1, -3).transpose(1, 2)
        return self.head((x + self.o(y.reshape(size, time, width))).mean(1))

    def _copied(self, x: Tensor, times: int) -> Tensor:
        """Every head several times."""
        if self.copies == "expand":
            size, heads, *rest = x.shape
            copies = x[:, :, None].expand(size, heads, times, *rest)
            return copies.reshape(size, heads * times, *rest)
        if self.copies == "tile":
            return x.repeat(1, times, 1, 1)
        return x.repeat_interleave(times, 1)


class CrossCovariance(nn.Module):
    """Attention between the dimensions of a head instead of between positions (XCiT)."""

    def __init__(self, width: int = 8, heads: int = 2, ends: tuple[int, int] = (3, 2)) -> None:
        super().__init__()
        self.heads, self.embed = heads, nn.Linear(ends[0], width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.temperature, self.head = (
            nn.Parameter(torch.rand(heads, 1, 1)),
            nn.Linear(width, ends[1]),
        )

    def forward(self, x: Tensor) -> Tensor:
        """One block, mean over time."""
        x = self.embed(x)
        size, time, width = x.shape
        packed = self.qkv(x).reshape(size, time, 3, self.heads, width // self.heads)
        q, k, v = packed.permute(2, 0, 3, 4, 1).unbind(0)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        scores = (q @ k.transpose(-2, -1)) * self.temperature
        y = (scores.softmax(-1) @ v).permute(0, 3, 1, 2).reshape(size, time, width)
        return self.head((x + self.out(y)).mean(1))


class ViT(nn.Module):
    """Patches, a class token, learned positions, packed projections, GELU."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.patches = nn.Conv2d(1, width, 2, 2)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 5, width))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 6), nn.Linear(6, width)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        """The class of an image."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        size, time, width = x.shape
        packed = self.qkv(self.norm1(x)).reshape(size, time, 3, self.heads, width // self.heads)
        q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(size, time, width)
        x = x + self.project(y)
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(self.norm3(x)[:, 0])


class Window(nn.Module):
    """Attention within windows with a relative position bias, as in Swin, and SwiGLU."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.embed, self.norm = nn.Conv2d(3, width, 1), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.bias = nn.Parameter(torch.randn(1, heads, 4, 4))
        self.project = nn.Linear(width, width)
        self.gate, self.up, self.down = (
            nn.Linear(width, 6), nn.Linear(width, 6), nn.Linear(6, width),
        )  # fmt: skip
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Windows of 2 x 2 of an image of 4 x 4."""
        x = self.embed(x).permute(0, 2, 3, 1)
        size, _, _, width = x.shape
        x = x.view(size, 2, 2, 2, 2, width).permute(0, 1, 3, 2, 4, 5).reshape(size * 4, 4, width)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        y = torch.softmax(q @ k.mT + self.bias, -1) @ v
        x = x + self.project(y.transpose(1, 2).flatten(2))
        x = x + self.down(F.silu(self.gate(x)) * self.up(x))
        return self.head(x.mean(1))


class Causal(nn.Module):
    """A decoder with a causal mask, RMSNorm, and an embedding that is the unembedding too."""

    def __init__(self, width: int = 8, heads: int = 2, words: int = 5) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(words, width)
        self.norm = nn.RMSNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(4, 4).tril().bool(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the next word."""
        x = self.embed((x > 0).long())
        q, k, v = self.qkv(self.norm(x)).split(8, -1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        scores = (q @ k.transpose(-2, -1)).masked_fill(~self.mask, -1e9)
        x = x + self.project((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return F.linear(x, self.embed.weight)


class UNet(nn.Module):
    """Two scales with GroupNorm, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.down, self.norm2 = nn.Conv2d(4, 6, 2, 2), nn.GroupNorm(3, 6)
        self.up, self.norm3 = nn.ConvTranspose2d(6, 4, 2, 2), nn.GroupNorm(2, 8)
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """An image of the same size."""
        skip = F.silu(self.norm1(self.first(x)))
        x = self.up(F.silu(self.norm2(self.down(skip))))
        return self.last(F.silu(self.norm3(torch.cat([x, skip], 1))))


class ResNeXt(nn.Module):
    """A residual block with a grouped convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 1)
        self.a, self.norm1 = nn.Conv2d(5, 6, 1, bias=False), nn.BatchNorm2d(6)
        self.b, self.norm2 = nn.Conv2d(6, 6, 3, padding=1, groups=3), nn.BatchNorm2d(6)
        self.c, self.head = nn.Conv2d(6, 5, 1), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        """The class of an image."""
        x = self.stem(x).relu()
        y = self.norm2(self.b(self.norm1(self.a(x)).relu())).relu()
        return self.head((x + self.c(y)).relu().mean((2, 3)))


def grouped(convolution: Any, width: int, *kernel: int, **options: int) -> nn.Module:
    """A grouped convolution between two others."""
    first, last = getattr(nn, f"Conv{len(kernel)}d"), getattr(nn, f"Conv{len(kernel)}d")
    middle = convolution(6, width, kernel, groups=3, **options)
    return nn.Sequential(first(3, 6, 1), nn.ReLU(), middle, nn.ReLU(), last(width, 2, 1))
