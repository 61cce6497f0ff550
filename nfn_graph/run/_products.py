r"""The products of the weights of networks of different sizes with their activations.

For the weights :math:`w_e` of edges :math:`e = (j, k)` from neurons :math:`k` to :math:`j`, and
activations :math:`x_k` at many inputs,

.. math:: y_j = \sum_{e = (j, k)} w_e x_k

is bilinear, and its derivatives in the weights and in the activations are bilinear maps of the same
kind. Three autograd functions that call each other are therefore differentiable any number of
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
    """Consecutive networks of equal sizes.

    Attributes:
        networks: The number of networks.
        targets: The number of target rows of each network.
        sources: The number of source rows of each network.
        first_target: The first target row.
        first_source: The first source row.
        first_edge: The first edge.
    """

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

    def padded(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The number of positions along each axis, including the zeros around them."""
        return tuple(n + a + b for n, (a, b) in zip(sizes, self.pads, strict=True))

    def results(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The number of positions of the result along each axis."""
        found = tuple(
            (n - d * (k - 1) - 1) // s + 1
            for n, k, s, d in zip(
                self.padded(sizes), self.kernel, self.stride, self.dilation, strict=True
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
        self._targets, self._sources, self._device = targets, sources, device
        self.num_targets, self.num_sources = sum(targets), sum(sources)
        runs = []
        target = source = edge = 0
        for (j, k), same in itertools.groupby(zip(targets, sources, strict=True)):
            run = Run(len(list(same)), j, k, target, source, edge)
            runs.append(run)
            target += run.networks * j
            source += run.networks * k
            edge += run.networks * j * k
        self.num_edges = edge
        self.runs = tuple(runs)

    def has_long_runs(self, columns: int, short: int) -> bool:
        """Whether batched products of the runs are faster than sums over edges."""
        return len(self.runs) == 1 or self.num_edges * columns >= short * len(self.runs)

    @property
    def edges(self) -> Edges:
        """The rows that the edges connect."""
        return _edges(self._targets, self._sources, self._device)


@lru_cache(maxsize=512)
def complete_layers(
    targets: tuple[int, ...], sources: tuple[int, ...], is_shared: bool, device: torch.device
) -> Layers:
    """Makes the completely connected layers of several networks.

    Args:
        targets: The number of target rows of every network.
        sources: The number of source rows of every network.
        is_shared: Whether all networks read the same rows, so that they form one large layer.
        device: The device of the indices.
    """
    if is_shared:
        return Layers((sum(targets),), sources[:1], device)
    return Layers(targets, sources, device)


class Edges(NamedTuple):
    """The rows that the weights of complete layers connect, network after network.

    Attributes:
        source: The source row of every edge, in the order of the targets.
        target: The target row of every edge.
        pointers: The first edge of every target, and the end of the last one.
        order: The edges in the order of their sources.
        target_by_source: The target row of every edge in that order.
        pointers_by_source: The first edge of every source in that order, and the end of the last
            one.
    """

    source: Tensor
    target: Tensor
    pointers: Tensor
    order: Tensor
    target_by_source: Tensor
    pointers_by_source: Tensor


# There are six indices per edge, so only a few mixtures of small networks are cached.
@lru_cache(maxsize=16)
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
    """Computes the rows of all targets.

    Args:
        weights: The weights of all edges, `[edges * taps]`.
        x: The rows of all sources: `[sources, inputs]`, or `[sources, *positions, inputs]` for
            convolutions.
        layers: The rows that the edges connect.
        window: The window of a convolution; None for a linear layer.

    Returns:
        `[targets, inputs]`, or `[targets, *results, inputs]`.
    """
    if window is not None:
        window.results(tuple(x.shape[1:-1]))
    result: Tensor = Product.apply(weights, x, layers, window, tuple(x.shape[1:-1]))
    return result


class _Bilinear(torch.autograd.Function):
    """One of three maps of two tensors, given layers, a window and the positions of the sources."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keeps the two tensors."""
        first, second, *ctx.rest = inputs
        ctx.save_for_backward(first, second)

    @classmethod
    def vmap(
        cls, info: Any, dims: tuple[int | None, ...], first: Tensor, second: Tensor, *rest: Any
    ) -> tuple[Tensor, int]:
        """Runs one network after another: tensors that are differentiated many times are small."""

        def at(x: Tensor, dim: int | None, i: int) -> Tensor:
            return x if dim is None else x.select(dim, i)

        parts = [
            cls.apply(at(first, dims[0], i), at(second, dims[1], i), *rest)
            for i in range(info.batch_size)
        ]
        return torch.stack(parts), 0


class Product(_Bilinear):
    """The map from weights and sources to targets; see :func:`layer_product`."""

    @staticmethod
    def forward(
        weights: Tensor, x: Tensor, layers: Layers, window: Window | None, sizes: tuple[int, ...]
    ) -> Tensor:
        """Sums over the edges of every target."""
        weights = weights.contiguous()
        if window is None:
            if not layers.has_long_runs(x.shape[1], _SHORT_RUN):
                edges = layers.edges
                return _bags(x, edges.source, edges.pointers, weights)
            x = x.contiguous()
            y = x.new_empty(layers.num_targets, x.shape[1])
            for run in layers.runs:
                own = run.of_sources(x).view(run.networks, run.sources, x.shape[1])
                torch.bmm(run.of_edges(weights, 1), own, out=run.of_targets(y))
            return y
        results = window.results(sizes)
        parts = []
        for part in x.split(_images(layers, window, results, x.shape[-1]), -1):
            y = x.new_empty(layers.num_targets, *results, part.shape[-1])
            columns = math.prod(y.shape[1:])
            for run in _short(layers, window, results, part.shape[-1]):
                own = window.columns(run.of_sources(part))
                own = own.reshape(run.networks, run.sources * window.taps, columns)
                torch.bmm(run.of_edges(weights, window.taps), own, out=run.of_targets(y))
            parts.append(y)
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Inner products, and sums over the edges of every source."""
        weights, x = ctx.saved_tensors
        return (
            Inner.apply(grads[0], x, *ctx.rest) if ctx.needs_input_grad[0] else None,
            Back.apply(weights, grads[0], *ctx.rest) if ctx.needs_input_grad[1] else None,
            *(None, None, None),
        )


class Back(_Bilinear):
    """The map from weights and targets to sources: the derivative of :class:`Product`."""

    @staticmethod
    def forward(
        weights: Tensor, y: Tensor, layers: Layers, window: Window | None, sizes: tuple[int, ...]
    ) -> Tensor:
        """Sums over the edges of every source."""
        weights = weights.contiguous()
        if window is None:
            if not layers.has_long_runs(y.shape[1], _SHORT_RUN):
                edges = layers.edges
                own = weights.index_select(0, edges.order)
                return _bags(y, edges.target_by_source, edges.pointers_by_source, own)
            y = y.contiguous()
            x = y.new_empty(layers.num_sources, y.shape[1])
            for run in layers.runs:
                own = run.of_sources(x).view(run.networks, run.sources, x.shape[1])
                torch.bmm(run.of_edges(weights, 1).mT, run.of_targets(y), out=own)
            return x
        results = window.results(sizes)
        parts = []
        for part in y.split(_images(layers, window, results, y.shape[-1]), -1):
            part = part.contiguous()
            x = y.new_zeros(layers.num_sources, *sizes, part.shape[-1])
            for run in _short(layers, window, results, part.shape[-1]):
                own = torch.bmm(run.of_edges(weights, window.taps).mT, run.of_targets(part))
                own = own.view(-1, *window.kernel, *results, part.shape[-1])
                window.add_to(run.of_sources(x), own)
            parts.append(x)
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Inner products, and sums over the edges of every target."""
        weights, y = ctx.saved_tensors
        return (
            Inner.apply(y, grads[0], *ctx.rest) if ctx.needs_input_grad[0] else None,
            Product.apply(weights, grads[0], *ctx.rest) if ctx.needs_input_grad[1] else None,
            *(None, None, None),
        )


class Inner(_Bilinear):
    """The map from targets and sources to weights: the derivative of :class:`Product`."""

    @staticmethod
    def forward(
        y: Tensor, x: Tensor, layers: Layers, window: Window | None, sizes: tuple[int, ...]
    ) -> Tensor:
        """Computes the inner products of the rows at both ends of every edge."""
        x, y = x.contiguous(), y.contiguous()
        if window is None:
            if not layers.has_long_runs(x.shape[1], _SHORT_INNER_RUN):
                source, target, pointers, *_ = layers.edges
                return torch.ops.aten._embedding_bag_per_sample_weights_backward(
                    y, x, source, pointers[:-1], target, 0
                )
            weights = x.new_empty(layers.num_edges)
            for run in layers.runs:
                own = run.of_sources(x).view(run.networks, run.sources, x.shape[1])
                torch.bmm(run.of_targets(y), own.mT, out=run.of_edges(weights, 1))
            return weights
        results = window.results(sizes)
        images = _images(layers, window, results, x.shape[-1])
        weights = x.new_zeros(layers.num_edges * window.taps)
        for left, right in zip(y.split(images, -1), x.split(images, -1), strict=True):
            left, columns = left.contiguous(), math.prod(left.shape[1:])
            for run in _short(layers, window, results, left.shape[-1]):
                own = window.columns(run.of_sources(right))
                own = own.reshape(run.networks, run.sources * window.taps, columns)
                run.of_edges(weights, window.taps).baddbmm_(run.of_targets(left), own.mT)
        return weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Sums over the edges of every target, and of every source."""
        y, x = ctx.saved_tensors
        return (
            Product.apply(grads[0], x, *ctx.rest) if ctx.needs_input_grad[0] else None,
            Back.apply(grads[0], y, *ctx.rest) if ctx.needs_input_grad[1] else None,
            *(None, None, None),
        )


for _forward in (Product.forward, Back.forward, Inner.forward):
    # Torch asks for the signature in every call, and inspecting it takes longer than many products.
    vars(_forward)["__signature__"] = inspect.signature(_forward)


def _images(layers: Layers, window: Window, results: tuple[int, ...], images: int) -> int:
    """The number of images whose windows are copied at once."""
    each = max(run.sources for run in layers.runs) * window.taps * math.prod(results)
    return min(max(1, 8 * _MOST_COLUMNS // max(each, 1)), max(images, 1))


def _short(layers: Layers, window: Window, results: tuple[int, ...], images: int) -> Iterator[Run]:
    """Splits runs into as many networks as windows are copied for at once."""
    for run in layers.runs:
        each = run.sources * window.taps * math.prod(results) * images
        yield from run.split(max(1, _MOST_COLUMNS // max(each, 1)))


def _bags(x: Tensor, rows: Tensor, pointers: Tensor, weights: Tensor) -> Tensor:
    if not x.shape[1]:
        return x.new_zeros(pointers.shape[0] - 1, 0)
    return torch.embedding_bag(
        x.detach().contiguous(),
        rows,
        pointers,
        per_sample_weights=weights.detach().contiguous(),
        include_last_offset=True,
    )[0]
