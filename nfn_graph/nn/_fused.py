r"""The NF-Layer as one autograd function, which computes :func:`message_passing` in large steps.

Going up and coming down are adjoint to each other, so the gradient is the same computation with
transposed maps. The largest tensors are written once: `embedding_bag` writes the sum of the
messages that an entry gets from its coarser sites, and its own product is added to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nfn_graph.features import Incidence, Rows
from nfn_graph.nn._message_passing import channels_in, channels_out, message_passing
from nfn_graph.ops._backends import is_transformed
from nfn_graph.ops._kernels import bag_down, bag_up
from nfn_graph.ops._matmul import product, sum_of_products
from nfn_graph.ops._precision import cast, sum_dtype, without_autocast
from nfn_graph.spec import FoldedSpec, Site

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
        dtype = values[0].dtype
        summaries = up(spec, incidence, values)
        if mean:
            average(spec, incidence, summaries)
        new = down_maps(spec, incidence, summaries, maps, bias, dtype)
        kept = [x for x, site in zip(summaries, spec.sites, strict=True) if not site.is_leaf]
        ctx.layer, ctx.shapes = (spec, incidence, mean), [x.shape for x in new]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *kept)
        return tuple(new)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        spec, incidence, mean = ctx.layer
        count = len(spec.sites)
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad[3:]
        inputs = saved[: len(needs)]
        flat = [
            inputs[0].new_zeros(shape) if g is None else g.contiguous()
            for g, shape in zip(grads, ctx.shapes, strict=True)
        ]
        # A gradient that is differentiated again uses operations that have derivatives.
        if torch.is_grad_enabled() or is_transformed():
            return (None, None, None, *_plain_gradient(spec, incidence, mean, flat, inputs, needs))
        with without_autocast(flat[0].device):
            wanted = (any(needs[:count]), any(needs[count:]))
            kept = saved[len(needs) :]
            found = _gradient(spec, incidence, mean, flat, inputs, kept, *wanted)
        return (None, None, None, *found)


def up(
    spec: FoldedSpec,
    incidence: Incidence,
    values: Sequence[Tensor],
    sums: dict[int, Tensor] | None = None,
) -> list[Tensor]:
    """Computes the summaries of all sites, with sums in the place of means.

    Args:
        spec: The layer's spec.
        incidence: The rows of its sites.
        values: The own entries of every site.
        sums: The result of :func:`bag_up` for leaves whose entries are not in memory.
    """
    wide = sum_dtype(values[0].dtype)
    channels = channels_in(spec.sites, values)
    below: list[list[Sequence[Tensor]]] = []
    summaries: list[Tensor] = []
    for number, (site, rows) in enumerate(
        zip(spec.sites, incidence.sites[spec.symmetry], strict=True)
    ):
        summary = values[number]
        if not site.is_leaf:
            parts = [
                below[part.below.site][part.below.cover][part.below.part]
                for part in site.parts
                if part.below is not None
            ]
            summary = torch.cat([*parts, cast(summary, wide)], 1)
        summaries.append(summary)
        table = None if sums is None else sums.get(number)
        if table is None and site.covers:
            table = bag_up(summary, rows, wide)
        tables = () if table is None else table.split_with_sizes(rows.cover_sizes)
        below.append([_split_parts(site, x, channels) for x in tables])
    return summaries


def average(spec: FoldedSpec, incidence: Incidence, summaries: Sequence[Tensor]) -> None:
    """Turns the sums of summaries into means, in place."""
    scales = incidence.scales(spec, summaries[-1].dtype)
    for x, scale in zip(summaries, scales, strict=True):
        if scale is not None and scale.shape[1]:
            _tapped(x, scale).mul_(scale)


def down(
    spec: FoldedSpec,
    channels: int,
    dtype: torch.dtype,
    new_message: Callable[[int, Tensor | None], Tensor],
) -> list[Tensor]:
    """Computes the new entries of every site: the own part of its message, which is the map of
    its summary plus the messages of coarser sites.

    Args:
        spec: The layer's spec.
        channels: The number of channels of the messages.
        dtype: The dtype of the entries.
        new_message: A function that returns the message of a site, given its number and the table
            of the messages of its covers, one cover after another; None if it has no covers.
    """
    parts_of: list[Sequence[Tensor]] = [()] * len(spec.sites)

    def sent(site: Site, cover: int, senders: Sequence[int | None]) -> Tensor:
        """The message of a coarser site to every part of a finer one; zeros where it sends none."""
        parts = parts_of[cover]
        if len(senders) == 1 and senders[0] is not None:
            return parts[senders[0]]
        rows = parts[0].shape[0]
        found = [
            parts[0].new_zeros(rows, part.taps * channels) if number is None else parts[number]
            for part, number in zip(site.parts, senders, strict=True)
        ]
        return torch.cat(found, 1)

    for number in reversed(range(len(spec.sites))):
        site = spec.sites[number]
        table: Tensor | None = None
        if site.covers:
            pairs = zip(site.covers, site.senders, strict=True)
            tables = [sent(site, cover, senders) for cover, senders in pairs]
            table = tables[0] if len(tables) == 1 else torch.cat(tables)
            table = cast(table, dtype) if site.is_leaf else table
        parts_of[number] = _split_parts(site, new_message(number, table), channels)
    # The results are not views, since users may change them in place.
    return [
        parts[-1] if site.is_leaf else parts[-1].to(dtype, copy=True)
        for site, parts in zip(spec.sites, parts_of, strict=True)
    ]


def down_maps(
    spec: FoldedSpec,
    incidence: Incidence,
    summaries: Sequence[Tensor],
    maps: Sequence[Tensor | None],
    bias: Tensor | None,
    dtype: torch.dtype,
    skipped: Sequence[int] = (),
) -> list[Tensor]:
    """Computes :func:`down` with the maps of a layer; skipped sites return their table, if any."""
    rows = incidence.sites[spec.symmetry]

    def new_message(number: int, table: Tensor | None) -> Tensor:
        if number in skipped:
            return torch.empty(0) if table is None else table
        site, matrix = spec.sites[number], maps[number]
        constant = None if site.indices else bias
        matrix = None if matrix is None else matrix.t()
        return _message(site, rows[number], table, summaries[number], matrix, constant)

    return down(spec, channels_out(spec.sites, maps), dtype, new_message)


def _gradient(
    spec: FoldedSpec,
    incidence: Incidence,
    mean: bool,
    grads: Sequence[Tensor],
    inputs: Sequence[Tensor],
    kept: Sequence[Tensor],
    of_values: bool,
    of_maps: bool,
) -> list[Tensor | None]:
    """Computes the gradients of values, maps and bias, as far as they are needed."""
    values, maps, bias = _split(spec, inputs)
    rest = iter(kept)
    reads = [x if s.is_leaf else next(rest) for s, x in zip(spec.sites, values, strict=True)]
    # The gradient of a message is the sum of those of all finer entries that received it.
    sums = up(spec, incidence, grads)
    own: list[Tensor | None] = [None] * len(values)
    if of_values:
        own[:] = _gradient_of_values(spec, incidence, mean, sums, values, maps)
    found: list[Tensor | None] = [None] * (len(maps) + 1)
    if not of_maps:
        return [*own, *found]
    if bias is not None:
        found[-1] = cast(sums[-1].sum(0), bias.dtype)
    # The gradients of the maps are large, so they come last, when the messages of the gradient are
    # freed, and each sum is freed after its use.
    rows = incidence.sites[spec.symmetry]
    for number in reversed(range(len(maps))):
        g, matrix = sums.pop(), maps[number]
        if matrix is not None:
            read = _with_transposed(spec.sites[number], rows[number], reads[number])
            found[number] = cast(sum_of_products(g, read), matrix.dtype)
    return [*own, *found]


def _gradient_of_values(
    spec: FoldedSpec,
    incidence: Incidence,
    mean: bool,
    sums: Sequence[Tensor],
    values: Sequence[Tensor],
    maps: Sequence[Tensor | None],
) -> list[Tensor]:
    scales = incidence.scales(spec, sums[-1].dtype) if mean else [None] * len(values)
    rows = incidence.sites[spec.symmetry]

    def new_message(number: int, table: Tensor | None) -> Tensor:
        site, matrix, scale, read = spec.sites[number], maps[number], scales[number], sums[number]
        if matrix is not None:
            matrix = _adjoint(matrix, site.is_self)
        if scale is None or matrix is None:
            return _message(site, rows[number], table, read, matrix, None)
        new = _tapped(product(read, cast(matrix, read.dtype)), scale)
        if table is None:
            return new.mul_(scale).flatten(1)
        out = bag_down(table, rows[number])
        _tapped(out, scale).addcmul_(new, scale)
        return out

    return down(spec, channels_in(spec.sites, values), values[0].dtype, new_message)


def _plain_gradient(
    spec: FoldedSpec,
    incidence: Incidence,
    mean: bool,
    grads: Sequence[Tensor],
    inputs: Sequence[Tensor],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Computes the same through :func:`message_passing`, which can be differentiated again."""

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        full = [next(given) if need else x for x, need in zip(inputs, needs, strict=True)]
        return tuple(message_passing(spec, incidence, *_split(spec, full), mean))

    wanted = [x for x, need in zip(inputs, needs, strict=True) if need]
    pull: Callable[..., Any] = torch.func.vjp(run, *wanted)[1]
    pulled = iter(pull(tuple(grads)))
    return [next(pulled) if need else None for need in needs]


def _message(
    site: Site,
    rows: Rows,
    table: Tensor | None,
    read: Tensor,
    matrix: Tensor | None,
    constant: Tensor | None,
) -> Tensor:
    """The messages of a site's covers plus the map `[inputs, outputs]` of its summary."""
    if matrix is None:
        return read.new_empty(read.shape[0], 0) if table is None else bag_down(table, rows)
    read = _with_transposed(site, rows, read)
    matrix = cast(matrix, read.dtype)
    if table is not None:
        return bag_down(table, rows, read, matrix)
    if constant is None:
        return product(read, matrix)
    return torch.addmm(cast(constant, read.dtype), read, matrix)


def _with_transposed(site: Site, rows: Rows, x: Tensor) -> Tensor:
    """The input of a site's map: its summary and, for a self weight, that of the transpose."""
    return torch.cat([x, x.index_select(0, rows.transposed)], 1) if site.is_self else x


def _adjoint(matrix: Tensor, is_self: bool) -> Tensor:
    """The map of the gradients. Transposing entries is self-adjoint."""
    if not is_self:
        return matrix
    rows, reads = matrix.shape
    return matrix.reshape(rows, 2, reads // 2).transpose(0, 1).flatten(0, 1)


def _split_parts(site: Site, x: Tensor, channels: int) -> Sequence[Tensor]:
    """The columns of a summary or message that belong to each part of a site."""
    if len(site.parts) == 1:
        return (x,)
    return x.split_with_sizes([part.taps * channels for part in site.parts], 1)


def _tapped(x: Tensor, like: Tensor) -> Tensor:
    """Views rows `[rows, taps * channels]` as `[rows, taps, channels]`, with the taps of `like`."""
    return x.view(x.shape[0], like.shape[1], x.shape[1] // max(like.shape[1], 1))


def _split(spec: FoldedSpec, tensors: Sequence[Any]) -> _Split:
    count = len(spec.sites)
    return tensors[:count], tensors[count : 2 * count], tensors[2 * count]
