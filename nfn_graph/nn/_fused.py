r"""The NF-Layer as one autograd function: :func:`message_passing` in few and large steps.

Going up and coming down are adjoint to each other, so the gradient is the same computation with
transposed maps. The largest tensors are written once: `embedding_bag` writes the sum of the
messages that an entry hears from its coarser sites, and its own product is added in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nfn_graph.features import Rows
from nfn_graph.nn._message_passing import (
    channels_in,
    channels_out,
    message_passing,
    own_columns,
)
from nfn_graph.ops._backends import is_transformed
from nfn_graph.ops._kernels import bag_down, bag_up
from nfn_graph.ops._precision import sum_dtype, without_autocast
from nfn_graph.spec import Cover, Site


class Plan(NamedTuple):
    """What a layer does with a batch, tensors of values and parameters left out.

    Attributes:
        sites: The sites of the layer's spec.
        rows: The rows of each.
        scales: For every site that is no leaf, `[rows, summary taps, 1]`, what turns sums into
            means; empty if the aggregates are sums.
    """

    sites: Sequence[Site]
    rows: Sequence[Rows]
    scales: Sequence[Tensor | None]


def fused_message_passing(
    plan: Plan,
    values: Sequence[Tensor],
    maps: Sequence[Tensor | None],
    bias: Tensor | None,
) -> list[Tensor]:
    """Computes :func:`message_passing`."""
    return list(_Fused.apply(plan, *values, *maps, bias))


class _Fused(torch.autograd.Function):
    """Inputs: values, maps, bias. Outputs: new values."""

    # Not with `setup_context`, for which torch would inspect the signature in every call. Only
    # the transforms of `torch.func` need that, and they get `message_passing` itself.
    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Tensor) -> tuple[Tensor, ...]:
        values, maps, bias = _split(plan, tensors)
        summaries = up(plan, values)
        scale_summaries(plan, summaries)
        messages = down_maps(plan, summaries, maps, bias, values[0].dtype)
        kept = [x for x, site in zip(summaries, plan.sites, strict=True) if not site.is_leaf]
        new = own_parts(plan, messages, values[0].dtype)
        ctx.plan, ctx.shapes = plan, [x.shape for x in new]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *kept)
        return tuple(new)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        plan, count = ctx.plan, len(ctx.plan.sites)
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad[1:]
        inputs = saved[: len(needs)]
        flat = [
            inputs[0].new_zeros(shape) if g is None else g.contiguous()
            for g, shape in zip(grads, ctx.shapes, strict=True)
        ]
        # Whoever looks into the gradient gets it in operations that know their own derivative.
        if torch.is_grad_enabled() or is_transformed():
            return (None, *_plain_gradient(plan, flat, inputs, needs))
        with without_autocast(flat[0].device):
            wanted = (any(needs[:count]), any(needs[count:]))
            found = _gradient(plan, flat, inputs, saved[len(needs) :], *wanted)
        return (None, *found)


def up(plan: Plan, values: Sequence[Tensor], sums: dict[int, Tensor] | None = None) -> list[Tensor]:
    """The summaries of all sites, with sums for means.

    Args:
        plan: The sites and their rows.
        values: The own entries of every site.
        sums: For leaves whose entries are not at hand, what :func:`bag_up` makes of them.
    """
    wide = sum_dtype(values[0].dtype)
    channels = channels_in(plan.sites, values)
    below: list[list[Sequence[Tensor]]] = []
    summaries: list[Tensor] = []
    for number, (site, rows, own) in enumerate(zip(plan.sites, plan.rows, values, strict=True)):
        summary = own
        if not site.is_leaf:
            found = [p.below for p in site.parts if p.below is not None]
            parts = [below[finer][cover][place] for finer, cover, place in found]
            summary = torch.cat([*parts, own.to(wide)], 1)
        summaries.append(summary)
        known = None if sums is None else sums.get(number)
        if known is None and site.covers:
            known = bag_up(summary, rows, wide)
        tables = () if known is None else known.split_with_sizes(rows.cover_sizes)
        below.append([split_parts(site, table, channels) for table in tables])
    return summaries


def scale_summaries(plan: Plan, summaries: Sequence[Tensor]) -> None:
    """Turns the sums of summaries into means, in place."""
    for x, scale in zip(summaries, plan.scales, strict=bool(plan.scales)):
        if scale is not None:
            _tapped(x, scale).mul_(scale)


def down(
    plan: Plan,
    channels: int,
    product: Callable[[int, Tensor | None], Tensor],
    dtype: torch.dtype,
    leaves: bool = True,
) -> list[Tensor]:
    """What every site makes of its summary and of what coarser sites say to it.

    Args:
        plan: The sites and their rows.
        channels: The channels of the messages.
        product: Adds a site's own product to a tensor, or makes it.
        dtype: The dtype of the leaves.
        leaves: Whether to go on to the leaves among the weights, or to return the table of
            what they would hear.
    """
    messages: dict[int, Tensor] = {}
    said_by: dict[int, Sequence[Tensor]] = {}
    silence: dict[int, Tensor] = {}

    def heard(site: Site, cover: Cover) -> Tensor:
        """What a coarser site says to every part of a finer one; zeros where it is silent."""
        parts = said_by[cover.site]
        if len(site.parts) == 1 and cover.heard[0] is not None:
            return parts[cover.heard[0]]
        if None in cover.heard and cover.site not in silence:
            widest = max(part.taps for s in plan.sites for part in s.parts)
            silence[cover.site] = parts[0].new_zeros(parts[0].shape[0], widest * channels)
        said = [
            silence[cover.site].narrow(1, 0, part.taps * channels)
            if number is None
            else parts[number]
            for part, number in zip(site.parts, cover.heard, strict=True)
        ]
        return torch.cat(said, 1)

    for number in reversed(range(len(plan.sites))):
        site, rows = plan.sites[number], plan.rows[number]
        stops = not leaves and site.is_leaf and not isinstance(site.key, str)
        said: Tensor | None = None
        if site.covers:
            tables = [heard(site, cover) for cover in site.covers]
            said = tables[0] if len(tables) == 1 else torch.cat(tables)
            said = said.to(dtype) if site.is_leaf else said
            said = said if stops else bag_down(said, rows)
        if not stops:
            messages[number] = product(number, said)
            said_by[number] = split_parts(site, messages[number], channels)
        elif said is not None:
            messages[number] = said
        else:
            messages[number] = torch.empty(0)
    return [messages[number] for number in range(len(plan.sites))]


def split_parts(site: Site, x: Tensor, channels: int) -> Sequence[Tensor]:
    """The columns of a summary or message that belong to each part of a site."""
    if len(site.parts) == 1:
        return (x,)
    return x.split_with_sizes([part.taps * channels for part in site.parts], 1)


def down_maps(
    plan: Plan,
    summaries: Sequence[Tensor],
    maps: Sequence[Tensor | None],
    bias: Tensor | None,
    dtype: torch.dtype,
    leaves: bool = True,
) -> list[Tensor]:
    """:func:`down` with the maps of a layer."""

    def product(number: int, out: Tensor | None) -> Tensor:
        constant = None if plan.sites[number].indices else bias
        matrix = maps[number]
        matrix = None if matrix is None else matrix.t()
        return _add_product(plan, number, out, summaries[number], matrix, constant)

    return down(plan, channels_out(plan.sites, maps), product, dtype, leaves)


def own_parts(
    plan: Plan, messages: Sequence[Tensor], dtype: torch.dtype, leaves: bool = True
) -> list[Tensor]:
    """The part of every message that is the site's new entries; nothing for skipped leaves."""
    new = []
    for site, x in zip(plan.sites, messages, strict=True):
        if site.is_leaf and not leaves and not isinstance(site.key, str):
            x = x.new_empty(0, site.taps * (x.shape[1] // max(site.taps, 1)))
        elif not site.is_leaf:
            channels = x.shape[1] // max(site.summary_taps, 1)
            # Not a view: users may change what they get in place.
            x = own_columns(site, x, channels).to(dtype)
        new.append(x)
    return new


def _gradient(
    plan: Plan,
    grads: Sequence[Tensor],
    inputs: Sequence[Tensor],
    kept: Sequence[Tensor],
    of_values: bool,
    of_maps: bool,
) -> list[Tensor | None]:
    """The gradients of values, maps and bias, as far as they are wanted."""
    values, maps, bias = _split(plan, inputs)
    rest = iter(kept)
    reads = [x if s.is_leaf else next(rest) for s, x in zip(plan.sites, values, strict=True)]
    # The gradient of a message is what all finer entries that heard it send back.
    sums = up(plan, grads)
    found: list[Tensor | None] = [None] * (len(maps) + 1)
    if of_maps:
        for i, (g, x, matrix) in enumerate(zip(sums, reads, maps, strict=True)):
            if matrix is not None:
                found[i] = (g.t() @ _with_transposed(plan, i, x)).to(matrix.dtype)
        if bias is not None:
            found[-1] = sums[-1].sum(0).to(bias.dtype)
    if not of_values:
        return [*[None] * len(values), *found]

    def product(number: int, out: Tensor | None) -> Tensor:
        site, matrix, read = plan.sites[number], maps[number], sums[number]
        if matrix is not None:
            matrix = _adjoint(matrix, site.is_self)
        scale = plan.scales[number] if plan.scales else None
        if scale is None or matrix is None:
            return _add_product(plan, number, out, read, matrix, None)
        new = _tapped(read @ matrix.to(read.dtype), scale)
        if out is None:
            return new.mul_(scale).flatten(1)
        _tapped(out, scale).addcmul_(new, scale)
        return out

    channels = channels_in(plan.sites, values)
    messages = down(plan, channels, product, values[0].dtype)
    return [*own_parts(plan, messages, values[0].dtype), *found]


def _plain_gradient(
    plan: Plan, grads: Sequence[Tensor], inputs: Sequence[Tensor], needs: Sequence[bool]
) -> list[Tensor | None]:
    """The same, through :func:`message_passing`, for those who differentiate it again."""

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        full = [next(given) if need else x for x, need in zip(inputs, needs, strict=True)]
        values, maps, bias = _split(plan, full)
        return tuple(message_passing(plan.sites, plan.rows, values, maps, bias, bool(plan.scales)))

    wanted = [x for x, need in zip(inputs, needs, strict=True) if need]
    pull: Callable[..., Any] = torch.func.vjp(run, *wanted)[1]
    pulled = iter(pull(tuple(grads)))
    return [next(pulled) if need else None for need in needs]


def _add_product(
    plan: Plan,
    number: int,
    out: Tensor | None,
    read: Tensor,
    matrix: Tensor | None,
    constant: Tensor | None,
) -> Tensor:
    """Adds a site's map of what it reads, in place; the matrix is `[inputs, outputs]`."""
    if matrix is None:
        return read.new_zeros(read.shape[0], 0) if out is None else out
    read = _with_transposed(plan, number, read)
    matrix = matrix.to(read.dtype)
    if out is not None:
        return out.addmm_(read, matrix)
    return read @ matrix if constant is None else torch.addmm(constant.to(read.dtype), read, matrix)


def _with_transposed(plan: Plan, number: int, x: Tensor) -> Tensor:
    """What a site reads: its summary and, in a self weight, that of the transposed entry."""
    if not plan.sites[number].is_self:
        return x
    return torch.cat([x, x.index_select(0, plan.rows[number].transposed)], 1)


def _adjoint(matrix: Tensor, is_self: bool) -> Tensor:
    """The map of the gradients. Transposing entries is its own adjoint."""
    if not is_self:
        return matrix
    rows, reads = matrix.shape
    return matrix.reshape(rows, 2, reads // 2).transpose(0, 1).flatten(0, 1)


def _tapped(x: Tensor, like: Tensor) -> Tensor:
    """Rows `[rows, taps * channels]` as `[rows, taps, channels]`, with the taps of `like`."""
    return x.view(x.shape[0], like.shape[1], x.shape[1] // max(like.shape[1], 1))


def _split(
    plan: Plan, tensors: Sequence[Tensor]
) -> tuple[Sequence[Tensor], Sequence[Tensor | None], Tensor | None]:
    count = len(plan.sites)
    return tensors[:count], tensors[count : 2 * count], tensors[2 * count]
