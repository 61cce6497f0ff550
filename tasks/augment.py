"""Augmentations of weight graphs, as PyG transforms that sample anew in every call.

All of them return a new graph and leave their input alone. Random numbers come from torch's
global generator, which data loaders seed for every worker, unless a generator is given.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch_geometric.transforms import BaseTransform

from nfn_graph import WeightGraph
from nfn_graph.messages import UserError
from nfn_graph.spec import Key, Symmetry, WeightKey
from nfn_graph.symmetry import sample


class PermuteNeurons(BaseTransform):
    """Permutes the neurons of a network at random.

    Args:
        symmetry: `"hnp"` permutes hidden neurons, which does not change what the network
            computes; `"np"` also permutes inputs and outputs.
        generator: The random generator.
    """

    def __init__(
        self, symmetry: Symmetry = "hnp", generator: torch.Generator | None = None
    ) -> None:
        self.symmetry: Symmetry = symmetry
        self.generator = generator

    def forward(self, data: WeightGraph) -> WeightGraph:
        """Returns a permuted copy of a graph or batch."""
        return sample(data, self.symmetry, self.generator).apply(data)


class WeightNoise(BaseTransform):
    """Adds normal noise to weights and biases, sampled anew for every entry and every call.

    Args:
        std: The standard deviation of the noise, as a multiple of that of the entries of the
            same type.
        generator: The random generator.
    """

    def __init__(self, std: float = 0.05, generator: torch.Generator | None = None) -> None:
        if not std >= 0:
            raise UserError(f"Expected a standard deviation of at least 0 (got {std})")
        self.std = std
        self.generator = generator

    def forward(self, data: WeightGraph) -> WeightGraph:
        """Returns a copy of a graph or batch with noise on its weights."""
        return data.features().map(self._noisy).to_graph()

    def _noisy(self, x: Tensor) -> Tensor:
        if x.numel() < 2:
            return x
        scale = self.std * x.std(dim=(0, 1), correction=0)
        noise = torch.randn(x.shape, dtype=x.dtype, generator=self.generator)
        return x + noise.to(x.device) * scale


class WeightDrop(BaseTransform):
    """Sets random weights to zero; biases stay.

    Args:
        probability: The probability that an entry of a weight tensor is dropped.
        generator: The random generator.
    """

    def __init__(self, probability: float = 0.05, generator: torch.Generator | None = None) -> None:
        if not 0 <= probability <= 1:
            raise UserError(f"Expected a probability within 0 and 1 (got {probability})")
        self.probability = probability
        self.generator = generator

    def forward(self, data: WeightGraph) -> WeightGraph:
        """Returns a copy of a graph or batch without the dropped weights."""
        raw = data.features()
        weights = {}
        for key, x in raw.weights.items():
            # All channels of an entry are dropped together.
            drawn = torch.rand(*x.shape[:2], 1, generator=self.generator).to(x.device)
            weights[key] = x * (drawn >= self.probability)
        return raw.replace(weights).to_graph()


class MixUp(BaseTransform):
    r"""Mixes the weights of networks in pairs: :math:`\lambda U_i + (1 - \lambda) U_j`.

    Networks are mixed with others of the same shape in their batch; a network that is the only one
    of its shape stays as it is. The batch gets two further attributes, by which a loss mixes the
    labels: `mixed_with`, the position of the other network, and `mixed_share`, the share of the
    network itself.

    Args:
        alpha: The parameter of the distribution Beta(alpha, alpha), from which the share of every
            network is sampled.
        generator: The random generator.
    """

    def __init__(self, alpha: float = 0.2, generator: torch.Generator | None = None) -> None:
        if not 0 < alpha < math.inf:
            raise UserError(f"Expected alpha above 0 (got {alpha})")
        self.alpha = alpha
        self.generator = generator

    def forward(self, data: WeightGraph) -> WeightGraph:
        """Returns a copy of a batch in which networks are mixed."""
        raw = data.features()
        shapes: dict[Any, list[int]] = {}
        for i, layout in enumerate(data.layouts):
            shapes.setdefault((layout.spec, layout.shape), []).append(i)
        partner = torch.arange(raw.num_graphs)
        for members in shapes.values():
            order = torch.randperm(len(members), generator=self.generator)
            partner[torch.tensor(members)] = torch.tensor(members)[order]
        share = self._shares(raw.num_graphs)
        mixed: dict[Key, Tensor] = {}
        for key, x in raw.tensors():
            network = raw.graph_of(key).long()
            counts = torch.bincount(network, minlength=raw.num_graphs)
            starts = counts.cumsum(0) - counts
            others = partner.to(x.device)[network]
            rows = torch.arange(len(x), device=x.device) - starts[network] + starts[others]
            own = share.to(x)[network].view(-1, 1, 1)
            mixed[key] = own * x + (1 - own) * x[rows]
        graph = raw.replace(mixed).to_graph()
        device = next(x.device for _, x in raw.tensors())
        graph.mixed_with, graph.mixed_share = partner.to(device), share.to(device)
        return graph

    def _shares(self, count: int) -> Tensor:
        """Samples from Beta(alpha, alpha), each as one gamma variable divided by the sum of two."""
        concentration = torch.full((2, count), self.alpha, dtype=torch.float64)
        drawn = torch._standard_gamma(concentration, generator=self.generator)
        return (drawn[0] / drawn.sum(0)).nan_to_num(0.5).float()


class MoveCoordinates(BaseTransform):
    r"""Rotates, scales and shifts the image or shape of an INR exactly, through its first layer.

    The new network computes :math:`f'(x) = f(A^{-1} (x - t))`: the value at `x` moves to
    :math:`A x + t`. With :math:`B = A^{-1}`, its first layer is :math:`W B` and
    :math:`b - W B t`.

    Args:
        degrees: The largest rotation in either direction, sampled uniformly; in three dimensions,
            the axis is random too.
        scale: The interval from which the scale factor is sampled log-uniformly.
        shift: The largest shift along each axis in either direction, sampled uniformly.
        generator: The random generator.
    """

    def __init__(
        self,
        degrees: float = 0.0,
        scale: tuple[float, float] = (1.0, 1.0),
        shift: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        if not (degrees >= 0 and shift >= 0 and 0 < scale[0] <= scale[1]):
            raise UserError(
                f"Expected degrees and shift of at least 0 and a scale interval above 0 (got "
                f"{degrees}, {shift} and {scale})"
            )
        self.degrees, self.scale, self.shift = degrees, scale, shift
        self.generator = generator

    def forward(self, data: WeightGraph) -> WeightGraph:
        """A copy of a graph or batch in which every network is moved in its own way."""
        key = first_weight(data)
        inputs = data.spec.neuron[key[0]].size or 0
        drawn = [self.draw(inputs) for _ in data.layouts]
        matrices, shifts = zip(*drawn, strict=True)
        return move_coordinates(data, torch.stack(matrices), torch.stack(shifts))

    def draw(self, inputs: int) -> tuple[Tensor, Tensor]:
        """A random matrix `A` and shift `t`, in double precision."""
        if inputs not in (2, 3):
            raise UserError(f"Expected an INR with two or three inputs (got {inputs})")
        angle = math.radians(self.degrees) * self._uniform(1)
        rotation = _rotation(angle, self._axis()) if inputs == 3 else _rotation(angle, None)
        low, high = map(math.log, self.scale)
        size = torch.exp((self._uniform(1) + 1) / 2 * (high - low) + low)
        return rotation * size, self.shift * self._uniform(inputs)

    def _uniform(self, count: int) -> Tensor:
        return torch.rand(count, dtype=torch.float64, generator=self.generator) * 2 - 1

    def _axis(self) -> Tensor:
        axis = torch.randn(3, dtype=torch.float64, generator=self.generator)
        return axis / axis.norm()


def move_coordinates(graph: WeightGraph, matrix: Tensor, shift: Tensor) -> WeightGraph:
    """Returns the network whose value at `matrix @ x + shift` is that of the given one at `x`.

    Args:
        graph: One network or a batch.
        matrix: `[inputs, inputs]` for all networks, or one for each along a first axis.
        shift: `[inputs]`, or one for each along a first axis.
    """
    key = first_weight(graph)
    raw = graph.features()
    weight, bias = raw.weights[key], raw.neurons[key[2]]
    network = raw.graph_of(key[2]).long()
    inputs, networks = shift.shape[-1], raw.num_graphs
    back = torch.linalg.inv(matrix.to(torch.float64)).expand(networks, inputs, inputs)
    back = back.to(weight.device, weight.dtype)[network]
    shift = shift.expand(networks, inputs).to(weight.device, weight.dtype)[network]
    rows = weight.reshape(-1, inputs, weight.shape[-1])
    moved = torch.einsum("nic,nij->njc", rows, back)
    offset = torch.einsum("njc,nj->nc", moved, shift)
    return raw.replace(
        {key: moved.reshape(weight.shape), key[2]: bias - offset.unsqueeze(1)}
    ).to_graph()


def first_weight(graph: WeightGraph) -> WeightKey:
    """Returns the weight type that reads the inputs of INRs; each of its neurons has a bias."""
    if not isinstance(graph, WeightGraph):
        raise TypeError(f"Expected a WeightGraph (got {type(graph).__name__})")
    spec = graph.spec
    targets = {w.target for w in spec.weights}
    first = [w for w in spec.weights if w.source not in targets]
    if len(first) != 1 or first[0].taps != 1 or spec.neuron[first[0].target].taps != 1:
        raise UserError(
            f"Expected an INR: one dense layer with biases that reads the inputs (got {spec})"
        )
    return first[0].key


def _rotation(angle: Tensor, axis: Tensor | None) -> Tensor:
    """The rotation of the plane by an angle, or of space about an axis."""
    c, s = torch.cos(angle), torch.sin(angle)
    if axis is None:
        return torch.stack([torch.cat([c, -s]), torch.cat([s, c])])
    x, y, z = axis
    o = torch.zeros((), dtype=axis.dtype)
    cross = torch.stack([o, -z, y, z, o, -x, -y, x, o]).view(3, 3)
    return torch.eye(3, dtype=axis.dtype) + s * cross + (1 - c) * (cross @ cross)
