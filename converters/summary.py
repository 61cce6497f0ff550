"""Summarises a graph as a table with one row per type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nfn_graph import WeightGraph

_MOST_SHOWN = 8
COLUMNS = ("type", "neurons", "weights", "taps", "mean", "std", "zeros", "NaN", "inf")


@dataclass(frozen=True)
class Row:
    """The entries of one type.

    Attributes:
        type: The name of the type; `a -> b` for weights.
        neurons: The number of neurons, None for a weight type.
        weights: The number of weights (pairs of neurons), None for a neuron type.
        taps: The number of values per neuron or weight.
        mean: The mean of the finite entries over all channels; NaN if there are none.
        std: The standard deviation of the finite entries.
        zeros: The number of entries that are exactly 0.
        nan: The number of NaN entries.
        inf: The number of infinite entries.
    """

    type: str
    neurons: int | None
    weights: int | None
    taps: int
    mean: float
    std: float
    zeros: int
    nan: int
    inf: int

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of `COLUMNS`."""
        empty = self.taps == 0
        return (
            self.type,
            "" if self.neurons is None else f"{self.neurons:,}",
            "" if self.weights is None else f"{self.weights:,}",
            str(self.taps),
            *("" if empty else f"{x:.3g}" for x in (self.mean, self.std)),
            *("" if empty else f"{n:,}" for n in (self.zeros, self.nan, self.inf)),
        )


@dataclass(frozen=True)
class Summary:
    """A table with one row per type, which can be printed.

    Attributes:
        rows: One row per type.
        left_out: Tensors of the checkpoint that are not in the graph, with the reason.
    """

    rows: tuple[Row, ...]
    left_out: Mapping[str, str]

    @property
    def nan(self) -> int:
        """The number of NaN entries in all types."""
        return sum(row.nan for row in self.rows)

    @property
    def inf(self) -> int:
        """The number of infinite entries in all types."""
        return sum(row.inf for row in self.rows)

    @property
    def notes(self) -> list[str]:
        """One sentence for every reason why tensors are left out."""
        keys: dict[str, list[str]] = {}
        for key, reason in self.left_out.items():
            keys.setdefault(reason, []).append(key)
        return [f"Left out, {reason}: {_shown(names)}" for reason, names in keys.items()]

    def __str__(self) -> str:
        table = [COLUMNS, *(row.cells for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = []
        for cells in table:
            first, *rest = zip(cells, widths, strict=True)
            lines.append("  ".join([first[0].ljust(first[1]), *(c.rjust(w) for c, w in rest)]))
        lines.insert(1, "-" * len(lines[0]))
        return "\n".join(line.rstrip() for line in [*lines, *self.notes])


def summary(graph: WeightGraph) -> Summary:
    """Summarises the types of a graph or of a batch.

    Example:
        >>> from torch import nn
        >>> from nfn_graph.converters import from_module, summary
        >>> network = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> summary(from_module(network)).nan
        0
    """
    spec = graph.spec
    rows = []
    for neuron in spec.neurons:
        x = graph[neuron.name].x
        name = f"{neuron.name} (fixed)" if neuron.fixed else neuron.name
        if neuron.parents:
            name += f" in {' x '.join(neuron.parents)}"
        rows.append(_row(name, x.shape[0], None, x))
    for weight in spec.weights:
        x = graph[weight.key].edge_attr
        name = f"{weight.source} -> {weight.target}"
        if weight.name != "weight":
            name += f" ({weight.name})"
        rows.append(_row(name, None, x.shape[0], x))
    reasons = {
        key: "on purpose" if key in layout.aside else _why_left_out(value)
        for layout in graph.layouts
        for key, value in layout.carried.items()
    }
    return Summary(tuple(rows), reasons)


def _why_left_out(value: Any) -> str:
    if not isinstance(value, Tensor):
        return "not a tensor"
    if not value.is_floating_point():
        return "integers (counts, indices or masks)"
    return "not a weight of the computation (unused, or a constant whose values it reads)"


def _shown(names: list[str]) -> str:
    rest = len(names) - _MOST_SHOWN
    more = f" and {rest} more" if rest > 0 else ""
    return ", ".join(names[:_MOST_SHOWN]) + more


def _row(name: str, neurons: int | None, weights: int | None, x: Tensor) -> Row:
    if x.is_floating_point() and x.element_size() == 1:
        x = x.float()  # torch supports few operations on 8-bit floats.
    finite = torch.isfinite(x)
    nan = int(torch.isnan(x).sum())
    values = x if bool(finite.all()) else x[finite]
    # Sums in double precision: half precision would overflow.
    mean = values.mean(dtype=torch.float64) if values.numel() else x.new_tensor(float("nan"))
    std = _std(values, float(mean))
    zeros = x.numel() - int(torch.count_nonzero(x))
    inf = x.numel() - int(finite.sum()) - nan
    return Row(name, neurons, weights, x.shape[1], float(mean), std, zeros, nan, inf)


def _std(values: Tensor, mean: float) -> float:
    """Returns the standard deviation, computed in pieces so that no large copy is made."""
    total = 0.0
    for piece in values.reshape(-1).split(2**20):
        total += float(piece.double().sub(mean).square().sum())
    return (total / values.numel()) ** 0.5 if values.numel() else float("nan")
