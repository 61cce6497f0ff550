r"""The NF-Layer as one autograd function, which computes :func:`message_passing` in large steps.

Going up and coming down are adjoint to each other, so the gradient is the same computation with
transposed maps. The largest tensors are written once: `embedding_bag` writes the sum of the
messages that an entry gets from its coarser sites, and its own product is added to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nfn_graph.features import Incidence, Rows
from nfn_graph.nn._message_passing import down, message_passing, up, with_transposed
from nfn_graph.ops._backends import is_transformed
from nfn_graph.ops._kernels import bag_down, bag_up
from nfn_graph.ops._matmul import product, sum_of_products
from nfn_graph.ops._precision import cast, sum_dtype, without_autocast
from nfn_graph.spec import FoldedSpec, Site

_Layer = tuple[FoldedSpec, Incidence, bool]
_Split = tuple[Sequence[Tensor], Sequence[Tensor | None], Tensor | None]


def fused_message_passing(
    spec: FoldedSpec,
    incidence: Incidence,
    values: Sequence[Tensor],
    maps: Sequence[Tensor | None],
    bias: Tensor | None,
    mean: bool,
) -> list[Tensor]:
    """Computes :func:`message_passing`."""
    return list(_Fused.apply(spec, incidence, mean, *values, *maps, bias))


class _Fused(torch.autograd.Function):
    """Inputs: values, maps, bias. Outputs: new values."""

    # There is no `setup_context`, for which torch would inspect the signature in every call. Only
    # the transforms of `torch.func` need it, and they use `message_passing` itself.
    @staticmethod
    def forward(
        ctx: Any, spec: FoldedSpec, incidence: Incidence, mean: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        values, maps, bias = _split(spec, tensors)
        rows, dtype = incidence.sites[spec.symmetry], values[0].dtype
        summaries = up(spec, values, bag_sums(rows, dtype))
        if mean:
            average(spec, incidence, summaries)
        message = bag_messages(spec, rows, summaries, transposed(maps), bias)
        ctx.layer = spec, incidence, mean
        # The summaries of leaves are their values, and hooks may copy every tensor that is saved.
        kept = [x for site, x in zip(spec.sites, summaries, strict=True) if not site.is_leaf]
        ctx.save_for_backward(*tensors, *kept)
        return tuple(down(spec, dtype, message))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad[3:]
        inputs, kept = saved[: len(needs)], iter(saved[len(needs) :])
        sites = ctx.layer[0].sites
        summaries = [x if s.is_leaf else next(kept) for s, x in zip(sites, inputs, strict=False)]
        flat = [g.contiguous() for g in grads]
        # A gradient that is differentiated again uses operations that have derivatives.
        if torch.is_grad_enabled() or is_transformed():
            found = _plain_gradient(ctx.layer, flat, inputs, needs)
        else:
            with without_autocast(flat[0].device):
                found = _gradient(ctx.layer, flat, inputs, summaries, needs)
        return (None, None, None, *found)


def bag_sums(rows: Sequence[Rows], dtype: torch.dtype) -> Callable[[int, Tensor], Sequence[Tensor]]:
    """The function by which :func:`up` sums the rows of a site for each of its covers."""
    wide = sum_dtype(dtype)

    def sums(number: int, summary: Tensor) -> Sequence[Tensor]:
        sizes = rows[number].cover_sizes
        return bag_up(summary, rows[number], wide).split_with_sizes(sizes) if sizes else ()

    return sums


def average(spec: FoldedSpec, incidence: Incidence, summaries: Sequence[Tensor]) -> None:
    """Turns the sums of summaries into means, in place."""
    scales = incidence.scales(spec, summaries[-1].dtype)
    for x, scale in zip(summaries, scales, strict=True):
        if scale is not None:
            _tapped(x, scale).mul_(scale)


def bag_messages(
    spec: FoldedSpec,
    rows: Sequence[Rows],
    summaries: Sequence[Tensor] | Mapping[int, Tensor],
    matrices: Sequence[Tensor | None],
    bias: Tensor | None = None,
) -> Callable[[int, list[Tensor]], Tensor]:
    """The function by which :func:`down` computes messages, with matrices `[inputs, outputs]`."""

    def message(number: int, received: list[Tensor]) -> Tensor:
        site, read, matrix = spec.sites[number], summaries[number], matrices[number]
        if matrix is None:  # The summary is empty.
            return read.new_empty(read.shape[0], 0)
        read = with_transposed(site, rows[number], read)
        matrix = cast(matrix, read.dtype)
        if received:
            return bag_down(cast(_table(received), read.dtype), rows[number], read, matrix)
        if bias is None or site.indices:
            return product(read, matrix)
        return torch.addmm(cast(bias, read.dtype), read, matrix)

    return message


def transposed(maps: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The matrices `[inputs, outputs]` of maps."""
    return [None if matrix is None else matrix.t() for matrix in maps]


def _gradient(
    layer: _Layer,
    grads: Sequence[Tensor],
    inputs: Sequence[Tensor],
    summaries: Sequence[Tensor],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Computes the gradients of values, maps and bias, as far as they are needed."""
    spec, incidence, mean = layer
    values, maps, bias = _split(spec, inputs)
    rows, dtype = incidence.sites[spec.symmetry], values[0].dtype
    # The gradient of a message is the sum of those of all finer entries that received it.
    sums = dict(enumerate(up(spec, grads, bag_sums(rows, dtype))))
    last, of_maps = sums[len(maps) - 1], any(needs[len(maps) :])
    scales = incidence.scales(spec, last.dtype) if mean else [None] * len(maps)
    matrices = [_adjoint(site, matrix) for site, matrix in zip(spec.sites, maps, strict=True)]
    of_sum = bag_messages(spec, rows, sums, matrices)
    found: list[Tensor | None] = [None] * len(inputs)
    if bias is not None and of_maps:
        found[-1] = cast(last.sum(0), bias.dtype)

    def finish(number: int) -> None:
        """Computes the gradient of a site's map, and frees the sums that it reads."""
        g, matrix = sums.pop(number), maps[number]
        if matrix is not None and of_maps:
            read = with_transposed(spec.sites[number], rows[number], summaries[number])
            found[len(maps) + number] = cast(sum_of_products(g, read), matrix.dtype)

    def message(number: int, received: list[Tensor]) -> Tensor:
        site, scale = spec.sites[number], scales[number]
        new = of_sum(number, received if scale is None else [])
        if scale is not None:
            _tapped(new, scale).mul_(scale)
            if received:
                new.add_(bag_down(_table(received), rows[number]))
        # The sums of neurons are usually larger than the gradient of their map, and those of the
        # network smaller. The smaller one stays in memory while the weights' messages are computed.
        if site.indices and not site.is_leaf:
            finish(number)
        return new

    if any(needs[: len(maps)]):
        found[: len(maps)] = down(spec, dtype, message)
    for number in sorted(sums, reverse=True):
        finish(number)
    return found


def _plain_gradient(
    layer: _Layer, grads: Sequence[Tensor], inputs: Sequence[Tensor], needs: Sequence[bool]
) -> list[Tensor | None]:
    """Computes the same through :func:`message_passing`, which can be differentiated again."""
    spec, incidence, mean = layer

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        full = [next(given) if need else x for x, need in zip(inputs, needs, strict=True)]
        return tuple(message_passing(spec, incidence, *_split(spec, full), mean))

    wanted = [x for x, need in zip(inputs, needs, strict=True) if need]
    pull: Callable[..., Any] = torch.func.vjp(run, *wanted)[1]
    pulled = iter(pull(tuple(grads)))
    return [next(pulled) if need else None for need in needs]


def _adjoint(site: Site, matrix: Tensor | None) -> Tensor | None:
    """The map of the gradients, `[inputs, outputs]`. Transposing entries is self-adjoint."""
    if matrix is None or not site.is_self:
        return matrix
    rows, reads = matrix.shape
    return matrix.reshape(rows, 2, reads // 2).transpose(0, 1).flatten(0, 1)


def _table(received: list[Tensor]) -> Tensor:
    """The messages of all covers, one cover after another."""
    return received[0] if len(received) == 1 else torch.cat(received)


def _tapped(x: Tensor, scale: Tensor) -> Tensor:
    """Views `[rows, taps * channels]` as `[rows, taps, channels]`, with the taps of a scale."""
    return x.view(x.shape[0], scale.shape[1], x.shape[1] // max(scale.shape[1], 1))


def _split(spec: FoldedSpec, tensors: Sequence[Any]) -> _Split:
    count = len(spec.sites)
    return tensors[:count], tensors[count : 2 * count], tensors[2 * count]
