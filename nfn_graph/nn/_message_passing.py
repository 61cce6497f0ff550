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

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from nfn_graph.features import Incidence, Rows
from nfn_graph.ops import divide_by_count, expand, segment_sum
from nfn_graph.ops._precision import sum_dtype
from nfn_graph.spec import FoldedSpec, Part, Site


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
    sites, rows = spec.sites, incidence.sites[spec.symmetry]
    dtype, wide = values[0].dtype, sum_dtype(values[0].dtype)
    in_channels, out_channels = channels_in(sites, values), channels_out(sites, maps)
    # Up: the summary of a site is computed from those of finer sites.
    sums: list[Tensor] = []
    for site, own in zip(sites, values, strict=True):
        parts = []
        for part in site.parts:
            if part.below is None:
                parts.append(own if site.is_leaf else own.to(wide))
            else:
                below = part.below
                finer = sites[below.site].parts[below.part]
                x = columns(sums[below.site], finer, in_channels).to(wide)
                parts.append(segment_sum(x, rows[below.site].groupings[below.cover]))
        sums.append(torch.cat(parts, 1) if len(parts) > 1 else parts[0])
    # One map of every summary. Down: coarser sites send messages to its parts.
    messages: dict[int, Tensor] = {}
    for number in reversed(range(len(sites))):
        site, summary, matrix = sites[number], sums[number], maps[number]
        if mean and not site.is_leaf:
            summary = averaged(site, rows[number], summary)
        if site.is_self:
            summary = torch.cat([summary, summary.index_select(0, rows[number].transposed)], 1)
        constant = bias.to(summary.dtype) if bias is not None and not site.indices else None
        new = summary if matrix is None else linear(summary, matrix.to(summary.dtype), constant)
        for cover, senders, grouping in zip(
            site.covers, site.senders, rows[number].groupings, strict=True
        ):
            sent = message_to(site, sites[cover], senders, messages[cover], out_channels)
            new = new + expand(sent.to(new.dtype), grouping)
        messages[number] = new
    # The results are not views, since users may change them in place.
    return [
        messages[i] if site.is_leaf else own_columns(site, messages[i], out_channels).to(dtype)
        for i, site in enumerate(sites)
    ]


def columns(x: Tensor, part: Part, channels: int) -> Tensor:
    """The columns of a summary or message that belong to one part."""
    return x.narrow(1, part.start * channels, part.taps * channels)


def own_columns(site: Site, message: Tensor, channels: int) -> Tensor:
    """Copies the part of a message that contains the site's new entries."""
    own = columns(message, site.parts[-1], channels)
    return own.clone() if site.taps else own


def channels_in(sites: Sequence[Site], values: Sequence[Tensor]) -> int:
    """The number of channels of the entries."""
    return next(
        (x.shape[1] // site.taps for site, x in zip(sites, values, strict=True) if site.taps), 1
    )


def channels_out(sites: Sequence[Site], maps: Sequence[Tensor | None]) -> int:
    """The number of channels that the maps of a layer return."""
    pairs = zip(sites, maps, strict=True)
    return next(m.shape[0] // site.summary_taps for site, m in pairs if m is not None)


def averaged(site: Site, rows: Rows, sums: Tensor) -> Tensor:
    """Turns the sums of finer entries in the summary of a site into means."""
    channels = sums.shape[1] // max(site.summary_taps, 1)
    parts = sums.split([part.taps * channels for part in site.parts], 1)
    means = [
        x if count is None else divide_by_count(x, count)
        for x, count in zip(parts, rows.counts, strict=True)
    ]
    return torch.cat(means, 1)


def message_to(
    site: Site, coarser: Site, senders: Sequence[int | None], message: Tensor, channels: int
) -> Tensor:
    """The message of a coarser site to every part of a finer one; zeros where it sends none."""
    zeros = message.new_zeros(message.shape[0], max(part.taps for part in site.parts) * channels)
    sent = [
        zeros.narrow(1, 0, part.taps * channels)
        if number is None
        else columns(message, coarser.parts[number], channels)
        for part, number in zip(site.parts, senders, strict=True)
    ]
    return sent[0] if len(sent) == 1 else torch.cat(sent, 1)
