"""Masks that keep an exact number of weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from nfn_graph import WeightFeatures, WeightGraph
from nfn_graph.data import Layout
from nfn_graph.messages import UserError
from nfn_graph.spec import WeightKey
from nfn_graph.tasks.option_checks import check_part

# For every weight type, the edges that are kept with the rows of the neurons at their two ends.
_Edges = dict[WeightKey, tuple[Tensor, Tensor, Tensor]]
# Each leaves some weights out; most masks need a dozen.
_MOST_ROUNDS = 100

Scope = Literal["global", "layer"]
TicketScope = Literal["expected", "global", "layer"]


def on_paths(kept: WeightFeatures) -> WeightFeatures:
    """Removes the kept weights that are on no path.

    A path leads from an input, whose type nothing leads to, to an output, whose type leads
    nowhere. If a network adds to its inputs or reads its outputs again, these are the types that
    keep their order. A weight on no path carries no data: its input is a constant, or nothing
    depends on its output.

    Args:
        kept: One channel before the fold, zero where a weight is pruned; of one network or many.

    Returns:
        The same features with zeros for the weights on no path. Features of neurons do not change.
    """
    rows = kept.incidence
    ahead: _Edges = {
        key: (x.flatten(1).any(1), rows.weights[key].source, rows.weights[key].target)
        for key, x in kept.weights.items()
    }
    back: _Edges = {
        (target, name, source): (x, last, first)
        for (source, name, target), (x, first, last) in ahead.items()
    }
    counts = {name: neurons.num_rows for name, neurons in rows.neurons.items()}
    fixed = {neuron.name for neuron in rows.spec.neurons if neuron.fixed}
    reached, leading = _reached(ahead, counts, fixed), _reached(back, counts, fixed)

    def cut(key: object, x: Tensor) -> Tensor:
        if not isinstance(key, tuple):
            return x
        _, first, last = ahead[key]
        is_on = reached[key[0]][first] & leading[key[2]][last]
        return x * is_on.to(x.dtype).view(-1, 1, 1)

    return kept.map_types(cut)


def _reached(edges: _Edges, counts: dict[str, int], fixed: set[str]) -> dict[str, Tensor]:
    """Returns the neurons that kept edges reach from the inputs, or turned round, the outputs."""
    sources, targets = {source for source, _, _ in edges}, {target for _, _, target in edges}
    starts = (sources - targets) or (sources & fixed)
    device = next(iter(edges.values()))[0].device
    reached = {
        name: torch.full((count,), name in starts, device=device) for name, count in counts.items()
    }
    while True:
        before = sum(int(x.sum()) for x in reached.values())
        for (source, _, target), (is_kept, first, last) in edges.items():
            reached[target][last[is_kept & reached[source][first]]] = True
        if sum(int(x.sum()) for x in reached.values()) == before:
            return reached


def masks_from_scores(
    scores: Mapping[str, Tensor], sparsity: float, scope: Scope = "global"
) -> dict[str, Tensor]:
    """Keeps the weights with the largest scores.

    Every network, or each of its tensors, keeps `round((1 - sparsity) * weights)` of them, but at
    least one. If scores are equal, the weights that come first are kept.

    Args:
        scores: The scores `[networks, ...]` of all weights that may be pruned, by key.
        sparsity: The share of the weights to prune.
        scope: Whether weights compete with all others of their network, or of their tensor.

    Returns:
        Masks of the same shapes, True where a weight is kept.
    """
    _check(scores, sparsity)
    if scope not in ("global", "layer"):
        raise UserError(f"Expected --scope: global or layer (got '{scope}')")
    found: dict[str, Tensor] = {}
    for keys, count in _pools({key: x[0] for key, x in scores.items()}, sparsity, scope):
        found.update(_largest({key: scores[key] for key in keys}, count))
    return {key: found[key] for key in scores}


def ticket_from_scores(
    scores: Mapping[str, Tensor],
    network: WeightGraph,
    sparsity: float,
    scope: TicketScope = "expected",
    *,
    paths: bool = True,
) -> dict[str, Tensor]:
    """Returns the mask of one network that follows from the scores of a model.

    The scores are the logits with which each weight is kept, one by one. Keeping the largest scores
    makes a poor mask: a layer whose weights the model cannot tell apart would lose them all, and
    weights that carry no data would be kept. Therefore the number of weights that a layer keeps is
    the sum of its probabilities, and weights on no path from an input to an output give their
    places to the next ones.

    Weights that were left out do not come back, so a few weights on no path may remain if very few
    are kept or if all scores are alike. The round with the fewest such weights is used.

    Args:
        scores: The logit of keeping each weight that may be pruned, by key.
        network: The network.
        sparsity: The share of the weights to prune, exactly.
        scope: `"expected"`: each tensor keeps the sum of its probabilities; for the others, see
            :func:`masks_from_scores`.
        paths: Whether to prefer weights on paths.

    Returns:
        Masks of the same shapes, True where a weight is kept.
    """
    _check(scores, sparsity)
    pools = _pools(scores, sparsity, scope)
    left_out = {key: torch.zeros_like(x, dtype=torch.bool) for key, x in scores.items()}
    # Subtracted from the score of a weight on no path, so that it comes after all others.
    penalty = 1 + 2 * max(float(x.abs().max()) for x in scores.values() if x.numel())
    best: dict[str, Tensor] = {}
    fewest = math.inf
    for _ in range(_MOST_ROUNDS if paths else 1):
        lowered = {key: x - penalty * left_out[key].to(x) for key, x in scores.items()}
        masks: dict[str, Tensor] = {}
        for keys, count in pools:
            found = _largest({key: lowered[key].unsqueeze(0) for key in keys}, count)
            masks.update({key: x[0] for key, x in found.items()})
        dead = on_no_path(masks, network) if paths else {}
        number = sum(int(x.sum()) for x in dead.values())
        if number < fewest:
            best, fewest = {key: masks[key] for key in scores}, number
        if not any(bool((x & ~left_out[key]).any()) for key, x in dead.items()):
            break
        left_out = {key: x | dead[key] for key, x in left_out.items()}
    return best


def on_no_path(masks: Mapping[str, Tensor], network: WeightGraph) -> dict[str, Tensor]:
    """Marks the kept weights that are on no path from an input to an output."""
    own = network.to_tensors()
    ones = {key: torch.ones_like(x) for key, x in own.items()}
    given = {key: x.to(own[key].dtype) for key, x in masks.items()}
    kept = WeightGraph.from_placements(network.layout, {**ones, **given}).features()
    left = on_paths(kept).to_graph().to_tensors()
    return {key: x & (left[key] == 0) for key, x in masks.items()}


def prunable(layout: Layout, biases: bool = False) -> list[str]:
    """The keys of a network's weights; if asked for, of its biases too.

    Depthwise kernels belong to single neurons, as biases and norms do, and are kept. A bias is a
    tensor of neurons whose name ends in `bias`, so the statistics of norms do not count as biases.
    """
    chosen = [
        placement.keys[0]
        for placement in layout.placements
        if not isinstance(placement.store, str)
        or (biases and placement.keys[0].rpartition(".")[2] == "bias")
    ]
    return list(dict.fromkeys(chosen))


def _check(scores: Mapping[str, Tensor], sparsity: float) -> None:
    check_part("sparsity", sparsity)
    if not any(x.numel() for x in scores.values()):
        raise UserError("Expected weights that may be pruned (got none)")
    for key, x in scores.items():
        if not x.isfinite().all():
            raise UserError(f"Expected finite scores of '{key}' (got infinity or NaN)")


def _pools(
    scores: Mapping[str, Tensor], sparsity: float, scope: str
) -> list[tuple[Sequence[str], int]]:
    """Returns the keys whose weights compete with each other, and the number of weights to keep."""

    def share(count: int) -> int:
        return max(1, round((1 - sparsity) * count))

    total = share(sum(x.numel() for x in scores.values()))
    if scope == "global":
        return [(list(scores), total)]
    if scope == "layer":
        return [([key], share(x.numel())) for key, x in scores.items()]
    if scope == "expected":
        return [([key], count) for key, count in _expected(scores, total).items()]
    raise UserError(f"Expected --scope: expected, global or layer (got '{scope}')")


def _expected(scores: Mapping[str, Tensor], total: int) -> dict[str, int]:
    """Returns how many weights of each tensor to keep, at least one if the total allows it. One
    number is added to all logits, so that the probabilities add up to the total."""
    logits = {key: x.double() for key, x in scores.items()}
    largest = max(float(x.abs().max()) for x in logits.values() if x.numel())
    low, high = -largest - 40.0, largest + 40.0
    for _ in range(100):
        middle = (low + high) / 2
        if sum(float((x + middle).sigmoid().sum()) for x in logits.values()) < total:
            low = middle
        else:
            high = middle
    wanted = {key: float((x + high).sigmoid().sum()) for key, x in logits.items()}
    least = 1 if total >= len(scores) else 0
    counts = {key: max(min(least, scores[key].numel()), int(x)) for key, x in wanted.items()}
    # Rounding errors are corrected where they are largest.
    while (missing := total - sum(counts.values())) != 0:
        step = 1 if missing > 0 else -1
        possible = [
            key
            for key, count in counts.items()
            if (count < scores[key].numel() if step > 0 else count > least)
        ]
        counts[max(possible, key=lambda key: step * (wanted[key] - counts[key]))] += step
    return counts


def _largest(scores: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Marks the largest of all scores of each network."""
    flat = [x.flatten(1) for x in scores.values()]
    joined = torch.cat(flat, 1)
    order = joined.argsort(dim=1, descending=True, stable=True)[:, :count]
    kept = torch.zeros_like(joined, dtype=torch.bool).scatter_(1, order, True)
    parts = kept.split([x.shape[1] for x in flat], 1)
    return {key: part.view_as(x) for (key, x), part in zip(scores.items(), parts, strict=True)}
