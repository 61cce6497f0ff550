r"""The products of networks of different sizes with their activations, as one.

For the weights :math:`w_e` of edges :math:`e = (j, k)` from neurons :math:`k` to :math:`j`, and
activations :math:`x_k` at many inputs,

.. math:: y_j = \sum_{e = (j, k)} w_e x_k

is a weighted sum over rows, `embedding_bag`, which makes no tensor of edges times inputs. Its
derivative in the activations is the same over the edges sorted by their sources, and that in the
weights one inner product per edge; each of them is differentiable in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Edges:
    """Which rows the weights of complete layers join, network after network.

    Args:
        source: The source row of every edge, in the order of the targets.
        target: The target row of every edge.
        pointers: Where the edges of every target begin, and where the last ones end.
        order: The edges in the order of their sources.
        target_by_source: The target row of every edge in that order.
        pointers_by_source: Where the edges of every source begin in that order.
        networks: How many networks read the same rows; 1 if all have rows of their own.
    """

    source: Tensor
    target: Tensor
    pointers: Tensor
    order: Tensor
    target_by_source: Tensor
    pointers_by_source: Tensor
    networks: int


@lru_cache(maxsize=64)
def complete_edges(
    targets: tuple[int, ...], sources: tuple[int, ...], is_shared: bool, device: torch.device
) -> Edges:
    """The edges of complete layers.

    Args:
        targets: The number of target rows of every network.
        sources: The number of source rows of every network.
        is_shared: Whether all networks read the same rows.
        device: Where the indices are needed.
    """
    out, into = torch.tensor(targets), torch.tensor(sources)
    count = out * into
    network = torch.repeat_interleave(count)
    first = _before(count)[:-1]
    place = torch.arange(int(count.sum())) - first[network]
    in_rows = torch.zeros_like(into) if is_shared else _before(into)[:-1]
    out_rows = _before(out)[:-1]
    into_, out_ = into[network], out[network]
    # In the order of the sources, an edge lies at place k * out + j instead of j * in + k.
    j, k = place % out_, place // out_
    return Edges(
        source=(in_rows[network] + place % into_).to(device),
        target=(out_rows[network] + place // into_).to(device),
        pointers=_before(into.repeat_interleave(out)).to(device),
        order=(first[network] + j * into_ + k).to(device),
        target_by_source=(out_rows[network] + j).to(device),
        pointers_by_source=_before(out.repeat_interleave(into)).to(device),
        networks=len(targets) if is_shared else 1,
    )


def _before(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def product(weights: Tensor, x: Tensor, edges: Edges) -> Tensor:
    """Weighted sums `[targets, inputs]` of rows `[sources, inputs]`, by weights `[edges]`."""
    return Product.apply(weights, x, edges)


class Product(torch.autograd.Function):
    """:func:`product`, differentiable any number of times."""

    @staticmethod
    def forward(weights: Tensor, x: Tensor, edges: Edges) -> Tensor:
        """Sums over the edges of every target."""
        return _bags(x, edges.source, edges.pointers, weights)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keeps weights and activations."""
        weights, x, ctx.edges = inputs
        ctx.save_for_backward(weights, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Inner products, and sums over the edges of every source."""
        weights, x = ctx.saved_tensors
        to_weights, to_x, _ = ctx.needs_input_grad
        return (
            Inner.apply(grads[0], x, ctx.edges) if to_weights else None,
            Back.apply(weights, grads[0], ctx.edges) if to_x else None,
            None,
        )


class Back(torch.autograd.Function):
    """The derivative of :class:`Product` in the activations: the same from targets to sources."""

    @staticmethod
    def forward(weights: Tensor, y: Tensor, edges: Edges) -> Tensor:
        """Sums over the edges of every source."""
        own = weights.index_select(0, edges.order)
        x = _bags(y, edges.target_by_source, edges.pointers_by_source, own)
        return x.reshape(edges.networks, -1, x.shape[1]).sum(0) if edges.networks > 1 else x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keeps weights and activations."""
        weights, y, ctx.edges = inputs
        ctx.save_for_backward(weights, y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Inner products, and sums over the edges of every target."""
        weights, y = ctx.saved_tensors
        to_weights, to_y, _ = ctx.needs_input_grad
        return (
            Inner.apply(y, grads[0], ctx.edges) if to_weights else None,
            Product.apply(weights, grads[0], ctx.edges) if to_y else None,
            None,
        )


class Inner(torch.autograd.Function):
    """The derivative of :class:`Product` in the weights: one inner product per edge."""

    @staticmethod
    def forward(y: Tensor, x: Tensor, edges: Edges) -> Tensor:
        """Products of the rows at both ends."""
        return torch.ops.aten._embedding_bag_per_sample_weights_backward(
            y.contiguous(), x.contiguous(), edges.source, edges.pointers[:-1], edges.target, 0
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keeps the activations."""
        y, x, ctx.edges = inputs
        ctx.save_for_backward(y, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Sums over the edges of every target, and of every source."""
        y, x = ctx.saved_tensors
        to_y, to_x, _ = ctx.needs_input_grad
        return (
            Product.apply(grads[0], x, ctx.edges) if to_y else None,
            Back.apply(grads[0], y, ctx.edges) if to_x else None,
            None,
        )


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
