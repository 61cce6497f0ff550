r"""Checks of the symmetry laws, for the layers here and for your own.

:func:`assert_equivariant` checks :math:`f(\sigma U) = \sigma f(U)`, :func:`assert_invariant`
:math:`f(\sigma U) = f(U)`, and :func:`assert_complete` that the matrices a linear layer can
express are *all* equivariant ones: the rank of their span is the number of orbits of the
group on pairs of entries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nfn_graph.batch import Batch
from nfn_graph.features import WeightFeatures
from nfn_graph.folded import FoldedSpec
from nfn_graph.graph import WeightGraph
from nfn_graph.layout import Layout, Shape
from nfn_graph.spec import NetworkSpec, Symmetry
from nfn_graph.symmetry import Permutation, sample

Output = WeightFeatures | WeightGraph | Tensor


class Completeness(NamedTuple):
    """What a linear layer can express, per pair of input and output channel.

    Attributes:
        parameters: Its parameters, without those that only shift the output.
        rank: The dimension of the space of its matrices.
        orbits: The dimension of the space of all equivariant matrices.
    """

    parameters: int
    rank: int
    orbits: int


def random_graph(
    spec: NetworkSpec,
    sizes: Mapping[str, int | tuple[int, ...]] | None = None,
    channels: int = 1,
    dtype: torch.dtype = torch.float64,
    generator: torch.Generator | None = None,
) -> WeightGraph:
    """A graph of a spec with normal random values.

    Args:
        spec: The types.
        sizes: Neurons per type; for a role type, those of each of its layers, which follow
            one another. Fixed types know theirs. By default small sizes at which all orbits
            are distinct.
        channels: Channels of the features.
        dtype: Of the features.
        generator: For reproducible values.
    """
    shape = _shape(spec, sizes or {})
    graph = WeightGraph()
    graph.layout = layout = Layout(spec, shape)
    for neuron in spec.neurons:
        count = layout.num_rows(neuron.name)
        shape_x = (count, neuron.taps, channels)
        graph[neuron.name].x = torch.randn(shape_x, dtype=dtype, generator=generator)
    for weight in spec.weights:
        shape_x = (layout.num_rows(weight.key), weight.taps, channels)
        graph[weight.key].edge_attr = torch.randn(shape_x, dtype=dtype, generator=generator)
    return graph


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
        trials: How many random elements to try, none of them the identity.
        tolerance: Largest difference, relative to the largest output; by the dtype if None.
    """
    expected = _as_graph(function(_view(graph, symmetry, folded)))
    for _ in range(trials):
        permutation = _moving(graph, symmetry)
        actual = _as_graph(function(_view(permutation.apply(graph), symmetry, folded)))
        permuted = permutation.apply(expected).features()
        for key, x in actual.features().tensors():
            y = dict(permuted.tensors())[key]
            _assert_close(x, y, f"f(σU) and σf(U) at {key!r}", tolerance)


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
        _assert_close(actual, expected, "f(σU) and f(U)", tolerance)


def assert_complete(layer: nn.Module, spec: FoldedSpec, channels: tuple[int, int] = (1, 1)) -> None:
    """Raises `AssertionError` unless a linear layer expresses every equivariant linear map.

    Args:
        layer: A layer of features of `spec`, linear in its input (up to a constant) and in
            its parameters.
        spec: The folded spec.
        channels: Its input and output channels.
    """
    found = completeness(layer, spec, channels)
    if found.rank == found.orbits:
        return
    reason = ""
    if not spec.is_complete:
        reason = (
            " Role types share parameters between layers: such a layer is equivariant, "
            "not complete."
        )
    raise AssertionError(
        f"Expected the layer to span all {found.orbits} equivariant maps "
        f"(got a span of rank {found.rank} from {found.parameters} parameters).{reason}"
    )


def completeness(
    layer: nn.Module,
    spec: FoldedSpec,
    channels: tuple[int, int] = (1, 1),
    sizes: Mapping[str, int] | None = None,
) -> Completeness:
    """Measures what a linear layer can express; the arguments of :func:`assert_complete`.

    Raises `AssertionError` if some matrix of the layer is not equivariant, and `ValueError`
    if the layer is not linear.

    Args:
        sizes: Neurons per free type; by default small sizes that tell all orbits apart.
    """
    graph = random_graph(spec.network, sizes)
    orbits = count_orbits(graph, spec.symmetry)
    matrices = _matrices(layer, graph, spec, channels)
    _assert_constant_on_orbits(matrices, orbits)
    pairs = channels[0] * channels[1]
    used = matrices.flatten(1).abs().amax(1) > 0
    rank = int(torch.linalg.matrix_rank(matrices[used].flatten(1))) if used.any() else 0
    return Completeness(int(used.sum()) // pairs, rank // pairs, int(orbits.max()) + 1)


def count_orbits(graph: WeightGraph, symmetry: Symmetry) -> Tensor:
    """The orbits of the group on pairs of entries, by brute force: `[D, D]`, numbered.

    Works on any graph of one network, knows nothing of folds or layers: it applies
    transpositions of neighbouring neurons to the graph until no label changes.
    """
    raw = graph.features()
    sizes = [x.shape[0] * x.shape[1] for _, x in raw.tensors()]
    total = sum(sizes)
    numbers = torch.arange(total, dtype=torch.float64).split(sizes)
    parts = {key: n for (key, _), n in zip(raw.tensors(), numbers, strict=True)}
    numbered = raw.map_types(lambda key, x: parts[key].reshape(*x.shape[:2], 1)).to_graph()
    moves = [_entries(move.apply(numbered).features()) for move in _transpositions(graph, symmetry)]
    labels = torch.arange(total * total).reshape(total, total)
    while True:
        before = labels
        for move in moves:
            labels = torch.minimum(labels, labels[move][:, move])
        if torch.equal(labels, before):
            return labels.unique(return_inverse=True)[1]


def _shape(spec: NetworkSpec, sizes: Mapping[str, int | tuple[int, ...]]) -> Shape:
    selves = {w.source for w in spec.weights if spec.is_self(w)}
    layers: dict[str, tuple[int, ...]] = {}
    for i, neuron in enumerate(spec.neurons):
        default: int | tuple[int, ...] = neuron.size or (4 if neuron.name in selves else 2 + i % 2)
        if neuron.role:
            default = (2, 3)
        size = sizes.get(neuron.name, default)
        layers[neuron.name] = size if isinstance(size, tuple) else (size,)
    blocks = []
    for weight in spec.weights:
        targets, sources = len(layers[weight.target]), len(layers[weight.source])
        if weight.source == weight.target and targets > 1:
            blocks.append(tuple((i + 1, i) for i in range(targets - 1)))
        else:
            blocks.append(((0, sources - 1),))
    return Shape(tuple(layers.values()), tuple(blocks))


def _view(graph: WeightGraph, symmetry: Symmetry, folded: bool) -> WeightFeatures:
    return graph.features(symmetry if folded else None)


def _as_graph(output: WeightFeatures | WeightGraph) -> WeightGraph:
    return output.to_graph() if isinstance(output, WeightFeatures) else output


def _moving(graph: WeightGraph, symmetry: Symmetry) -> Permutation:
    for _ in range(100):
        permutation = sample(graph, symmetry)
        if not permutation.is_identity:
            return permutation
    raise ValueError(
        f"Expected a network with at least two neurons that '{symmetry}' permutes, so that "
        f"the law says something (got only the identity)"
    )


def _assert_close(x: Tensor, y: Tensor, what: str, tolerance: float | None) -> None:
    x, y = x.detach(), y.detach()
    if x.shape != y.shape:
        raise AssertionError(f"Expected {what} to agree (got {list(x.shape)}, {list(y.shape)})")
    if not x.numel():
        return
    limit = 1000 * torch.finfo(x.dtype).eps if tolerance is None else tolerance
    scale = max(1.0, float(y.abs().max()))
    difference = float((x - y).abs().max())
    if not difference <= limit * scale:
        raise AssertionError(
            f"Expected {what} to agree to {limit * scale:.1e} (got a difference of "
            f"{difference:.1e})"
        )


def _transpositions(graph: WeightGraph, symmetry: Symmetry) -> list[Permutation]:
    moves = []
    identity = sample(graph, symmetry)
    rows = graph.features().incidence.neurons
    for name, index in identity.index.items():
        for i in range(len(index) - 1):
            if int(rows[name].position[i + 1]) == 0:
                continue  # The next neuron begins another layer.
            swapped = torch.arange(len(index))
            swapped[[i, i + 1]] = swapped[[i + 1, i]]
            moves.append(Permutation({name: swapped}))
    return moves


def _entries(features: WeightFeatures) -> Tensor:
    """The entries of one network with one channel, as positions."""
    return torch.cat([x.flatten() for _, x in features.unfold().tensors()]).long()


def _matrices(
    layer: nn.Module, graph: WeightGraph, spec: FoldedSpec, channels: tuple[int, int]
) -> Tensor:
    """The matrix of the layer for each parameter set to 1: `[P, D, c_out, D, c_in]`."""
    entries = sum(x.shape[0] * x.shape[1] for _, x in graph.features().tensors())
    inputs = entries * channels[0]
    units = torch.eye(inputs + 1, inputs, dtype=torch.float64)
    batch = Batch.from_data_list([_filled(graph, unit, channels[0]) for unit in units])
    features = batch.features(spec.symmetry, spec=spec.network)
    layer = layer.double()
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
        raise ValueError("Expected a layer that is linear in its parameters (got one that is not)")
    return matrices


def _filled(graph: WeightGraph, values: Tensor, channels: int) -> WeightGraph:
    """The graph with its entries, then channels, read from a vector."""
    raw = graph.features()
    parts = values.split([x.shape[0] * x.shape[1] * channels for _, x in raw.tensors()])
    by_key = {key: part for (key, _), part in zip(raw.tensors(), parts, strict=True)}
    return (
        raw.map(lambda x: x.expand(-1, -1, channels))
        .map_types(lambda key, x: by_key[key].reshape(x.shape))
        .to_graph()
    )


def _assert_constant_on_orbits(matrices: Tensor, orbits: Tensor) -> None:
    """An equivariant matrix has one value per orbit, for each pair of channels."""
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
