"""The laws of equivariant and invariant functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nfn_graph.data import WeightGraph
from nfn_graph.features import WeightFeatures
from nfn_graph.messages import UserError
from nfn_graph.nn import (
    Activation,
    ChannelNorm,
    Dropout,
    FourierFeatures,
    IOEncoding,
    Residual,
    Standardize,
)
from nfn_graph.spec import FoldedSpec, Symmetry
from nfn_graph.symmetry import Permutation, from_orders

#: Layers that take features of any spec.
_ANY_VIEW = (Activation, Dropout, FourierFeatures)


def assert_equivariant(
    function: Callable[[Any], WeightFeatures | WeightGraph],
    graph: WeightGraph | WeightFeatures,
    symmetry: Symmetry | None = None,
    folded: bool | None = None,
    trials: int = 3,
    tolerance: float | None = None,
) -> None:
    r"""Raises `AssertionError` unless :math:`f(\sigma U) = \sigma f(U)`.

    Args:
        function: A layer, model or other function that returns features or a graph.
        graph: A network or batch that has a layer with at least two neurons to permute, or the
            features of one.
        symmetry: The group from which :math:`\sigma` is sampled. By default the group that all
            layers of the function commute with: `"hnp"` if some layer was folded for it or encodes
            the positions of inputs and outputs, otherwise `"np"`.
        folded: Whether the function takes features after the fold of `symmetry` (True) or
            before any fold (False). By default a layer takes features of its own spec, an
            `nn.Sequential` takes what its first layer takes, and everything else takes the
            graph.
        trials: The number of random elements to try; each moves something in every layer.
        tolerance: The largest allowed difference relative to the largest value of the output. If
            None, it depends on the dtype.

    Example:
        >>> from nfn_graph import NetworkSpec, NFLinear
        >>> from nfn_graph.testing import assert_equivariant, random_graph
        >>> spec = NetworkSpec.chain(2, input_size=2, output_size=1)
        >>> graph = random_graph(spec, {"hidden1": 4})
        >>> assert_equivariant(NFLinear(spec.fold("hnp"), 1, 8).double(), graph, "hnp")
    """
    for permutation, expected, actual in _trials(function, graph, symmetry, folded, trials):
        permuted = dict(permutation.apply(_as_graph(expected)).features().tensors())
        scale = max(float(y.detach().abs().max()) for y in permuted.values() if y.numel())
        for key, x in _as_graph(actual).features().tensors():
            _assert_close(x, permuted[key], f"f(σU) and σf(U) at {key!r}", scale, tolerance)


def assert_invariant(
    function: Callable[[Any], Tensor],
    graph: WeightGraph | WeightFeatures,
    symmetry: Symmetry | None = None,
    folded: bool | None = None,
    trials: int = 3,
    tolerance: float | None = None,
) -> None:
    r"""Raises `AssertionError` unless :math:`f(\sigma U) = f(U)`.

    The arguments are those of :func:`assert_equivariant`; the function returns a tensor.

    Example:
        >>> from nfn_graph import NFN, NetworkSpec
        >>> from nfn_graph.testing import assert_invariant, random_graph
        >>> spec = NetworkSpec.chain(2, input_size=2, output_size=1)
        >>> graph = random_graph(spec, {"hidden1": 4})
        >>> assert_invariant(NFN(spec, (8,), "hnp", out_features=3).double(), graph)
    """
    for _, expected, actual in _trials(function, graph, symmetry, folded, trials):
        scale = float(expected.detach().abs().max())
        _assert_close(actual, expected, "f(σU) and f(U)", scale, tolerance)


def _trials(
    function: Callable[[Any], Any],
    graph: WeightGraph | WeightFeatures,
    symmetry: Symmetry | None,
    folded: bool | None,
    trials: int,
) -> Iterator[tuple[Permutation, Any, Any]]:
    """Random elements, with the outputs for the graph and for the permuted graph."""
    graph = _as_graph(graph)
    symmetry = _symmetry_of(function) if symmetry is None else symmetry
    expected = function(_input(function, graph, symmetry, folded))
    for _ in range(trials):
        permutation = from_orders(graph, symmetry, _moving)
        if permutation.is_identity:
            raise UserError(
                f"Expected a network with at least two neurons that '{symmetry}' permutes, so that "
                f"the law can be tested (got only the identity)"
            )
        moved = _input(function, permutation.apply(graph), symmetry, folded)
        yield permutation, expected, function(moved)


def _symmetry_of(function: object) -> Symmetry:
    """The group that every layer of a module commutes with."""
    found = set()
    for module in function.modules() if isinstance(function, nn.Module) else ():
        spec = getattr(module, "spec", None)
        found.add(spec.symmetry if isinstance(spec, FoldedSpec) else None)
        found.add("hnp" if isinstance(module, IOEncoding) else getattr(module, "symmetry", None))
    if "hnp" in found:  # Elements of HNP are also elements of NP.
        return "hnp"
    if "np" in found:
        return "np"
    raise UserError(
        "Expected a function with a known symmetry (got one without a folded spec). "
        "Use symmetry='np' or symmetry='hnp'."
    )


def _input(
    function: object, graph: WeightGraph, symmetry: Symmetry, folded: bool | None
) -> WeightGraph | WeightFeatures:
    """Converts the graph to the view that the function takes."""
    if folded is not None:
        return graph.features(symmetry if folded else None)
    first = _first(function)
    spec = getattr(first, "spec", None)
    if isinstance(spec, FoldedSpec):
        return graph.features(spec.symmetry)
    if isinstance(first, Standardize | IOEncoding | ChannelNorm):
        return graph.features(spec=spec)
    if isinstance(first, _ANY_VIEW):
        return graph.features(symmetry)
    return graph


def _first(function: object) -> object:
    """The first module of a chain whose input is known."""
    if isinstance(function, nn.Sequential | Residual):
        for child in function.children():
            if not isinstance(child, _ANY_VIEW):
                return _first(child)
    return function


def _as_graph(output: WeightFeatures | WeightGraph) -> WeightGraph:
    return output.to_graph() if isinstance(output, WeightFeatures) else output


def _moving(size: int) -> Tensor:
    """A random order that moves something, if there are two neurons."""
    order = torch.randperm(size)
    while size > 1 and torch.equal(order, torch.arange(size)):
        order = torch.randperm(size)
    return order


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
