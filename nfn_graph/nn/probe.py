r"""Models that run the networks they read: outputs at learned inputs.

A network's weights do not show what it computes, but its outputs do. A :class:`Probe` holds `K`
inputs that are trained with the model, and runs every network on them:

.. math:: f(U)_k = \text{network}_U(x_k)

Permuting hidden neurons does not change the outputs, and permutes the activations: the outputs
are invariant and the activations equivariant under HNP, :math:`f(\sigma U) = \sigma f(U)`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from nfn_graph.data import Layout, WeightGraph
from nfn_graph.messages import UserError
from nfn_graph.nn.models import mlp
from nfn_graph.spec import NetworkSpec

# A grid over more axes has too many points to run networks on.
_MOST_GRID_AXES = 4


class Probe(nn.Module):
    """Learned inputs, and what networks make of them.

    Args:
        spec: The types of all networks, which must have one input type of one size.
        probes: The number of inputs.
        input_shape: The shape of one input; by default, one value for every input neuron.
        start: How the inputs are chosen at first: `"uniform"` at random, or on a `"grid"`.
        low: The least value of an input at first.
        high: The largest value of an input at first.
        learned: Whether the inputs are trained.

    Shapes:
        - graph: a :class:`WeightGraph` or a batch.
        - output: `[networks, probes, ...]`, the outputs of the networks.

    Example:
        >>> import torch
        >>> from nfn_graph.converters import from_module
        >>> from nfn_graph.nn import Probe
        >>> network = torch.nn.Sequential(
        ...     torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
        ... )
        >>> graph = from_module(network)
        >>> Probe(graph.spec, probes=16)(graph).shape
        torch.Size([1, 16, 3])
    """

    def __init__(
        self,
        spec: NetworkSpec,
        probes: int = 64,
        *,
        input_shape: Sequence[int] | None = None,
        start: Literal["uniform", "grid"] = "uniform",
        low: float = -1.0,
        high: float = 1.0,
        learned: bool = True,
    ) -> None:
        super().__init__()
        if probes < 1:
            raise UserError(f"Expected at least one probe (got {probes})")
        self.spec = spec
        self.start, self.low, self.high = start, low, high
        self.input_shape = tuple(input_shape or (_size_of(spec, "input", "input_shape"),))
        self.inputs = nn.Parameter(torch.empty(probes, *self.input_shape), requires_grad=learned)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Chooses the inputs anew."""
        with torch.no_grad():
            if self.start == "uniform":
                self.inputs.uniform_(self.low, self.high)
            else:
                self.inputs.copy_(self._grid())

    def fit(self, inputs: Tensor) -> Probe:
        """Takes the inputs from data: the first ones of `[inputs, *input_shape]`."""
        count = self.inputs.shape[0]
        if inputs.shape[0] < count or tuple(inputs.shape[1:]) != self.input_shape:
            raise UserError(
                f"Expected at least {count} inputs of shape {list(self.input_shape)} (got "
                f"{list(inputs.shape)})"
            )
        with torch.no_grad():
            self.inputs.copy_(inputs[:count])
        return self

    def forward(self, graph: WeightGraph) -> Tensor:
        """The outputs of every network at the inputs."""
        outputs = graph.run(self.inputs)
        if not isinstance(outputs, Tensor):
            raise UserError(f"Expected networks with one output (got {len(outputs)})")
        return outputs.unsqueeze(0) if isinstance(graph.layout, Layout) else outputs

    def activations(self, graph: WeightGraph) -> dict[str, Tensor]:
        """The activations of the neurons at the inputs, `[neurons, probes, ...]` by type."""
        found: dict[str, Tensor] = graph.run(self.inputs, return_activations=True)[1]
        return found

    def extra_repr(self) -> str:
        """The number and shape of the inputs."""
        learned = "" if self.inputs.requires_grad else ", fixed"
        return f"{self.inputs.shape[0]} inputs of {list(self.input_shape)}{learned}"

    def _grid(self) -> Tensor:
        """As many points of a grid over the range of the inputs as there are probes."""
        count, axes = self.inputs.shape[0], math.prod(self.input_shape)
        if axes > _MOST_GRID_AXES:
            raise UserError(
                f"Expected networks of at most {_MOST_GRID_AXES} coordinates for probes on a grid "
                f"(got inputs of shape {list(self.input_shape)}). Use learned probes."
            )
        side = round(count ** (1 / axes))
        if side**axes != count:
            raise UserError(
                f"Expected a number of probes that fills a grid of {axes} axes, such as "
                f"{max(side, 2) ** axes} (got {count})"
            )
        axis = torch.linspace(self.low, self.high, side)
        points = torch.cartesian_prod(*[axis] * axes).reshape(count, axes)
        return points.reshape(count, *self.input_shape)


class ProbeNet(nn.Module):
    """An MLP on the outputs of networks at learned inputs.

    It evaluates the networks, unlike models that read their weights alone.

    Args:
        probe: The inputs.
        out_features: Outputs per network.
        head: Hidden sizes of the MLP.
        dropout: Dropout between them.
        num_outputs: The number of values that a network returns for one input; by default, as
            many as it has output neurons.

    Example:
        >>> import torch
        >>> from nfn_graph import Probe, ProbeNet
        >>> from nfn_graph.converters import from_module
        >>> network = torch.nn.Sequential(
        ...     torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
        ... )
        >>> graph = from_module(network)
        >>> ProbeNet(Probe(graph.spec, probes=16), out_features=10).fit([graph])(graph).shape
        torch.Size([1, 10])
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        probe: Probe,
        out_features: int,
        head: Sequence[int] = (256, 256),
        dropout: float = 0.0,
        num_outputs: int | None = None,
    ) -> None:
        super().__init__()
        self.probe = probe
        count = num_outputs or _size_of(probe.spec, "output", "num_outputs")
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("std", torch.ones(()))
        self.head = mlp([probe.inputs.shape[0] * count, *head], out_features, dropout)

    @torch.no_grad()
    def fit(self, graphs: Iterable[WeightGraph]) -> ProbeNet:
        """Sets the mean and standard deviation by which outputs of networks are standardized."""
        found = torch.cat([self.probe(graph).double().flatten() for graph in graphs])
        std, mean = torch.std_mean(found, correction=0)
        self.mean.copy_(mean)
        self.std.copy_(torch.where(std > 1e-6 * mean.abs(), std, 1.0))
        return self

    def forward(self, graph: WeightGraph) -> Tensor:
        """The outputs of the model for every network."""
        return self.head((self.probe(graph).flatten(1) - self.mean) / self.std)


def _size_of(spec: NetworkSpec, role: str, option: str) -> int:
    """The size of the only fixed type whose name begins like this: the inputs or the outputs."""
    found = [neuron for neuron in spec.neurons if neuron.name.startswith(role)]
    if len(found) != 1 or found[0].size is None:
        raise UserError(
            f"Expected networks with one {role} type of one size (got "
            f"{[(neuron.name, neuron.size) for neuron in found]}). Give {option}."
        )
    return found[0].size
