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
    template = next(iter(raw.values()))
    folded: Tensors = {}
    for site, rows in zip(spec.sites, incidence.sites[spec.symmetry], strict=True):
        if site.key not in spec.taps:
            continue
        parts = [template.new_empty(rows.num_rows, 0, template.shape[-1])] * (not site.pieces)
        for piece in site.pieces:
            part = _fold_piece(spec, site, piece, incidence, raw[piece.store])
            if part.shape[0] != rows.num_rows:
                zeros = part.new_zeros(rows.num_rows, *part.shape[1:])
                part = zeros.index_copy(0, incidence.filled_rows(piece.store, site.indices), part)
            parts.append(part)
        folded[site.key] = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return folded


def unfold(spec: FoldedSpec, incidence: Incidence, folded: Mapping[Key, Tensor]) -> Tensors:
    """The inverse of :func:`fold`."""
    network, like = spec.unfolded, next(iter(folded.values()))
    found: Tensors = {}
    for site in spec.sites:
        entries = folded[site.key].split([p.taps for p in site.pieces], 1) if site.pieces else ()
        for piece, x in zip(site.pieces, entries, strict=True):
            if isinstance(site.key, str) and (
                x.shape[0] != incidence.num_filled_rows(piece.store, site)
            ):
                x = x.index_select(0, incidence.filled_rows(piece.store, site.indices))
            x = x.reshape(-1, network.taps[piece.store], x.shape[-1])
            found[piece.store] = _unfold_piece(spec, site, piece, incidence, x, found)
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
    compiling = torch.compiler.is_compiling()
    if not compiling and spec.symmetry in incidence.masks:
        return incidence.masks[spec.symmetry]
    # Masks that are made in inference mode cannot be used in training later.
    if compiling:
        masks = _masks(spec, incidence)
    else:
        with torch.inference_mode(False):
            masks = _masks(spec, incidence)
    if not compiling and all(map(is_lasting, masks.values())):
        incidence.masks[spec.symmetry] = masks
    return masks


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
    order = {weight.key: i for i, weight in enumerate(incidence.spec.weights)}
    for site in spec.sites:
        entries = [part.key for part in site.parts if part.taps]
        keys = [piece.store for e in entries for piece in spec.site[e].pieces]
        if isinstance(site.key, str) or not site.taps or len(keys) < 2:
            continue
        for graph, shape in enumerate(incidence.shapes):
            present = [len(shape.blocks[order[key]]) for key in keys if not isinstance(key, str)]
            if len(set(present)) > 1:
                raise UserError(
                    f"Expected network {graph} to have all or none of the weight types "
                    f"{keys}, which join the same neurons (got {present} tensors). Batch "
                    f"networks that agree there."
                )


def _sequence(spec: FoldedSpec, site: Site, piece: Piece) -> tuple[str, ...]:
    """The order of the indices of a tensor at a site: those of the site, then the fixed ones."""
    indices = spec.unfolded.indices(piece.store)
    return (*site.indices, *(i for i in indices if i not in site.indices))


def _fold_piece(
    spec: FoldedSpec, site: Site, piece: Piece, incidence: Incidence, x: Tensor
) -> Tensor:
    key = piece.store
    if piece.diagonal and not isinstance(key, str):
        x = x.index_select(0, incidence.diagonals[key])
    elif site.is_self and not isinstance(key, str):
        x = x.index_select(0, incidence.off_diagonals[key])
    else:
        x = incidence.reorder(key, x, _sequence(spec, site, piece))
    return x.reshape(-1, piece.taps, x.shape[-1])


def _unfold_piece(
    spec: FoldedSpec,
    site: Site,
    piece: Piece,
    incidence: Incidence,
    x: Tensor,
    found: Mapping[Key, Tensor],
) -> Tensor:
    key = piece.store
    if piece.diagonal and not isinstance(key, str):
        # The off-diagonal entries are there already, since finer sites come first.
        return found[key].index_copy(0, incidence.diagonals[key].long(), x)
    if site.is_self and not isinstance(key, str):
        zeros = x.new_zeros(incidence.weights[key].num_rows, *x.shape[1:])
        return zeros.index_copy(0, incidence.off_diagonals[key].long(), x)
    return incidence.reorder(key, x, _sequence(spec, site, piece), back=True)
