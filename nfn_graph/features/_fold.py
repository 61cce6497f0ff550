"""Folding the tensors of a batch into the view of a :class:`FoldedSpec`, and back.

Both ways are permutations of entries: exact, differentiable, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from nfn_graph.features._incidence import Incidence
from nfn_graph.features._rows import is_lasting
from nfn_graph.spec._sites import NETWORK, Bundle, FoldedSpec, Piece
from nfn_graph.spec._types import WeightKey


class Levels(NamedTuple):
    """Features by level, each `[count, taps, channels]`."""

    weights: dict[WeightKey, Tensor]
    neurons: dict[str, Tensor]
    network: dict[str, Tensor]


def fold(spec: FoldedSpec, incidence: Incidence, raw: Levels) -> Levels:
    """The stored tensors of a batch as the three levels of a folded spec."""
    _check_bundles(spec, incidence)
    template = next(iter(raw.weights.values()))
    weights = {b.key: _fold_bundle(b, incidence, raw.weights) for b in spec.bundles}
    neurons = {
        n.name: _join(n.pieces, incidence, raw, incidence.neurons[n.name].count, template)
        for n in spec.neurons
    }
    network = _join(spec.pieces, incidence, raw, incidence.num_graphs, template)
    return Levels(weights, neurons, {NETWORK: network})


def unfold(spec: FoldedSpec, incidence: Incidence, folded: Levels) -> Levels:
    """The inverse of :func:`fold`."""
    weights: dict[WeightKey, Tensor] = {}
    neurons: dict[str, Tensor] = {}
    for bundle in spec.bundles:
        weights.update(_unfold_bundle(bundle, incidence, folded.weights[bundle.key]))
    parts = [(neuron.pieces, folded.neurons[neuron.name]) for neuron in spec.neurons]
    parts.append((spec.pieces, folded.network[NETWORK]))
    for pieces, level in parts:
        for piece, taps in zip(pieces, level.split([p.taps for p in pieces], 1), strict=True):
            rows = _rows(piece, incidence)
            owned = taps if rows.shape[0] == taps.shape[0] else taps.index_select(0, rows)
            if isinstance(piece.store, str):
                size = spec.network.neuron[piece.store].taps
                neurons[piece.store] = owned.reshape(-1, size, owned.shape[-1])
            else:
                weights[piece.store] = _unfold_weight(piece, spec, incidence, owned, weights)
    channels = folded.network[NETWORK].shape[-1]
    for neuron in spec.network.neurons:
        if neuron.taps == 0:
            count = incidence.neurons[neuron.name].count
            neurons[neuron.name] = folded.network[NETWORK].new_empty(count, 0, channels)
    return Levels(
        {w.key: weights[w.key] for w in spec.network.weights},
        {n.name: neurons[n.name] for n in spec.network.neurons},
        {},
    )


def owned_taps(spec: FoldedSpec, incidence: Incidence) -> dict[str, Tensor]:
    """Masks `[count, taps, 1]` of the folded taps that stand for entries of a network.

    In a union of specs a network may have a neuron type without one of the fixed weights
    that fold onto it. Those taps hold nothing, and whoever reads a level must read zeros
    there. Types without such taps, the usual case, have no mask. Keys are neuron types and
    `"network"`.
    """
    # A compiled model computes them: it cannot look up a spec.
    compiling = torch.compiler.is_compiling()
    if not compiling and spec in incidence.masks:
        return incidence.masks[spec]
    # Masks made in inference mode could not be used in training later on.
    with torch.inference_mode(False):
        masks = _masks(spec, incidence)
    if not compiling and all(map(is_lasting, masks.values())):
        incidence.masks[spec] = masks
    return masks


def _masks(spec: FoldedSpec, incidence: Incidence) -> dict[str, Tensor]:
    masks = {}
    levels = [(n.name, n.pieces, incidence.neurons[n.name].count) for n in spec.neurons]
    levels.append((NETWORK, spec.pieces, incidence.num_graphs))
    for name, pieces, count in levels:
        rows = [_rows(piece, incidence) for piece in pieces]
        if any(r.shape[0] != count for r in rows):
            columns = [
                torch.zeros(count, dtype=torch.bool, device=incidence.device)
                .index_fill(0, r, True)
                .unsqueeze(1)
                .expand(count, piece.taps)
                for r, piece in zip(rows, pieces, strict=True)
            ]
            masks[name] = torch.cat(columns, 1).unsqueeze(-1)
    return masks


def _check_bundles(spec: FoldedSpec, incidence: Incidence) -> None:
    """Tensors that share edges must come together in every network of a batch."""
    bundles = [bundle for bundle in spec.bundles if len(bundle.members) > 1]
    if incidence.is_whole or not bundles:
        return
    order = {weight.key: i for i, weight in enumerate(incidence.spec.weights)}
    for bundle in bundles:
        keys = [weight.key for weight, _ in bundle.members]
        for graph, shape in enumerate(incidence.shapes):
            present = [len(shape.blocks[order[key]]) for key in keys]
            if len(set(present)) > 1:
                raise ValueError(
                    f"Expected network {graph} to have all or none of the weight types "
                    f"{keys}, which join the same neurons (got {present} tensors). Batch "
                    f"networks that agree there."
                )


def _fold_bundle(bundle: Bundle, incidence: Incidence, raw: Mapping[WeightKey, Tensor]) -> Tensor:
    members = []
    for weight, is_reversed in bundle.members:
        x = raw[weight.key]
        if bundle.is_self:
            x = x.index_select(0, incidence.self_weights[weight.key].off_diagonal)
        elif is_reversed:
            x = x.index_select(0, incidence.weights[weight.key].by_source)
        members.append(x)
    return members[0] if len(members) == 1 else torch.cat(members, 1)


def _unfold_bundle(bundle: Bundle, incidence: Incidence, folded: Tensor) -> dict[WeightKey, Tensor]:
    by_source = incidence.edges(bundle).by_source
    out = {}
    parts = folded.split([weight.taps for weight, _ in bundle.members], 1)
    for (weight, is_reversed), x in zip(bundle.members, parts, strict=True):
        if bundle.is_self:
            x = _place(x, incidence.self_weights[weight.key].off_diagonal, weight.key, incidence)
        elif is_reversed:
            x = x.index_select(0, by_source)
        out[weight.key] = x
    return out


def _join(
    pieces: tuple[Piece, ...], incidence: Incidence, raw: Levels, count: int, template: Tensor
) -> Tensor:
    """The pieces side by side as taps of `count` rows; zeros where a row owns no such tap."""
    parts = []
    for piece in pieces:
        part = _fold_piece(piece, incidence, raw)
        if part.shape[0] != count:
            zeros = part.new_zeros(count, *part.shape[1:])
            part = zeros.index_copy(0, _rows(piece, incidence), part)
        parts.append(part)
    if not parts:
        return template.new_empty(count, 0, template.shape[-1])
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _fold_piece(piece: Piece, incidence: Incidence, raw: Levels) -> Tensor:
    if isinstance(piece.store, str):
        x = raw.neurons[piece.store]
    else:
        x = raw.weights[piece.store]
        if piece.axis == "source":
            x = x.index_select(0, incidence.weights[piece.store].by_source)
        elif piece.axis == "diagonal":
            x = x.index_select(0, incidence.self_weights[piece.store].diagonal)
    return x.reshape(-1, piece.taps, x.shape[-1])


def _unfold_weight(
    piece: Piece,
    spec: FoldedSpec,
    incidence: Incidence,
    owned: Tensor,
    weights: Mapping[WeightKey, Tensor],
) -> Tensor:
    key = piece.store
    if isinstance(key, str):
        raise TypeError(f"Expected the piece of a weight type (got neuron type '{key}')")
    x = owned.reshape(-1, spec.network.weight[key].taps, owned.shape[-1])
    if piece.axis == "source":
        return _place(x, incidence.weights[key].by_source, key, incidence)
    if piece.axis == "diagonal":
        return weights[key].index_copy(0, incidence.self_weights[key].diagonal, x)
    return x


def _place(x: Tensor, rows: Tensor, key: WeightKey, incidence: Incidence) -> Tensor:
    zeros = x.new_zeros(incidence.weights[key].count, *x.shape[1:])
    return zeros.index_copy(0, rows, x)


def _rows(piece: Piece, incidence: Incidence) -> Tensor:
    """The neurons (or networks) that the rows of a piece belong to."""
    if isinstance(piece.store, str):
        neurons = incidence.neurons[piece.store]
        if piece.axis == "own":
            return torch.arange(neurons.count, device=incidence.device)
        size = incidence.spec.neuron[piece.store].size
        return neurons.graph[:: size or 1]
    edges = incidence.weights[piece.store]
    source, _, target = (incidence.spec.neuron.get(name) for name in piece.store)
    source_size = (source.size if source else None) or 1
    target_size = (target.size if target else None) or 1
    if piece.axis == "target":
        return edges.target[::source_size]
    if piece.axis == "source":
        return edges.source.index_select(0, edges.by_source)[::target_size]
    if piece.axis == "diagonal":
        return incidence.self_weights[piece.store].neuron
    return incidence.neurons[piece.store[2]].graph.index_select(
        0, edges.target[:: source_size * target_size]
    )
