r"""SIRENs, many of one shape at once: initialisation, outputs, coordinates.

.. math:: h_{i+1} = \sin(\omega_0 (W_i h_i + b_i)), \quad f(x) = W_L h_L + b_L + \text{offset}

Coordinates are (row, column), or (x, y, z), within [-1, 1]; of an image, the centres of the
outermost pixels lie at -1 and 1. Parameters are stacked along a first axis of `N` networks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from nfn_graph import NetworkSpec
from nfn_graph.data import Argument, Computation, Layout, Neurons, Ref, Step
from nfn_graph.messages import UserError
from nfn_graph.spec import WeightKey
from nfn_graph.tasks.zoo.optimisers import BatchedOptimiser, Parameters, stack
from nfn_graph.tasks.zoo.seeds import generator_of

SirenInit = Literal["sitzmann", "dws"]
_REPORT_EVERY = 20


@dataclass(frozen=True)
class SirenShape:
    """The widths of a SIREN: inputs, hidden layers, outputs."""

    inputs: int
    hidden: tuple[int, ...]
    outputs: int

    @property
    def name(self) -> str:
        """A name for files."""
        return "-".join(map(str, ("siren", self.inputs, *self.hidden, self.outputs)))

    @property
    def num_layers(self) -> int:
        """The number of weight matrices."""
        return len(self.hidden) + 1


def initialise_siren(
    shape: SirenShape, w0: float, generator: torch.Generator, kind: SirenInit = "sitzmann"
) -> Parameters:
    r"""Fresh parameters of one network.

    Let `n` be the number of inputs of a layer. As Sitzmann et al. sample them, weights are uniform
    within :math:`\pm 1/n` in the first layer and within :math:`\pm\sqrt{6/n}/\omega_0` in the
    others, and biases within :math:`\pm 1/\sqrt{n}`. In the INRs of DWSNets (`kind="dws"`), the
    first layer is like the other hidden ones, their biases are zero, and weights and biases of the
    last layer are uniform within :math:`\pm 1/\sqrt{n}`.
    """
    widths = (shape.inputs, *shape.hidden, shape.outputs)
    parameters = {}
    for i, (n, m) in enumerate(itertools.pairwise(widths)):
        is_last = i == len(widths) - 2
        bound = math.sqrt(6 / n) / w0 if i else 1 / n
        if kind == "dws":
            bound = 1 / math.sqrt(n) if is_last else math.sqrt(6 / n) / w0
        weight = torch.rand(m, n, generator=generator) * 2 - 1
        bias = torch.rand(m, generator=generator) * 2 - 1
        parameters[f"layers.{i}.weight"] = weight * bound
        is_zero = kind == "dws" and not is_last
        parameters[f"layers.{i}.bias"] = bias * 0 if is_zero else bias / math.sqrt(n)
    return parameters


class Siren(nn.Module):
    """One such network as an ordinary module, with the keys of a zoo's checkpoints.

    Args:
        shape: Its widths.
        w0: The frequency factor of all hidden layers.
        offset: The number that is added to the outputs.
    """

    def __init__(self, shape: SirenShape, w0: float, offset: float = 0.0) -> None:
        super().__init__()
        widths = (shape.inputs, *shape.hidden, shape.outputs)
        self.layers = nn.ModuleList(nn.Linear(n, m) for n, m in itertools.pairwise(widths))
        self.w0, self.offset = w0, offset

    def forward(self, x: Tensor) -> Tensor:
        """Outputs `[points, outputs]` at coordinates `[points, inputs]`."""
        for layer in self.layers[:-1]:
            x = torch.sin(layer(x) * self.w0)
        return self.layers[-1](x) + self.offset


def siren_forward(
    parameters: Mapping[str, Tensor], coordinates: Tensor, w0: float, offset: float = 0.0
) -> Tensor:
    """The outputs of stacked networks.

    Args:
        parameters: `layers.{i}.weight` as `[N, out, in]` and `layers.{i}.bias` as `[N, out]`.
        coordinates: `[inputs, points]` for all networks, or `[N, inputs, points]`.
        w0: The frequency factor of all hidden layers.
        offset: The number that is added to the outputs.

    Returns:
        `[N, outputs, points]`.
    """
    depth = len(parameters) // 2
    num = parameters["layers.0.weight"].shape[0]
    x = coordinates.expand(num, -1, -1)
    for i in range(depth):
        last = i == depth - 1
        # Scaling the weights is cheaper than scaling the activations.
        scale = 1.0 if last else w0
        weight = parameters[f"layers.{i}.weight"] * scale
        bias = parameters[f"layers.{i}.bias"] * scale + (offset if last else 0.0)
        x = torch.baddbmm(bias.unsqueeze(-1), weight, x)
        if not last:
            x = torch.sin(x)
    return x


def siren_layers(spec: NetworkSpec) -> list[WeightKey]:
    """The layers of a SIREN that reads the two coordinates of an image, the first one first.

    Raises:
        UserError: If the network is not a chain of dense layers with biases, or if it does not
            have two inputs.
    """
    after = {weight.source: weight.key for weight in spec.weights}
    before = {weight.target: weight.key for weight in spec.weights}
    first = [n for n in spec.neurons if n.name not in before]
    is_chain = len(after) == len(before) == len(spec.weights) == len(spec.neurons) - 1
    is_dense = all(w.taps == 1 and spec.neuron[w.target].taps == 1 for w in spec.weights)
    if not (is_chain and is_dense and len(first) == 1 and first[0].size == 2):
        raise UserError(
            f"Expected a SIREN of an image: dense layers with biases, one after the other, the "
            f"first of which reads 2 coordinates (got {spec})"
        )
    keys = [after[first[0].name]]
    while keys[-1][2] in after:
        keys.append(after[keys[-1][2]])
    return keys


def siren_computation(layout: Layout, w0: float, offset: float) -> Computation:
    """What a SIREN computes, so that the graph of a file that does not say it can be run.

    Args:
        layout: The layout of a chain of dense layers with biases.
        w0: The frequency factor of all hidden layers.
        offset: The number that is added to the outputs.
    """
    # Every tensor of a chain is the weights of one type or the biases of one layer.
    numbers = {parts[0].store: i for i, parts in enumerate(layout.sources)}
    steps, activations = [Step("input", (0,))], []

    def step(operation: str, *args: Argument) -> Ref:
        steps.append(Step(operation, args))
        return Ref(len(steps) - 1)

    x = Ref(0)
    *hidden, last = siren_layers(layout.spec)
    for key in (*hidden, last):
        x = step("linear", x, step("parameter", numbers[key]), step("parameter", numbers[key[2]]))
        x = step("add", x, offset) if key == last else step("sin", step("mul", x, w0))
        activations.append(Neurons(key[2], x, -1))
    # Some checkpoints hold weights [in, out].
    turned = {
        number: [("permute", ((1, 0),))]
        for number, parts in enumerate(layout.sources)
        if parts[0].axes == ("source", "target")
    }
    return Computation(tuple(steps), (x,), tuple(activations)).reading(turned)


def pixel_grid(height: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The coordinates of an image's pixels, row by row: `[2, height * width]`."""
    rows = torch.linspace(-1, 1, height, dtype=dtype)
    columns = torch.linspace(-1, 1, width, dtype=dtype)
    return torch.stack(torch.meshgrid(rows, columns, indexing="ij")).flatten(1)


def voxel_grid(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The coordinates of a cube of `size` points along each axis: `[3, size ** 3]`."""
    axis = torch.linspace(-1, 1, size, dtype=dtype)
    return torch.stack(torch.meshgrid(axis, axis, axis, indexing="ij")).flatten(1)


class FitTargets(NamedTuple):
    """The targets that networks are fitted to.

    Attributes:
        coordinates: `[inputs, points]` for all networks, or `[N, inputs, points]`.
        values: `[N, outputs, points]`.
    """

    coordinates: Tensor
    values: Tensor


class FitSettings(NamedTuple):
    """The settings of a fit.

    Attributes:
        w0: The frequency factor.
        offset: The number that is added to the outputs.
        steps: Steps of Adam.
        learning_rate: The learning rate of Adam.
        points: Points per step, the same for all networks; 0 for all of them.
        seed: The seed from which those points are sampled.
        init: The initialisation of the weights, see :func:`initialise_siren`.
        stop_psnr: A network whose points of a step have this ratio of peak signal to noise, in
            decibels, is left as it is from then on; 0 for never.
    """

    w0: float
    offset: float
    steps: int
    learning_rate: float
    points: int
    seed: int
    init: SirenInit = "sitzmann"
    stop_psnr: float = 0.0


class Fits(NamedTuple):
    """Stacked parameters, and the mean squared error of every network over all points."""

    parameters: Parameters
    errors: Tensor


def fit_sirens(
    shape: SirenShape,
    seeds: Sequence[int],
    targets: FitTargets,
    settings: FitSettings,
    on_steps: Callable[[int], None] = lambda steps: None,
) -> Fits:
    """Fits one network per seed to its target by the mean squared error.

    Args:
        shape: The shape of all networks.
        seeds: The seeds of the initial weights, one per network.
        targets: The targets of the networks.
        settings: The settings of the fits.
        on_steps: Called with the number of steps made, summed over networks.
    """
    like = targets.values
    fresh = [
        initialise_siren(shape, settings.w0, generator_of(s, "initial"), settings.init)
        for s in seeds
    ]
    stacked = {key: x.to(like.device, like.dtype) for key, x in stack(fresh).items()}
    rates = like.new_full((len(seeds),), settings.learning_rate)
    optimiser = BatchedOptimiser(stacked, ["adam"] * len(seeds), rates)
    parameters = optimiser.parameters
    draws = generator_of(settings.seed, "points")
    outputs, points = like.shape[1:]
    for step in range(settings.steps):
        coordinates, values = targets
        if 0 < settings.points < points:
            chosen = torch.randint(points, (settings.points,), generator=draws).to(like.device)
            coordinates = coordinates.index_select(-1, chosen)
            values = values.index_select(-1, chosen)
        found = siren_forward(parameters, coordinates, settings.w0, settings.offset)
        errors = (found - values).square_().sum((1, 2)) / (outputs * values.shape[-1])
        loss = errors.sum()
        if settings.stop_psnr:
            # Without a learning rate, a network stays as it is.
            rates.masked_fill_(errors.detach() <= 10 ** (-settings.stop_psnr / 10), 0)
        optimiser.step(torch.autograd.grad(loss, list(parameters.values())))
        if (step + 1) % _REPORT_EVERY == 0:
            on_steps(_REPORT_EVERY * len(seeds))
    on_steps(settings.steps % _REPORT_EVERY * len(seeds))
    done = {key: x.detach() for key, x in parameters.items()}
    return Fits(done, _errors(done, targets, settings))


@torch.no_grad()
def _errors(parameters: Parameters, targets: FitTargets, settings: FitSettings) -> Tensor:
    total = targets.values.new_zeros(len(targets.values))
    pieces = zip(targets.coordinates.split(4096, -1), targets.values.split(4096, -1), strict=True)
    for coordinates, values in pieces:
        found = siren_forward(parameters, coordinates, settings.w0, settings.offset)
        total += (found - values).square().sum((1, 2))
    return total / targets.values[0].numel()
