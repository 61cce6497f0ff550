r"""The products of the weights of networks of different sizes with their activations.

For the weights :math:`w_e` of edges :math:`e = (j, k)` from neurons :math:`k` to :math:`j`, and
activations :math:`x_k` at many inputs,

.. math:: y_j = \sum_{e = (j, k)} w_e x_k

is bilinear. It and its two derivatives each map two of weights, targets and sources to the third,
so one autograd function, which calls itself for its derivatives, is differentiable any number of
times. No tensor of edges times inputs is created.

Consecutive networks of equal sizes form a *run*, which is one batched product. If the runs are too
short for that, the product is a weighted sum over rows with `embedding_bag`. A convolution is the
same product whose rows are the values below its window; they are copied for a few networks at a
time.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nfn_graph.messages import UserError

#: A product with fewer multiplications than this takes longer to start than to compute.
_SHORT_RUN = 2**17
#: The inner products of `embedding_bag` are several times slower than its sums.
_SHORT_INNER_RUN = 2**14
#: The largest number of entries below windows that are copied at once, so that they stay cached.
_MOST_COLUMNS = 2**21


class Run(NamedTuple):
    """Consecutive networks of equal sizes, with the first row and edge that belongs to them."""

    networks: int
    targets: int
    sources: int
    first_target: int
    first_source: int
    first_edge: int

    def split(self, most: int) -> Iterator[Run]:
        """Splits the run into runs of at most `most` networks."""
        for done in range(0, self.networks, most):
            yield Run(
                min(most, self.networks - done),
                self.targets,
                self.sources,
                self.first_target + done * self.targets,
                self.first_source + done * self.sources,
                self.first_edge + done * self.targets * self.sources,
            )

    def of_targets(self, y: Tensor) -> Tensor:
        """The target rows of the run, `[networks, targets, columns]`."""
        rows = y[self.first_target : self.first_target + self.networks * self.targets]
        return rows.view(self.networks, self.targets, math.prod(y.shape[1:]))

    def of_sources(self, x: Tensor) -> Tensor:
        """The source rows of the run, `[networks * sources, ...]`."""
        return x[self.first_source : self.first_source + self.networks * self.sources]

    def of_edges(self, weights: Tensor, taps: int) -> Tensor:
        """The weights of the run, `[networks, targets, sources * taps]`."""
        count = self.networks * self.targets * self.sources
        own = weights[self.first_edge * taps : (self.first_edge + count) * taps]
        return own.view(self.networks, self.targets, self.sources * taps)


@dataclass(frozen=True)
class Window:
    """The positions that a convolution reads for one position of its result.

    Args:
        kernel: The number of positions along each axis.
        stride: The distance between neighbouring windows.
        dilation: The distance between neighbouring positions of a window.
        pads: The numbers of zeros before the first and after the last position of each axis.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]

    @cached_property
    def taps(self) -> int:
        """The total number of positions."""
        return math.prod(self.kernel)

    def results(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The number of positions of the result along each axis."""
        found = tuple(
            (a + n + b - d * (k - 1) - 1) // s + 1
            for n, (a, b), k, s, d in zip(
                sizes, self.pads, self.kernel, self.stride, self.dilation, strict=True
            )
        )
        if min(found) < 1:
            raise UserError(f"Expected positions for a kernel {self.kernel} (got {sizes})")
        return found

    def columns(self, x: Tensor) -> Tensor:
        """Arranges values `[rows, *positions, inputs]` as `[rows, *kernel, *results, inputs]`."""
        results = self.results(tuple(x.shape[1:-1]))
        pads = [n for pair in reversed(self.pads) for n in pair]
        x = F.pad(x, [0, 0, *pads]) if any(pads) else x.contiguous()
        row, *steps, one = x.stride()
        taps = [n * d for n, d in zip(steps, self.dilation, strict=True)]
        moves = [n * s for n, s in zip(steps, self.stride, strict=True)]
        shape = (x.shape[0], *self.kernel, *results, x.shape[-1])
        return x.as_strided(shape, (row, *taps, *moves, one))

    def add_to(self, x: Tensor, columns: Tensor) -> None:
        """The transpose of :meth:`columns`: adds them to values `[rows, *positions, inputs]`."""
        axes = len(self.kernel)
        sizes, results = x.shape[1:-1], columns.shape[1 + axes : -1]
        by_tap = columns.flatten(1, axes)
        for number, tap in enumerate(itertools.product(*map(range, self.kernel))):
            own, read = [], []
            for i, place in enumerate(tap):
                # The parts that lie in the zeros around the values are left out.
                shift, s = place * self.dilation[i] - self.pads[i][0], self.stride[i]
                first = max(0, -(shift // s))
                last = min(results[i] - 1, (sizes[i] - 1 - shift) // s)
                own.append(slice(first, max(last + 1, first)))
                begin = first * s + shift
                read.append(slice(begin, max(last * s + shift + 1, begin), s))
            x[(slice(None), *read)] += by_tap[:, number][(slice(None), *own)]


class Layers:
    """The completely connected layers of several networks, one after another.

    Args:
        targets: The number of target rows of every network.
        sources: The number of source rows of every network.
        device: The device of the indices.
    """

    def __init__(
        self, targets: tuple[int, ...], sources: tuple[int, ...], device: torch.device
    ) -> None:
        self._sizes = targets, sources, device
        self.num_targets, self.num_sources = sum(targets), sum(sources)
        self.runs: list[Run] = []
        target = source = edge = 0
        for (j, k), same in itertools.groupby(zip(targets, sources, strict=True)):
            networks = len(list(same))
            self.runs.append(Run(networks, j, k, target, source, edge))
            target += networks * j
            source += networks * k
            edge += networks * j * k
        self.num_edges = edge

    @property
    def edges(self) -> Edges:
        """The rows that the edges connect."""
        return _edges(*self._sizes)

    def runs_below(self, window: Window, positions: int) -> Iterator[Run]:
        """Splits runs into as many networks as windows at so many positions stay cached for."""
        for run in self.runs:
            each = run.sources * window.taps * positions
            yield from run.split(max(1, _MOST_COLUMNS // max(each, 1)))


@lru_cache(maxsize=512)
def complete_layers(
    targets: tuple[int, ...], sources: tuple[int, ...], is_shared: bool, device: torch.device
) -> Layers:
    """Makes :class:`Layers`; if all networks share their sources, they form one large layer."""
    if is_shared:
        return Layers((sum(targets),), sources[:1], device)
    return Layers(targets, sources, device)


class Edges(NamedTuple):
    """The rows that the edges of complete layers connect, in the order of the targets.

    `order` sorts the edges by their sources, and `*_by_source` are in that order. The pointers are
    the first edge of every target, or source, and the end of the last one.
    """

    source: Tensor
    target: Tensor
    pointers: Tensor
    order: Tensor
    target_by_source: Tensor
    pointers_by_source: Tensor


# There are six indices per edge, so only a few mixtures of small networks are cached.
@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _edges(targets: tuple[int, ...], sources: tuple[int, ...], device: torch.device) -> Edges:
    out, into = torch.tensor(targets), torch.tensor(sources)
    count = out * into
    network = torch.repeat_interleave(count)
    first = _before(count)[:-1]
    place = torch.arange(int(count.sum())) - first[network]
    in_rows, out_rows = _before(into)[:-1], _before(out)[:-1]
    into_, out_ = into[network], out[network]
    # In the order of the sources, an edge is at place k * out + j instead of j * in + k.
    j, k = place % out_, place // out_
    return Edges(
        source=(in_rows[network] + place % into_).to(device),
        target=(out_rows[network] + place // into_).to(device),
        pointers=_before(into.repeat_interleave(out)).to(device),
        order=(first[network] + j * into_ + k).to(device),
        target_by_source=(out_rows[network] + j).to(device),
        pointers_by_source=_before(out.repeat_interleave(into)).to(device),
    )


def _before(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def layer_product(
    weights: Tensor, x: Tensor, layers: Layers, window: Window | None = None
) -> Tensor:
    """Computes the rows of all targets, `[targets, inputs]` or `[targets, *results, inputs]`.

    Args:
        weights: The weights of all edges, `[edges * taps]`.
        x: The rows of all sources: `[sources, inputs]`, or `[sources, *positions, inputs]` for
            convolutions.
        layers: The rows that the edges connect.
        window: The window of a convolution; None for a linear layer.
    """
    sizes = tuple(x.shape[1:-1])
    if window is not None:
        window.results(sizes)
    result: Tensor = _Third.apply(_TARGETS, weights, x, (layers, window, sizes))
    return result


#: The tensors of a product, in this order; a map is named by the one that it computes.
_WEIGHTS, _TARGETS, _SOURCES = range(3)


class _Third(torch.autograd.Function):
    """The map from two of weights, targets and sources to the third, whose number is `wanted`.

    Each is the derivative of the sum of :math:`w_e y_j x_k` in the wanted tensor.
    """

    @staticmethod
    def forward(
        wanted: int,
        first: Tensor,
        second: Tensor,
        where: tuple[Layers, Window | None, tuple[int, ...]],
    ) -> Tensor:
        """Sums over edges, or multiplies the matrices of runs if these are long enough."""
        layers, window, sizes = where
        if window is not None:
            return _products_below(wanted, first, second, layers, window, sizes)
        first, second = first.contiguous(), second.contiguous()
        short = _SHORT_INNER_RUN if wanted == _WEIGHTS else _SHORT_RUN
        if len(layers.runs) == 1 or layers.num_edges * second.shape[1] >= short * len(layers.runs):
            return _products(wanted, first, second, layers)
        return _sums_over_edges(wanted, first, second, layers.edges)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keeps the two tensors."""
        ctx.wanted, first, second, ctx.where = inputs
        ctx.save_for_backward(first, second)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The same kind of map, with the derivative in the place of the result."""
        tensors = list(ctx.saved_tensors)
        tensors.insert(ctx.wanted, grads[0])
        found = [
            _Third.apply(i, *tensors[:i], *tensors[i + 1 :], ctx.where) if is_needed else None
            for i, is_needed in zip(
                (i for i in range(3) if i != ctx.wanted), ctx.needs_input_grad[1:3], strict=True
            )
        ]
        return (None, *found, None)

    @staticmethod
    def vmap(
        info: Any,
        dims: tuple[int | None, ...],
        wanted: int,
        first: Tensor,
        second: Tensor,
        where: Any,
    ) -> tuple[Tensor, int]:
        """Runs one network after another: tensors that are differentiated many times are small."""

        def at(x: Tensor, dim: int | None, i: int) -> Tensor:
            return x if dim is None else x.select(dim, i)

        parts = [
            _Third.apply(wanted, at(first, dims[1], i), at(second, dims[2], i), where)
            for i in range(info.batch_size)
        ]
        return torch.stack(parts), 0


# Torch asks for the signature in every call, and inspecting it takes longer than many products.
vars(_Third.forward)["__signature__"] = inspect.signature(_Third.forward)


def _sums_over_edges(wanted: int, first: Tensor, second: Tensor, edges: Edges) -> Tensor:
    if wanted == _WEIGHTS:
        return torch.ops.aten._embedding_bag_per_sample_weights_backward(
            first, second, edges.source, edges.pointers[:-1], edges.target, 0
        )
    rows, pointers = edges.source, edges.pointers
    if wanted == _SOURCES:
        first = first.index_select(0, edges.order)
        rows, pointers = edges.target_by_source, edges.pointers_by_source
    if not second.shape[1]:
        return second.new_zeros(pointers.shape[0] - 1, 0)
    return torch.embedding_bag(
        second.detach(),
        rows,
        pointers,
        per_sample_weights=first.detach(),
        include_last_offset=True,
    )[0]


def _products(wanted: int, first: Tensor, second: Tensor, layers: Layers) -> Tensor:
    """The products of linear layers, run by run."""
    columns = second.shape[1]
    shapes = (layers.num_edges,), (layers.num_targets, columns), (layers.num_sources, columns)
    result = second.new_empty(shapes[wanted])
    tensors = [first, second]
    tensors.insert(wanted, result)
    weights, y, x = tensors
    for run in layers.runs:
        w, own_y = run.of_edges(weights, 1), run.of_targets(y)
        own_x = run.of_sources(x).view(run.networks, run.sources, columns)
        if wanted == _WEIGHTS:
            torch.bmm(own_y, own_x.mT, out=w)
        elif wanted == _TARGETS:
            torch.bmm(w, own_x, out=own_y)
        else:
            torch.bmm(w.mT, own_y, out=own_x)
    return result


def _products_below(
    wanted: int,
    first: Tensor,
    second: Tensor,
    layers: Layers,
    window: Window,
    sizes: tuple[int, ...],
) -> Tensor:
    """The products of convolutions, for as many images and networks at once as stay cached."""
    results = window.results(sizes)
    each = max(run.sources for run in layers.runs) * window.taps * math.prod(results)
    most = min(max(1, 8 * _MOST_COLUMNS // max(each, 1)), max(second.shape[-1], 1))
    seconds = second.split(most, -1)
    if wanted == _WEIGHTS:
        weights, firsts = first.new_zeros(layers.num_edges * window.taps), first.split(most, -1)
    else:
        weights, firsts = first.contiguous(), seconds
    parts = []
    for y, x in zip(firsts, seconds, strict=True):
        if wanted == _TARGETS:
            y = x.new_empty(layers.num_targets, *results, x.shape[-1])
        elif wanted == _SOURCES:
            x = y.new_zeros(layers.num_sources, *sizes, y.shape[-1])
        y = y.contiguous()
        columns = math.prod(y.shape[1:])
        for run in layers.runs_below(window, columns):
            w, own_y, own_x = (
                run.of_edges(weights, window.taps),
                run.of_targets(y),
                run.of_sources(x),
            )
            if wanted == _SOURCES:
                below = torch.bmm(w.mT, own_y)
                window.add_to(own_x, below.view(-1, *window.kernel, *results, y.shape[-1]))
                continue
            below = window.columns(own_x).reshape(run.networks, run.sources * window.taps, columns)
            if wanted == _TARGETS:
                torch.bmm(w, below, out=own_y)
            else:
                w.baddbmm_(own_y, below.mT)
        parts.append(y if wanted == _TARGETS else x)
    if wanted == _WEIGHTS:
        return weights
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
