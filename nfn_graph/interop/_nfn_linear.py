"""Copies the parameters of the published linear layers into the maps of :class:`NFLinear`.

The published layers keep one small map per output tensor and kind of broadcast, with columns
for the tensors it reads. Here each site has one map. Copying parameters therefore means finding,
for every published map, its rows and columns in the map of a site:

- channels and kernel entries are `(channel, tap)` there and `(tap, channel)` here;
- a fixed axis (HNP) is `(channel, tap, position)` there and `(position, tap, channel)` here;
- the mean over a fixed axis is a column of its own there, beside the entries that it is a mean
  of; here it is added to their columns, divided by their number. These are the redundant
  parameters of the published HNP layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from nfn_graph.nn import NFLinear
from nfn_graph.spec import NETWORK, FoldedSpec, Key, NetworkSpec, module_name


class MappedPiece(NamedTuple):
    """The taps of one tensor within a map: its fixed positions times the taps of its kernel."""

    start: int
    positions: int
    taps: int

    @property
    def stop(self) -> int:
        """The tap after the last one."""
        return self.start + self.positions * self.taps

    def of(self, channels: int) -> slice:
        """The rows or columns of the map that belong to the tensor."""
        return slice(self.start * channels, self.stop * channels)


class Read(NamedTuple):
    """A tensor that a published map reads, averaged over its fixed positions or in full."""

    store: Key
    averaged: bool = True


#: A published map, the site whose map it is a part of, the tensor it writes and those it reads.
_Map = tuple[Any, Key, Key, Sequence[Read]]


def by_type(
    spec: NetworkSpec, of_weights: Iterable[Any], of_biases: Iterable[Any]
) -> Iterator[tuple[Key, Any]]:
    """The types of a chain, layer by layer, with what belongs to each weight and bias."""
    for weight, first, second in zip(spec.weights, of_weights, of_biases, strict=True):
        yield weight.key, first
        yield weight.target, second


def find_pieces(spec: FoldedSpec, pointwise: bool = False) -> dict[Key, dict[Key, MappedPiece]]:
    """The places of the tensors of a chain in the maps of all sites of a layer."""
    pieces: dict[Key, dict[Key, MappedPiece]] = {}
    for site in spec.sites:
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
    maps: list[_Map] = []
    for i in range(len(spec.weights)):
        maps += _free_layer(published, spec, i, _means(spec))
    return _carry(maps, spec.fold("np"), published.c_in, published.c_out)


def carry_hnp(published: Any, spec: NetworkSpec) -> NFLinear:
    """Makes our layer with the parameters of an `HNPLinear`; those that it lacks are 0."""
    keys = list(spec.weight)
    first, last = Read(keys[0], False), Read(keys[-1], False)
    after_first, before_last, output = keys[0][2], keys[-1][0], keys[-1][2]
    everything = [*_means(spec), first, last, Read(output, False)]
    is_short = len(keys) == 2
    rows = [first, Read(keys[1]), Read(after_first), *([last] if is_short else [])]
    columns = [last, Read(keys[-2]), *([first] if is_short else [])]
    maps: list[_Map] = [
        (published.w0_rpt, after_first, keys[0], rows),
        (published.w0_rbdcst, NETWORK, keys[0], everything),
        (published.bias_0, after_first, after_first, rows),
        (published.bias_0_rc, NETWORK, after_first, everything),
        (published.wfin_cpt, before_last, keys[-1], columns),
        (published.wfin_cbdcst, NETWORK, keys[-1], everything),
        (published.bias_fin_rc, NETWORK, output, everything),
    ]
    for i in range(1, len(keys) - 1):
        beside_first, beside_last = i == 1, i == len(keys) - 2
        more = [first] if beside_first else [], [last] if beside_last else []
        maps += _free_layer(published, spec, i, everything, *more)
    return _carry(maps, spec.fold("hnp"), published.c_in, published.c_out)


def carry_pointwise(published: Any, spec: NetworkSpec) -> NFLinear:
    """Makes our layer with the parameters of a `Pointwise`."""
    modules = by_type(spec, published.weight_maps, published.bias_maps)
    maps: list[_Map] = [(module, key, key, [Read(key)]) for key, module in modules]
    channels = published.in_channels, published.out_channels
    return _carry(maps, spec.fold("np"), *channels, pointwise=True)


def _free_layer(
    published: Any,
    spec: NetworkSpec,
    i: int,
    everything: Sequence[Read],
    more_rows: Sequence[Read] = (),
    more_columns: Sequence[Read] = (),
) -> Iterator[_Map]:
    """The maps to the weight and the bias of layer `i`, both axes of which are free."""
    maps = dict(published.named_children())
    keys = list(spec.weight)
    key = keys[i]
    source, _, target = key
    before = [Read(keys[i - 1]), Read(source)] if i else []
    rows = [Read(key), *before, *more_rows]
    columns = [Read(key), Read(target), *map(Read, keys[i + 1 : i + 2]), *more_columns]
    yield maps[f"layer_{i}"], key, key, [Read(key)]
    yield maps[f"layer_{i}_r"], source, key, rows
    yield maps[f"layer_{i}_c"], target, key, columns
    yield maps[f"layer_{i}_rc"], NETWORK, key, everything
    yield maps[f"bias_{i}"], target, target, columns
    yield maps[f"bias_{i}_rc"], NETWORK, target, everything


def _means(spec: NetworkSpec) -> list[Read]:
    """The means of all weights, then of all biases."""
    return [Read(w.key) for w in spec.weights] + [Read(w.target) for w in spec.weights]


@torch.no_grad()
def _carry(
    maps: Sequence[_Map], spec: FoldedSpec, c_in: int, c_out: int, pointwise: bool = False
) -> NFLinear:
    """Makes a layer whose maps are the sums of the published ones."""
    # Our layer has at most as many parameters as the published one, so no limit is needed.
    limit = max(2**28, sum(p.numel() for module, *_ in maps for p in module.parameters()))
    layer = NFLinear(spec, c_in, c_out, pointwise=pointwise, max_parameters=limit)
    layer = layer.to(maps[0][0].weight)
    for parameter in layer.parameters():
        parameter.zero_()
    pieces = find_pieces(spec, pointwise)
    for module, at, to, reads in maps:
        here, out = pieces[at], pieces[at][to]
        widths = [
            c_in * here[r.store].taps * (1 if r.averaged else here[r.store].positions)
            for r in reads
        ]
        for read, part in zip(reads, module.weight.flatten(1).split(widths, 1), strict=True):
            piece = here[read.store]
            x = part.reshape(c_out, out.taps, out.positions, c_in, piece.taps, -1)
            if x.shape[-1] != piece.positions:
                x = x.expand(*x.shape[:-1], piece.positions) / piece.positions
            # From `(channel, tap, position)` to `(position, tap, channel)`, rows and columns.
            x = x.permute(2, 1, 0, 5, 4, 3).flatten(3).flatten(0, 2)
            layer.maps[module_name(at)][out.of(c_out), piece.of(c_in)] += x
        if layer.bias is not None and module.bias is not None:
            whole = pieces[NETWORK][to]
            x = module.bias.reshape(c_out, whole.taps, whole.positions)
            layer.bias[whole.of(c_out)] += x.permute(2, 1, 0).flatten()
    return layer
