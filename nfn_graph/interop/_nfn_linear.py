"""Copies the parameters of the published linear layers into the maps of :class:`NFLinear`.

The published layers keep one small map per output tensor and kind of broadcast, with columns
for the tensors it reads. Here each site has one map. Copying parameters therefore means finding,
for every published map, its rows and columns in the map of a neuron type or of the network:

- channels and kernel entries are `(channel, tap)` there and `(tap, channel)` here;
- a fixed axis (HNP) is `(channel, tap, position)` there and `(position, tap, channel)` here;
- the mean over a fixed axis is a column of its own there, beside the entries that it is a mean
  of; here it is added to their columns, divided by their number. These are the redundant
  parameters of the published HNP layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nfn_graph.nn import NFLinear
from nfn_graph.spec import NETWORK, FoldedSpec, Key, NetworkSpec, WeightKey, module_name


class MappedPiece(NamedTuple):
    """The taps of one tensor within a map: its fixed positions times the taps of its kernel."""

    start: int
    positions: int
    taps: int

    @property
    def stop(self) -> int:
        """The tap after the last one."""
        return self.start + self.positions * self.taps


class Read(NamedTuple):
    """A tensor that a published map reads, averaged over its fixed positions or in full."""

    store: Key
    averaged: bool = True


MappedPieces = dict[Key, MappedPiece]


def find_pieces(spec: FoldedSpec, pointwise: bool = False) -> dict[str, MappedPieces]:
    """The places of the tensors of a chain in the maps of all neuron types and of the network.

    Args:
        spec: The folded spec of a layer.
        pointwise: Whether the maps of its neurons read only their own taps.
    """
    pieces: dict[str, MappedPieces] = {}
    for site in spec.sites:
        if not isinstance(site.key, str):
            continue
        here = pieces.setdefault(site.key, {})
        alone = pointwise and site.indices
        for part in site.parts[-1:] if alone else site.parts:
            start = 0 if alone else part.start
            for piece in spec.site[part.key].pieces:
                taps = spec.unfolded.taps[piece.store]
                here[piece.store] = MappedPiece(start, piece.taps // taps, taps)
                start += piece.taps
    return pieces


def carry_np(published: Any, spec: NetworkSpec) -> NFLinear:
    """Makes our layer with the parameters of an `NPLinear`, except for its `io_embed`."""
    carrier = _Carrier(published, spec.fold("np"), published.c_in, published.c_out)
    everything = _means(spec)
    for i, weight in enumerate(spec.weights):
        rows = [Read(weight.key)]
        if i > 0:
            rows += [Read(spec.weights[i - 1].key), Read(weight.source)]
        columns = [Read(weight.key), Read(weight.target)]
        if i + 1 < len(spec.weights):
            columns.append(Read(spec.weights[i + 1].key))
        carrier.add_layer(i, weight.key, rows, columns, everything)
    return carrier.layer


def carry_hnp(published: Any, spec: NetworkSpec) -> NFLinear:
    """Makes our layer with the parameters of an `HNPLinear`; those that it lacks are 0."""
    carrier = _Carrier(published, spec.fold("hnp"), published.c_in, published.c_out)
    keys = [weight.key for weight in spec.weights]
    first, last = keys[0], keys[-1]
    after_first, before_last, output = first[2], last[0], last[2]
    everything = [*_means(spec), Read(first, False), Read(last, False), Read(output, False)]
    is_short = len(keys) == 2
    rows = [Read(first, False), Read(keys[1]), Read(after_first)]
    rows += [Read(last, False)] * is_short
    carrier.add(after_first, published.w0_rpt, first, rows)
    carrier.add(NETWORK, published.w0_rbdcst, first, everything)
    carrier.add(after_first, published.bias_0, after_first, rows)
    carrier.add(NETWORK, published.bias_0_rc, after_first, everything)
    for i, key in enumerate(keys[1:-1], 1):
        rows = [Read(key), Read(keys[i - 1]), Read(key[0])]
        rows += [Read(first, False)] * (i == 1)
        columns = [Read(key), Read(key[2]), Read(keys[i + 1])]
        columns += [Read(last, False)] * (i == len(keys) - 2)
        carrier.add_layer(i, key, rows, columns, everything)
    columns = [Read(last, False), Read(keys[-2])] + [Read(first, False)] * is_short
    carrier.add(before_last, published.wfin_cpt, last, columns)
    carrier.add(NETWORK, published.wfin_cbdcst, last, everything)
    carrier.add(NETWORK, published.bias_fin_rc, output, everything)
    return carrier.layer


def carry_pointwise(published: Any, spec: NetworkSpec) -> NFLinear:
    """Makes our layer with the parameters of a `Pointwise`."""
    channels = published.in_channels, published.out_channels
    carrier = _Carrier(published, spec.fold("np"), *channels, pointwise=True)
    maps = zip(spec.weights, published.weight_maps, published.bias_maps, strict=True)
    for weight, weight_map, bias_map in maps:
        carrier.add_edges(weight_map, weight.key)
        carrier.add(weight.target, bias_map, weight.target, [Read(weight.target)])
    return carrier.layer


class _Carrier:
    """Adds published maps to a layer whose parameters are all zero at first."""

    def __init__(
        self,
        published: Any,
        spec: FoldedSpec,
        in_channels: int,
        out_channels: int,
        pointwise: bool = False,
    ) -> None:
        like = next(published.parameters())
        # Our layer has at most as many parameters as the published one, so no limit is needed.
        limit = max(2**28, sum(p.numel() for p in published.parameters()))
        layer = NFLinear(spec, in_channels, out_channels, pointwise=pointwise, max_parameters=limit)
        self.published = published
        self.layer = layer.to(device=like.device, dtype=like.dtype)
        self.pieces = find_pieces(spec, pointwise)
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.zero_()

    def add_layer(
        self,
        i: int,
        key: WeightKey,
        rows: Sequence[Read],
        columns: Sequence[Read],
        everything: Sequence[Read],
    ) -> None:
        """Adds all maps to the weight and the bias of layer `i`, both axes of which are free."""
        maps = dict(self.published.named_children())
        source, _, target = key
        self.add_edges(maps[f"layer_{i}"], key)
        self.add(source, maps[f"layer_{i}_r"], key, rows)
        self.add(target, maps[f"layer_{i}_c"], key, columns)
        self.add(NETWORK, maps[f"layer_{i}_rc"], key, everything)
        self.add(target, maps[f"bias_{i}"], target, columns)
        self.add(NETWORK, maps[f"bias_{i}_rc"], target, everything)

    @torch.no_grad()
    def add_edges(self, published: Any, key: WeightKey) -> None:
        """Adds a map from the entries of a weight to themselves."""
        piece = self.pieces[NETWORK][key]
        parameter = self.layer.maps[module_name(key)]
        parameter += self._reordered(published.weight.flatten(1), piece, piece)
        self._add_constant(published.bias, key)

    @torch.no_grad()
    def add(self, at: str, published: Any, to: Key, reads: Sequence[Read]) -> None:
        """Adds a map at a neuron type or the network, from several tensors to one."""
        pieces, channels = self.pieces[at], self.layer.in_channels
        parameter = self.layer.maps[at]
        out = pieces[to]
        rows = slice(out.start * self.layer.out_channels, out.stop * self.layer.out_channels)
        widths = [
            channels * pieces[r.store].taps * (1 if r.averaged else pieces[r.store].positions)
            for r in reads
        ]
        parts = published.weight.flatten(1).split(widths, 1)
        for read, part in zip(reads, parts, strict=True):
            piece = pieces[read.store]
            columns = slice(piece.start * channels, piece.stop * channels)
            parameter[rows, columns] += self._reordered(part, out, piece)
        self._add_constant(published.bias, to)

    def _reordered(self, part: Tensor, out: MappedPiece, read: MappedPiece) -> Tensor:
        """Reorders rows and columns, `(channel, tap, position)` to `(position, tap, channel)`."""
        rows = (self.layer.out_channels, out.taps, out.positions)
        x = part.reshape(*rows, self.layer.in_channels, read.taps, -1)
        if x.shape[-1] != read.positions:
            x = x.expand(*x.shape[:-1], read.positions) / read.positions
        return x.permute(2, 1, 0, 5, 4, 3).flatten(3).flatten(0, 2)

    def _add_constant(self, bias: Tensor | None, to: Key) -> None:
        constant = self.layer.bias
        if bias is None or constant is None:
            return
        piece, channels = self.pieces[NETWORK][to], self.layer.out_channels
        x = bias.reshape(channels, piece.taps, piece.positions).permute(2, 1, 0).flatten()
        constant[piece.start * channels : piece.stop * channels] += x


def _means(spec: NetworkSpec) -> list[Read]:
    """The means of all weights, then of all biases."""
    return [Read(w.key) for w in spec.weights] + [Read(w.target) for w in spec.weights]
