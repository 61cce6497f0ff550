"""Masks that keep an exact number of weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from nfn_graph.layout import Layout
from nfn_graph.tasks.option_checks import check_part

Scope = Literal["global", "layer"]


def masks_from_scores(
    scores: Mapping[str, Tensor], sparsity: float, scope: Scope = "global"
) -> dict[str, Tensor]:
    """Keeps the weights with the largest scores.

    Of every network, or of each of its tensors, `round((1 - sparsity) * weights)` are kept and
    at least one; among equal scores, those that come first.

    Args:
        scores: By key, `[networks, ...]`: of all weights that may be pruned.
        sparsity: The share of the weights to prune.
        scope: Whether weights compete with all others of their network, or of their tensor.

    Returns:
        Masks of the same shapes, True where a weight is kept.
    """
    check_sparsity(sparsity)
    for key, x in scores.items():
        if not x.isfinite().all():
            raise ValueError(f"Expected finite scores of '{key}' (got infinity or NaN)")
    if scope == "layer":
        return {k: _largest(x.flatten(1), sparsity).view_as(x) for k, x in scores.items()}
    if scope != "global":
        raise ValueError(f"Expected --scope: global or layer (got '{scope}')")
    flat = [x.flatten(1) for x in scores.values()]
    kept = _largest(torch.cat(flat, 1), sparsity).split([x.shape[1] for x in flat], 1)
    pairs = zip(scores.items(), kept, strict=True)
    return {key: part.view_as(x) for (key, x), part in pairs}


def check_sparsity(sparsity: float) -> None:
    """Raises unless a share of weights can be pruned."""
    check_part("sparsity", sparsity)


def prunable(layout: Layout, biases: bool = False) -> list[str]:
    """The keys of a network's weights; if asked for, of its biases and norm parameters too."""
    chosen = [p for p in layout.placements if biases or not isinstance(p.store, str)]
    return list(dict.fromkeys(p.keys[0] for p in chosen))


def _largest(scores: Tensor, sparsity: float) -> Tensor:
    count = max(1, round((1 - sparsity) * scores.shape[1]))
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, True)
