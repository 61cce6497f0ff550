"""The laws of equivariant and invariant functions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nfn_graph.data import WeightGraph
from nfn_graph.features import WeightFeatures
from nfn_graph.spec import Symmetry
from nfn_graph.symmetry import Permutation, from_places, layer_sizes


def assert_equivariant(
    function: Callable[[WeightFeatures], WeightFeatures | WeightGraph],
    graph: WeightGraph,
    symmetry: Symmetry,
    folded: bool = True,
    trials: int = 3,
    tolerance: float | None = None,
) -> None:
    r"""Raises `AssertionError` unless :math:`f(\sigma U) = \sigma f(U)`.

    Args:
        function: A layer or model of features that returns features or a graph.
        graph: A network or batch, with a layer of at least two neurons to permute.
        symmetry: The group to draw :math:`\sigma` from.
        folded: Whether the function takes features after the fold of `symmetry`, or before
            any fold.
        trials: How many random elements to try; each moves something in every layer.
        tolerance: Largest difference, relative to the largest value of the output; by the
            dtype if None.
    """
    expected = _as_graph(function(_view(graph, symmetry, folded)))
    for _ in range(trials):
        permutation = _moving(graph, symmetry)
        actual = _as_graph(function(_view(permutation.apply(graph), symmetry, folded)))
        permuted = dict(permutation.apply(expected).features().tensors())
        scale = max(float(y.detach().abs().max()) for y in permuted.values() if y.numel())
        for key, x in actual.features().tensors():
            _assert_close(x, permuted[key], f"f(σU) and σf(U) at {key!r}", scale, tolerance)


def assert_invariant(
    function: Callable[[WeightFeatures], Tensor],
    graph: WeightGraph,
    symmetry: Symmetry,
    folded: bool = True,
    trials: int = 3,
    tolerance: float | None = None,
) -> None:
    r"""Raises `AssertionError` unless :math:`f(\sigma U) = f(U)`.

    The arguments are those of :func:`assert_equivariant`; the function returns a tensor.
    """
    expected = function(_view(graph, symmetry, folded))
    for _ in range(trials):
        permutation = _moving(graph, symmetry)
        actual = function(_view(permutation.apply(graph), symmetry, folded))
        scale = float(expected.detach().abs().max())
        _assert_close(actual, expected, "f(σU) and f(U)", scale, tolerance)


def _view(graph: WeightGraph, symmetry: Symmetry, folded: bool) -> WeightFeatures:
    return graph.features(symmetry if folded else None)


def _as_graph(output: WeightFeatures | WeightGraph) -> WeightGraph:
    return output.to_graph() if isinstance(output, WeightFeatures) else output


def _moving(graph: WeightGraph, symmetry: Symmetry) -> Permutation:
    """A random element that moves something in every layer that it can."""
    places = {}
    for name, sizes in layer_sizes(graph, symmetry).items():
        layers = [torch.empty(0, dtype=torch.long)]
        for size in sizes:
            still = torch.arange(size)
            layer = torch.randperm(size)
            while size > 1 and torch.equal(layer, still):
                layer = torch.randperm(size)
            layers.append(layer)
        places[name] = torch.cat(layers)
    permutation = from_places(graph, places)
    if permutation.is_identity:
        raise ValueError(
            f"Expected a network with at least two neurons that '{symmetry}' permutes, so that "
            f"the law says something (got only the identity)"
        )
    return permutation


def _assert_close(x: Tensor, y: Tensor, what: str, scale: float, tolerance: float | None) -> None:
    x, y = x.detach(), y.detach()
    if x.shape != y.shape:
        raise AssertionError(f"Expected {what} to agree (got {list(x.shape)}, {list(y.shape)})")
    if not x.numel():
        return
    limit = 1000 * torch.finfo(x.dtype).eps if tolerance is None else tolerance
    difference = float((x - y).abs().max())
    if not difference <= limit * scale:
        raise AssertionError(
            f"Expected {what} to agree to {limit * scale:.1e} (got a difference of "
            f"{difference:.1e})"
        )
