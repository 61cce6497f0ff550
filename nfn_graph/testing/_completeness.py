"""Checks whether a linear layer can express every equivariant linear map."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nfn_graph.data import Batch, WeightGraph
from nfn_graph.features import WeightFeatures
from nfn_graph.messages import UserError
from nfn_graph.spec import FoldedSpec, Symmetry
from nfn_graph.symmetry import Permutation, from_places, layer_sizes
from nfn_graph.testing._random import random_graph


class Completeness(NamedTuple):
    """The expressiveness of a linear layer, per pair of input and output channels.

    Attributes:
        parameters: The number of its parameters, without those that only shift the output.
        rank: The dimension of the space of its matrices.
        orbits: The dimension of the space of all equivariant matrices.

    Example:
        >>> from nfn_graph import NetworkSpec, NFLinear
        >>> from nfn_graph.testing import completeness
        >>> folded = NetworkSpec.chain(2, input_size=2, output_size=2).fold("np")
        >>> found = completeness(NFLinear(folded, 1, 1, bias=False), folded)
        >>> found.rank == found.orbits
        True
    """

    parameters: int
    rank: int
    orbits: int


def assert_complete(layer: nn.Module, spec: FoldedSpec, channels: tuple[int, int] = (1, 1)) -> None:
    """Raises `AssertionError` unless a linear layer expresses every equivariant linear map.

    Args:
        layer: A layer on features of `spec`, linear in its input (up to a constant) and in its
            parameters.
        spec: The folded spec.
        channels: The numbers of its input and output channels.

    Example:
        >>> from nfn_graph import NetworkSpec, NFLinear
        >>> from nfn_graph.testing import assert_complete
        >>> folded = NetworkSpec.chain(2, input_size=2, output_size=2).fold("hnp")
        >>> assert_complete(NFLinear(folded, 1, 1, bias=False), folded)
    """
    found = completeness(layer, spec, channels)
    shared = "Role types share parameters between layers"
    reason = f" {shared}: such a layer is equivariant, not complete."
    if found.rank != found.orbits:
        raise AssertionError(
            f"Expected the layer to span all {found.orbits} equivariant maps (got a span of rank "
            f"{found.rank} from {found.parameters} parameters).{'' if spec.is_complete else reason}"
        )


def completeness(
    layer: nn.Module,
    spec: FoldedSpec,
    channels: tuple[int, int] = (1, 1),
    sizes: Mapping[str, int] | None = None,
) -> Completeness:
    """Measures what a linear layer can express.

    Raises `AssertionError` if some matrix of the layer is not equivariant, and `ValueError`
    if the layer is not linear.

    Args:
        sizes: The number of neurons of every free type; by default, small sizes at which all orbits
            are distinct.

    Example:
        >>> from nfn_graph import NetworkSpec, NFLinear
        >>> from nfn_graph.testing import completeness
        >>> folded = NetworkSpec.chain(2, input_size=2, output_size=2).fold("np")
        >>> completeness(NFLinear(folded, 1, 1, bias=False, pointwise=True), folded)
        Completeness(parameters=4, rank=4, orbits=32)
    """
    graph = random_graph(spec.unfolded, sizes)
    orbits = orbit_labels(graph, spec.symmetry)
    matrices = matrices_of(layer, graph, spec, channels)
    _assert_constant_on_orbits(matrices, orbits)
    pairs = channels[0] * channels[1]
    used = matrices.flatten(1)[matrices.flatten(1).any(1)]
    rank = int(torch.linalg.matrix_rank(used)) if len(used) else 0
    return Completeness(len(used) // pairs, rank // pairs, int(orbits.max()) + 1)


def orbit_labels(graph: WeightGraph, symmetry: Symmetry) -> Tensor:
    """The orbits of the group on pairs of entries, by brute force: `[D, D]`, numbered.

    It works on any graph of one network, independently of folds and layers: it applies
    transpositions of neighbouring neurons to the graph until no label changes.

    Example:
        >>> from nfn_graph import NetworkSpec
        >>> from nfn_graph.testing import orbit_labels, random_graph
        >>> spec = NetworkSpec.chain(2, input_size=2, output_size=1)
        >>> graph = random_graph(spec, {"hidden1": 4})
        >>> labels = orbit_labels(graph, "hnp")
        >>> labels.shape, int(labels.max()) + 1 == spec.fold("hnp").num_orbits
        (torch.Size([17, 17]), True)
    """
    total = sum(x.shape[:2].numel() for _, x in graph.features().tensors())
    numbered = _filled(graph, torch.arange(total, dtype=torch.float64).unsqueeze(0), 1)
    moves = [_entries(move.apply(numbered)).long() for move in _transpositions(graph, symmetry)]
    labels = torch.arange(total * total).reshape(total, total)
    while True:
        before = labels
        for move in moves:
            labels = torch.minimum(labels, labels[move][:, move])
        if torch.equal(labels, before):
            return labels.unique(return_inverse=True)[1]


def _transpositions(graph: WeightGraph, symmetry: Symmetry) -> list[Permutation]:
    """The transpositions of neighbours in a layer or inside a parent, which generate the group."""
    moves = []
    for name, sizes in layer_sizes(graph, symmetry).items():
        still = torch.cat([torch.arange(size) for size in sizes])
        for i in range(len(still) - 1):
            if still[i + 1] > 0:  # Otherwise the next neuron begins another layer.
                swapped = still.clone()
                swapped[[i, i + 1]] = swapped[[i + 1, i]]
                moves.append(from_places(graph, {name: swapped}))
    return moves


def _entries(graph: WeightGraph) -> Tensor:
    """The entries of a network with one channel."""
    return torch.cat([x.flatten() for _, x in graph.features().tensors()])


def matrices_of(
    layer: nn.Module, graph: WeightGraph, spec: FoldedSpec, channels: tuple[int, int]
) -> Tensor:
    """The matrices of the layer with one parameter set to 1: `[P, D, c_out, D, c_in]`.

    Example:
        >>> from nfn_graph import NetworkSpec, NFLinear
        >>> from nfn_graph.testing import matrices_of, random_graph
        >>> spec = NetworkSpec.chain(2, input_size=2, output_size=1)
        >>> graph = random_graph(spec, {"hidden1": 4})
        >>> folded = spec.fold("hnp")
        >>> matrices = matrices_of(NFLinear(folded, 1, 1, bias=False), graph, folded, (1, 1))
        >>> len(matrices) == folded.num_orbits
        True
    """
    entries = sum(x.shape[:2].numel() for _, x in graph.features().tensors())
    inputs = entries * channels[0]
    units = torch.eye(inputs + 1, inputs, dtype=torch.float64)
    batch = _filled(graph, units, channels[0])
    features = batch.features(spec.symmetry, spec=spec.unfolded)
    layer = copy.deepcopy(layer).double()
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    total = sum(p.numel() for p in parameters.values())

    def matrix(flat: Tensor) -> Tensor:
        parts = flat.split([p.numel() for p in parameters.values()])
        values = {n: v.view_as(p) for (n, p), v in zip(parameters.items(), parts, strict=True)}
        with torch.no_grad():
            out: WeightFeatures = torch.func.functional_call(layer, values, (features,))
        rows = torch.cat([x.reshape(len(units), -1) for _, x in out.unfold().tensors()], 1)
        return (rows[:-1] - rows[-1]).t().reshape(entries, channels[1], entries, channels[0])

    matrices = torch.stack([matrix(unit) for unit in torch.eye(total, dtype=torch.float64)])
    flat = torch.cat([p.flatten() for p in parameters.values()])
    expected = torch.tensordot(flat, matrices, 1)
    if not torch.allclose(matrix(flat), expected, rtol=1e-9, atol=1e-9):
        raise UserError("Expected a layer that is linear in its parameters (got one that is not)")
    return matrices


def _filled(graph: WeightGraph, values: Tensor, channels: int) -> Batch:
    """Networks like the graph with the entries `[networks, (entries, channels)]`."""
    shapes = {key: x.shape[:2] for key, x in graph.features().tensors()}
    parts = values.split([shape.numel() * channels for shape in shapes.values()], 1)
    stores = {
        key: part.reshape(len(values) * rows, taps, channels)
        for (key, (rows, taps)), part in zip(shapes.items(), parts, strict=True)
    }
    return Batch.from_stores([graph.layout] * len(values), stores)


def _assert_constant_on_orbits(matrices: Tensor, orbits: Tensor) -> None:
    """Checks that matrices have one value per orbit for each pair of channels."""
    flat = matrices.permute(0, 2, 4, 1, 3).reshape(-1, orbits.numel())
    labels = orbits.flatten()
    count = torch.bincount(labels).double()
    means = flat.new_zeros(len(flat), len(count)).index_add(1, labels, flat) / count
    difference = float((flat - means[:, labels]).abs().max())
    if difference > 1e-9:
        raise AssertionError(
            f"Expected every matrix of the layer to be equivariant (got entries of one orbit "
            f"that differ by {difference:.1e})"
        )
