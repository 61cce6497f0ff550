r"""The equations of the NF-Layer, for every site of a spec.

Means go up the sites, one map acts at every site, messages come down:

.. math::
    \text{up}\quad & s_u = [\text{means of all finer entries that meet at } u,\;
        \text{own entries}] \\
    \text{map}\quad & m_u = M_u s_u \quad (+\, b \text{ at the network}) \\
    \text{down}\quad & m_u \mathrel{+}= \text{messages of the coarser sites to } u, \qquad
        x'_u = \text{the own part of } m_u

For the weights of a layer the coarser sites are its target neurons (:math:`W_{j,\star}`), its
source neurons (:math:`W_{\star,k}`) and, through the target neurons, the network
(:math:`W_{\star,\star}`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from nfn_graph.features import Incidence, Rows
from nfn_graph.ops import divide_by_count, expand, segment_sum
from nfn_graph.ops._precision import cast, sum_dtype
from nfn_graph.spec import FoldedSpec, Site


def message_passing(
    spec: FoldedSpec,
    incidence: Incidence,
    values: Sequence[Tensor],
    maps: Sequence[Tensor | None],
    bias: Tensor | None,
    mean: bool,
) -> list[Tensor]:
    """Computes the new entries of every site, in operations that all transforms of torch support.

    Args:
        spec: The spec of the layer, which lists its sites.
        incidence: The rows of each site in the batch.
        values: The own entries of each site, `[rows, taps * channels]`.
        maps: The map of each site; None for a site with an empty summary.
        bias: A constant for every entry of the network's summary.
        mean: Whether aggregates are means instead of sums.
    """
    rows, wide = incidence.sites[spec.symmetry], sum_dtype(values[0].dtype)

    def sums(number: int, summary: Tensor) -> list[Tensor]:
        x = summary.to(wide)
        return [segment_sum(x, grouping) for grouping in rows[number].groupings]

    def message(number: int, received: list[Tensor]) -> Tensor:
        site, matrix = spec.sites[number], maps[number]
        read = summaries[number]
        if matrix is None:
            return read
        if mean and not site.is_leaf:
            parts = zip(split_parts(site, read), rows[number].counts, strict=True)
            read = torch.cat([x if n is None else divide_by_count(x, n) for x, n in parts], 1)
        read = with_transposed(site, rows[number], read)
        constant = None if bias is None or site.indices else bias.to(read.dtype)
        new = linear(read, matrix.to(read.dtype), constant)
        for x, grouping in zip(received, rows[number].groupings, strict=True):
            new = new + expand(x.to(new.dtype), grouping)
        return new

    summaries = up(spec, values, sums)
    return down(spec, values[0].dtype, message)


def up(
    spec: FoldedSpec,
    values: Sequence[Tensor],
    sums: Callable[[int, Tensor], Sequence[Tensor]],
) -> list[Tensor]:
    """Computes the summary of every site from those of finer sites, with sums in place of means.

    Args:
        spec: The spec of the layer.
        values: The own entries of each site.
        sums: A function of the number of a site and its summary, which sums it for each cover.
    """
    wide = sum_dtype(values[0].dtype)
    summaries: list[Tensor] = []
    below: list[list[Sequence[Tensor]]] = []
    for number, (site, summary) in enumerate(zip(spec.sites, values, strict=True)):
        if not site.is_leaf:
            finer = [part.below for part in site.parts if part.below is not None]
            parts = [below[mean_of.site][mean_of.cover][mean_of.part] for mean_of in finer]
            summary = torch.cat([*parts, cast(summary, wide)], 1)
        summaries.append(summary)
        below.append([split_parts(site, x) for x in sums(number, summary)])
    return summaries


def down(
    spec: FoldedSpec, dtype: torch.dtype, message: Callable[[int, list[Tensor]], Tensor]
) -> list[Tensor]:
    """Computes the new entries of every site, which are the own part of its message.

    Args:
        spec: The spec of the layer.
        dtype: The dtype of the entries.
        message: A function of the number of a site and the messages from its covers, which adds
            them to the map of its summary.
    """
    parts_of: list[Sequence[Tensor]] = [()] * len(spec.sites)
    for number in reversed(range(len(spec.sites))):
        site = spec.sites[number]
        received = [
            _sent(site, senders, spec.sites[cover], parts_of[cover])
            for cover, senders in zip(site.covers, site.senders, strict=True)
        ]
        parts_of[number] = split_parts(site, message(number, received))
    # The results are not views, since users may change them in place.
    return [
        parts[-1] if site.is_leaf else parts[-1].to(dtype, copy=True)
        for site, parts in zip(spec.sites, parts_of, strict=True)
    ]


def with_transposed(site: Site, rows: Rows, x: Tensor) -> Tensor:
    """The input of a site's map: its summary and, for a self weight, that of the transpose."""
    return torch.cat([x, x.index_select(0, rows.transposed)], 1) if site.is_self else x


def split_parts(site: Site, x: Tensor) -> Sequence[Tensor]:
    """The columns of a summary or message that belong to each part of a site."""
    if site.is_leaf:
        return (x,)
    channels = x.shape[1] // max(site.summary_taps, 1)
    return x.split_with_sizes([part.taps * channels for part in site.parts], 1)


def _sent(
    site: Site, senders: Sequence[int | None], cover: Site, parts: Sequence[Tensor]
) -> Tensor:
    """The message of a cover to every part of a site; zeros where it sends none."""
    if site.is_leaf and senders[0] is not None:
        return parts[senders[0]]
    channels = sum(x.shape[1] for x in parts) // cover.summary_taps
    rows = parts[0].shape[0]
    sent = [
        parts[0].new_zeros(rows, part.taps * channels) if sender is None else parts[sender]
        for part, sender in zip(site.parts, senders, strict=True)
    ]
    return torch.cat(sent, 1)
