"""Folds the tensors of a batch into the view of a :class:`FoldedSpec`, and unfolds them.

Both directions only permute entries, so they are differentiable and exact bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nfn_graph.features._incidence import Incidence
from nfn_graph.features._rows import is_lasting
from nfn_graph.messages import UserError
from nfn_graph.spec import FoldedSpec, Key, Piece, Site

Tensors = dict[Key, Tensor]


def fold(spec: FoldedSpec, incidence: Incidence, raw: Mapping[Key, Tensor]) -> Tensors:
    """Arranges the stored tensors of a batch as the entries of every site."""
    _check_pairs(spec, incidence)
    like = next(iter(raw.values()))
    folded: Tensors = {}
    for site, rows in zip(spec.sites, incidence.sites[spec.symmetry], strict=True):
        if site.key not in spec.taps:
            continue
        parts = [] if site.pieces else [like.new_empty(rows.num_rows, 0, like.shape[-1])]
        for piece in site.pieces:
            key, x = piece.store, raw[piece.store]
            places = _self_rows(site, piece, incidence)
            if places is None:
                x = incidence.reorder(key, x, _sequence(spec, site, key))
            else:
                x = x.index_select(0, places)
            x = x.reshape(-1, piece.taps, x.shape[-1])
            if x.shape[0] != rows.num_rows:
                zeros = x.new_zeros(rows.num_rows, *x.shape[1:])
                x = zeros.index_copy(0, incidence.filled_rows(key, site.indices), x)
            parts.append(x)
        folded[site.key] = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return folded


def unfold(spec: FoldedSpec, incidence: Incidence, folded: Mapping[Key, Tensor]) -> Tensors:
    """The inverse of :func:`fold`."""
    network, like = spec.unfolded, next(iter(folded.values()))
    found: Tensors = {}
    for site in spec.sites:
        entries = folded[site.key].split([p.taps for p in site.pieces], 1) if site.pieces else ()
        for piece, x in zip(site.pieces, entries, strict=True):
            key = piece.store
            if isinstance(site.key, str) and x.shape[0] != incidence.num_filled_rows(key, site):
                x = x.index_select(0, incidence.filled_rows(key, site.indices))
            x = x.reshape(-1, network.taps[key], x.shape[-1])
            places = _self_rows(site, piece, incidence)
            if places is None:
                found[key] = incidence.reorder(key, x, _sequence(spec, site, key), back=True)
                continue
            # The off-diagonal entries come first, since they are at a finer site.
            if key not in found:
                found[key] = x.new_zeros(incidence.rows(key).num_rows, *x.shape[1:])
            found[key] = found[key].index_copy(0, places.long(), x)
    keys: list[Key] = [*network.weight, *network.neuron]
    for key in keys:
        if key not in found:
            found[key] = like.new_empty(incidence.rows(key).num_rows, 0, like.shape[-1])
    return {key: found[key] for key in keys}


def filled_taps(spec: FoldedSpec, incidence: Incidence) -> dict[Key, Tensor]:
    """Masks `[rows, taps, 1]` of the folded taps that are entries of a network.

    In a union of specs a network may have a neuron type without one of the fixed weights
    that fold onto it. Those taps have no values, and every reader of the site must read zeros
    there. Types without such taps, which is the usual case, have no mask.
    """
    # A compiled model computes the masks: it cannot tell whether they may be cached.
    if torch.compiler.is_compiling():
        return _masks(spec, incidence)
    if spec.symmetry not in incidence.masks:
        # Masks that are made in inference mode cannot be used in training later.
        with torch.inference_mode(False):
            masks = _masks(spec, incidence)
        if not all(map(is_lasting, masks.values())):
            return masks
        incidence.masks[spec.symmetry] = masks
    return incidence.masks[spec.symmetry]


def _masks(spec: FoldedSpec, incidence: Incidence) -> dict[Key, Tensor]:
    masks: dict[Key, Tensor] = {}
    for site, rows in zip(spec.sites, incidence.sites[spec.symmetry], strict=True):
        if not isinstance(site.key, str) or all(
            incidence.num_filled_rows(piece.store, site) == rows.num_rows for piece in site.pieces
        ):
            continue
        columns = [
            torch.zeros(rows.num_rows, dtype=torch.bool, device=incidence.device)
            .index_fill(0, incidence.filled_rows(piece.store, site.indices), True)
            .unsqueeze(1)
            .expand(rows.num_rows, piece.taps)
            for piece in site.pieces
        ]
        masks[site.key] = torch.cat(columns, 1).unsqueeze(-1)
    return masks


def _check_pairs(spec: FoldedSpec, incidence: Incidence) -> None:
    """Raises an error if a network of a batch has only some of the tensors that share entries."""
    if incidence.is_whole:
        return
    types = (*incidence.spec.neuron, *incidence.spec.weight)
    for site in spec.sites:
        entries = [part.key for part in site.parts if part.taps]
        keys = [piece.store for e in entries for piece in spec.site[e].pieces]
        if isinstance(site.key, str) or not site.taps or len(keys) < 2:
            continue
        for graph, shape in enumerate(incidence.shapes):
            of_types = (*shape.sizes, *shape.blocks)
            present = [len(of_types[types.index(key)]) for key in keys]
            if len(set(present)) > 1:
                raise UserError(
                    f"Expected network {graph} to have all or none of the types {keys}, which "
                    f"have entries for the same neurons (got {present} of each). Batch networks "
                    f"that agree there."
                )


def _sequence(spec: FoldedSpec, site: Site, key: Key) -> tuple[str, ...]:
    """The order of the indices of a tensor at a site: those of the site, then the fixed ones."""
    return tuple(dict.fromkeys((*site.indices, *spec.unfolded.indices(key))))


def _self_rows(site: Site, piece: Piece, incidence: Incidence) -> Tensor | None:
    """The rows of a self weight that are at a site; None for all other tensors."""
    if piece.diagonal:
        return incidence.diagonals[piece.store]
    return incidence.off_diagonals[piece.store] if site.is_self else None
