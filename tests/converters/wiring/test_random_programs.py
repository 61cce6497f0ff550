"""Random computations with heads: the symmetry in every graph is real."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nfn_graph.converters import ConversionError, from_module

SIZES = [(2, 2), (2, 3), (3, 3), (2, 2, 2), (2, 3, 2), (4, 3), (6, 2)]
FEW = 4000
# Program 64 combines heads with dimensions of the same reshape.
SEEDS = range(40, 80)


class Program(nn.Module):
    """Some linear maps whose results are split into axes, and random functions of these.

    Axes are combined in all ways: heads with dimensions, copies with heads, and parts of one
    reshape with parts of another.

    Args:
        seed: Seed that determines the program.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.sizes = seed, random.Random(seed).choice(SIZES)
        count = int(torch.tensor(self.sizes).prod())
        self.embed = nn.Linear(3, 5)
        self.maps = nn.ModuleList(nn.Linear(5, count, bias=i > 0) for i in range(3))
        self.stored = nn.ParameterList()
        self(torch.randn(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """The same functions each time."""
        choice, self.used = random.Random(self.seed), 0
        h = self.embed(x)
        maps = list(self.maps)[: choice.choice([1, 2, 3])]
        values = [m(h).reshape(len(x), *self.sizes) for m in maps]
        for _ in range(choice.randint(2, 6)):
            x = choice.choice(values)
            y = choice.choice(FUNCTIONS)(self, choice, x, values)
            if y is not None and 1 < y.dim() < 6 and y.numel() < FEW:
                values.append(y)
        y = values[-1].flatten(1)
        return F.linear(y, self.parameter([2, y.shape[1]]))

    def parameter(self, shape: list[int]) -> Tensor:
        """A stored tensor; it is made when the program runs for the first time."""
        if self.used == len(self.stored):
            self.stored.append(nn.Parameter(torch.randn(shape)))
        self.used += 1
        return self.stored[self.used - 1]


def some_axis(r: random.Random, x: Tensor) -> int:
    return r.randrange(1, x.dim())


def turned(r: random.Random, x: Tensor) -> Tensor:
    order = list(range(1, x.dim()))
    r.shuffle(order)
    return x.permute(0, *order)


def meet(m: Program, r: random.Random, x: Tensor, values: list[Tensor]) -> Tensor:
    """A sum or a product of two values, perhaps with axes in another order."""
    other = r.choice([v for v in values if v.shape == x.shape])
    moved = turned(r, other)
    other = moved if moved.shape == x.shape else other
    return x + other if r.random() < 0.5 else x * other.sigmoid()


def matmul(m: Program, r: random.Random, x: Tensor, values: list[Tensor]) -> Tensor | None:
    both = [y for v in values if v.dim() == x.dim() > 2 for y in (v, v.transpose(-1, -2))]
    fit = [y for y in both if y.shape[-2] == x.shape[-1] and y.shape[:-2] == x.shape[:-2]]
    return x @ r.choice(fit) if fit else None


def copied(m: Program, r: random.Random, x: Tensor, values: list[Tensor]) -> Tensor:
    axis = some_axis(r, x)
    kind = r.choice(["expand", "repeat", "interleave"])
    if kind == "interleave":
        return x.repeat_interleave(2, axis)
    if kind == "repeat":
        return x.repeat([2 if i == axis else 1 for i in range(x.dim())])
    return x.unsqueeze(axis).expand(*x.shape[:axis], 3, *x.shape[axis:])


def reshaped(m: Program, r: random.Random, x: Tensor, values: list[Tensor]) -> Tensor | None:
    axis = some_axis(r, x)
    if r.random() < 0.5:
        return x.flatten(axis, axis + 1) if axis + 1 < x.dim() else x.flatten(1)
    parts = [n for n in (2, 3) if x.shape[axis] % n == 0 and x.shape[axis] > n]
    return x.unflatten(axis, r.choice([(parts[0], -1), (-1, parts[0])])) if parts else None


def scaled(m: Program, r: random.Random, x: Tensor, values: list[Tensor]) -> Tensor:
    """Multiplies by a stored tensor or by a constant, along one axis or along all."""
    axis = some_axis(r, x)
    shape = [n if i == axis else 1 for i, n in enumerate(x.shape)][1:]
    if r.random() < 0.3:
        return x * torch.arange(1, x.shape[axis] + 1, dtype=x.dtype).view(shape)
    return x * m.parameter(list(x.shape[1:]) if r.random() < 0.3 else shape)


def along(m: Program, r: random.Random, x: Tensor, values: list[Tensor]) -> Tensor:
    """Applies a function along one axis."""
    axis = some_axis(r, x)
    kind = r.choice(["softmax", "sum", "cumsum", "select", "norm"])
    if kind == "softmax":
        return x.softmax(axis)
    if kind == "sum":
        return x.sum(axis, keepdim=r.random() < 0.5)
    if kind == "cumsum":
        return x.cumsum(axis)
    if kind == "select":
        return x.select(axis, r.randrange(x.shape[axis]))
    return F.normalize(x, dim=axis)


FUNCTIONS: list[Callable[[Program, random.Random, Tensor, list[Tensor]], Tensor | None]] = [
    meet,
    matmul,
    copied,
    reshaped,
    scaled,
    along,
    lambda m, r, x, values: turned(r, x),
    lambda m, r, x, values: F.linear(x, m.parameter([r.choice([2, 3, 4]), x.shape[-1]])),
]


def test_random_programs_have_the_symmetry_of_their_graphs() -> None:
    converted = free = 0
    for seed in SEEDS:
        torch.manual_seed(seed)
        try:
            graph = from_module(Program(seed), torch.randn(2, 3), verify=True)
        except ConversionError as error:
            if "permuted neurons" in str(error):
                pytest.fail(f"program {seed}: {error}")
            continue
        converted += 1
        free += sum(not neuron.fixed for neuron in graph.spec.neurons)
    # Most of them convert, and can permute more than the embedding.
    assert converted > len(SEEDS) // 2
    assert free > 2 * converted
