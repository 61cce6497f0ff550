r"""Models that run the networks they read, on learned inputs.

A network's weights do not show what it computes, but its outputs do. A :class:`Probe` holds `K`
inputs that are trained with the model, and runs every network on them:

.. math:: f(U)_k = \text{network}_U(x_k)

Permuting hidden neurons does not change the outputs, and permutes the activations: the outputs
are invariant and the activations equivariant under HNP, :math:`f(\sigma U) = \sigma f(U)`.
Models with a probe *evaluate the network*: they need a graph that records the computation of its
network, whereas other models only read its weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from nfn_graph.data import Layout, WeightGraph
from nfn_graph.features import WeightFeatures
from nfn_graph.messages import UserError
from nfn_graph.nn.encoding import append_codes
from nfn_graph.nn.models import mlp
from nfn_graph.nn.norm import mean_and_std
from nfn_graph.spec import NetworkSpec, NeuronType
from nfn_graph.spec._checks import check_count

# A grid over more axes has too many points to run networks on.
_MOST_GRID_AXES = 4


class Probe(nn.Module):
    """Learned inputs, on which networks are run.

    Args:
        spec: The types of all networks, which must have one input type with a common size.
        probes: The number of inputs.
        input_shape: The shape of one input; by default, one value for every input neuron.
        start: How the inputs are chosen at first: uniformly at random (`"uniform"`), or on a
            regular grid (`"grid"`). :meth:`fit` takes them from data instead.
        low: The lower end of the range of the inputs.
        high: The upper end of the range of the inputs.
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
        check_count(probes, 1, "probes")
        self.spec = spec
        self.start, self.low, self.high = start, low, high
        self.input_shape = tuple(input_shape or (_size_of(spec, "input", "input_shape"),))
        self.inputs = nn.Parameter(torch.empty(probes, *self.input_shape), requires_grad=learned)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises the inputs."""
        with torch.no_grad():
            if self.start == "uniform":
                self.inputs.uniform_(self.low, self.high)
            else:
                self.inputs.copy_(self._grid())

    def fit(self, inputs: Tensor) -> Probe:
        """Initialises the inputs with data; training changes them unless they are fixed.

        Args:
            inputs: `[inputs, *input_shape]`, the first of which are used.
        """
        count = len(self)
        if inputs.shape[0] < count or tuple(inputs.shape[1:]) != self.input_shape:
            raise UserError(
                f"Expected at least {count} inputs of shape {list(self.input_shape)} (got "
                f"{list(inputs.shape)})"
            )
        with torch.no_grad():
            self.inputs.copy_(inputs[:count])
        return self

    def forward(self, graph: WeightGraph) -> Tensor:
        """Computes the outputs of every network at the inputs."""
        self._check_sizes(graph)
        outputs = graph.run(self.inputs)
        if not isinstance(outputs, Tensor):
            raise UserError(f"Expected networks with one output (got {len(outputs)})")
        return outputs.unsqueeze(0) if isinstance(graph.layout, Layout) else outputs

    def activations(self, graph: WeightGraph) -> dict[str, Tensor]:
        """Computes the activations of the neurons at the inputs by type, `[neurons, probes, ...]`.

        The rows are in the order of those of the graph. If a network has several positions, as
        after a convolution, these are the axes after the probes.
        """
        self._check_sizes(graph)
        found: dict[str, Tensor] = graph.run(self.inputs, return_activations=True)[1]
        return found

    def __len__(self) -> int:
        return self.inputs.shape[0]

    def extra_repr(self) -> str:
        """The number and shape of the inputs."""
        learned = "" if self.inputs.requires_grad else ", fixed"
        return f"{len(self)} inputs of {list(self.input_shape)}{learned}"

    def _check_sizes(self, graph: WeightGraph) -> None:
        """Refuses networks whose inputs differ from those that the probes were made for."""
        for neuron in _of_role(self.spec, "input"):
            found = graph.spec.neuron.get(neuron.name)
            if found is None or found.size != neuron.size:
                size = "none" if found is None else found.size or "several sizes"
                raise UserError(
                    f"Expected networks with {neuron.size} neurons of type '{neuron.name}', which "
                    f"the probes were made for (got {size}). Make a Probe for these networks."
                )

    def _grid(self) -> Tensor:
        """A grid over the range of the inputs, with one point for every probe."""
        count, axes = len(self), math.prod(self.input_shape)
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
        return torch.cartesian_prod(*[axis] * axes).reshape(count, *self.input_shape)


class ProbeNet(nn.Module):
    """An MLP on the outputs of networks at learned inputs.

    It evaluates the networks, unlike models that only read their weights.

    Args:
        probe: The learned inputs.
        out_features: The number of outputs per network.
        head: The hidden sizes of the MLP.
        dropout: The dropout probability in the MLP.
        num_outputs: The number of values that a network returns for one input; by default, the
            number of its output neurons.
        entropy: Whether the MLP also reads the entropy of the softmax of every output, which is the
            uncertainty of networks that are classifiers.
        extra_features: The number of features that a subclass adds in :meth:`features`.

    Shapes:
        - graph: a :class:`WeightGraph` or a batch.
        - output: `[networks, out_features]`.

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
        *,
        num_outputs: int | None = None,
        entropy: bool = False,
        extra_features: int = 0,
    ) -> None:
        super().__init__()
        self.probe, self.entropy = probe, entropy
        count = num_outputs or _size_of(probe.spec, "output", "num_outputs")
        width = len(probe) * (count + entropy) + extra_features
        # All outputs share one scale, so that the differences between those of a network are kept.
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("std", torch.ones(()))
        self.head = mlp([width, *head], out_features, dropout)

    @torch.no_grad()
    def fit(self, graphs: Iterable[WeightGraph]) -> ProbeNet:
        """Sets the mean and standard deviation by which outputs of networks are standardized."""
        outputs = (("outputs", self.probe(graph).flatten()) for graph in graphs)
        mean, std = mean_and_std(outputs)["outputs"]
        self.mean.copy_(mean)
        self.std.copy_(std)
        return self

    def features(self, graph: WeightGraph) -> Tensor:
        """The input of the MLP for every network, `[networks, features]`."""
        outputs = self.probe(graph)
        found = ((outputs - self.mean) / self.std).flatten(1)
        if not self.entropy:
            return found
        log = outputs.flatten(2).log_softmax(-1)
        return torch.cat([found, -(log.exp() * log).sum(-1)], 1)

    def forward(self, graph: WeightGraph) -> Tensor:
        """The outputs of the model for every network."""
        return self.head(self.features(graph))


class ProbeEncoding(nn.Module):
    r"""Appends the activations of every neuron at the probes as channels of the graph.

    A neuron of type :math:`l` with the activations :math:`a_i \in \mathbb{R}^K` gets the channels
    :math:`A_l a_i`, and the weight between two neurons gets the sum of theirs, as with
    :class:`IOEncoding`, so that neurons without a bias are described as well.

    .. math:: f(U)_i = A_l a_i, \qquad f(U)_{ij} = A_l a_i + A_{l-1} a_j,
        \qquad f(\sigma U) = \sigma f(U)

    It is equivariant under HNP but not under NP, which would permute the inputs. Activations at
    several positions are averaged. Input neurons get zeros, since their activations are the same in
    all networks.

    Args:
        probe: The learned inputs.
        channels: The number of channels to append.

    Shapes:
        - graph: a :class:`WeightGraph` or a batch.
        - features: those of the graph before the fold, of any number of channels.
        - output: the same with `channels` more.

    Example:
        >>> import torch
        >>> from nfn_graph import Probe, ProbeEncoding
        >>> from nfn_graph.converters import from_module
        >>> network = torch.nn.Sequential(
        ...     torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
        ... )
        >>> graph = from_module(network)
        >>> encoding = ProbeEncoding(Probe(graph.spec, probes=16), channels=4)
        >>> encoding.fit([graph])(graph).channels
        5
    """

    def __init__(self, probe: Probe, channels: int) -> None:
        super().__init__()
        self.probe = probe
        self.channels = check_count(channels, 1, "channels")
        inputs = {neuron.name for neuron in _of_role(probe.spec, "input")}
        names = [neuron.name for neuron in probe.spec.neurons if neuron.name not in inputs]
        self.maps = nn.ModuleDict({name: nn.Linear(len(probe), channels) for name in names})
        self.mean, self.std = nn.Module(), nn.Module()
        for name in names:
            self.mean.register_buffer(name, torch.zeros(()))
            self.std.register_buffer(name, torch.ones(()))

    @torch.no_grad()
    def fit(self, graphs: Iterable[WeightGraph]) -> ProbeEncoding:
        """Sets the mean and standard deviation by which activations are standardized."""
        samples = (
            (name, x.flatten())
            for graph in graphs
            for name, x in self.probe.activations(graph).items()
        )
        for name, (mean, std) in mean_and_std(samples).items():
            getattr(self.mean, name).copy_(mean)
            getattr(self.std, name).copy_(std)
        return self

    def forward(self, graph: WeightGraph, features: WeightFeatures | None = None) -> WeightFeatures:
        """Appends the channels.

        Args:
            graph: The networks to run.
            features: The features to append to; by default, those of the graph.
        """
        features = graph.features() if features is None else features
        codes = {name: self._code(name, x) for name, x in self.probe.activations(graph).items()}
        zeros = next(iter(codes.values())).new_zeros(1, self.channels)
        return append_codes(features, codes, zeros)

    def extra_repr(self) -> str:
        """Shown by `print(layer)`."""
        return f"{len(self.probe)} -> {self.channels}"

    def _code(self, name: str, activations: Tensor) -> Tensor:
        x = activations.flatten(2).mean(2) if activations.dim() > 2 else activations
        return self.maps[name]((x - getattr(self.mean, name)) / getattr(self.std, name))


def _of_role(spec: NetworkSpec, role: Literal["input", "output"]) -> list[NeuronType]:
    """The neuron types with a role: `input` and, if there are several, `input2` and so on."""
    return [n for n in spec.neurons if re.fullmatch(rf"{role}\d*", n.name)]


def _size_of(spec: NetworkSpec, role: Literal["input", "output"], option: str) -> int:
    """The size of the only input or output type."""
    found = _of_role(spec, role)
    if len(found) != 1 or found[0].size is None:
        raise UserError(
            f"Expected networks with one {role} type of one size (got "
            f"{[(neuron.name, neuron.size) for neuron in found]}). Pass {option}."
        )
    return found[0].size
