"""Small classifiers, many of one shape at once: their parameters, initialisation, outputs.

Parameters of `N` networks are stacked along a first axis, as `torch.func.stack_module_state`
does: `layers.0.weight` is `[N, out, in, ...]`. Dense layers are batched products over
activations `[N, features, batch]`; classes on the middle axis make the softmax ten times
faster than on the last one. Convolutions are grouped convolutions over `[batch, N * channels,
height, width]`, which on two cores were twice as fast as unfolding and batched products; but
for the first of several networks, where one or three channels per group made them three times
slower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nfn_graph.converters.zoos.networks import ACTIVATIONS
from nfn_graph.converters.zoos.wild_park import add_first_channels
from nfn_graph.messages import UserError
from nfn_graph.tasks.sources import Images
from nfn_graph.tasks.zoo.optimisers import Parameters

Activation = Literal["relu", "tanh", "gelu", "sigmoid", "leaky_relu", "none"]
InitKind = Literal[
    "glorot_normal", "he_normal", "orthogonal", "normal", "truncated_normal", "pytorch"
]
# The largest number of entries of an activation in one evaluation step.
_MOST_ENTRIES = 2**20


@dataclass(frozen=True)
class Architecture:
    """The shape of a classifier of images.

    Args:
        image: Channels, height and width of the inputs.
        convolutions: Output channels of each convolution.
        hidden: Widths of the hidden dense layers.
        classes: The number of outputs.
        padding: Zeros around the inputs of every convolution; with `same`, as many as half of its
            kernel.
        pool: The step between convolutions and dense layers: the mean over all positions, or all
            entries, positions fastest (`nn.Flatten`).
        stride: The stride of the convolutions.
        kernels: The kernel size of each convolution; 3 if it is left out.
        skips: For each convolution, the number of an earlier one whose activations are added to
            its outputs, or -1: as many of the first channels as both have.
        activations: The activation function of each convolution, if they differ within a network.
    """

    image: tuple[int, int, int]
    convolutions: tuple[int, ...]
    hidden: tuple[int, ...]
    classes: int
    padding: int | Literal["same"] = 0
    pool: Literal["mean", "flatten"] = "mean"
    stride: int = 2
    kernels: tuple[int, ...] = ()
    skips: tuple[int, ...] = ()
    activations: tuple[Activation, ...] = ()

    def __post_init__(self) -> None:
        if any(min(size) < 1 for size in self.maps):
            kernels = ", ".join(f"{k} x {k}" for k in sorted(set(map(self.kernel, self._layers))))
            raise UserError(
                f"Expected images large enough for {len(self.convolutions)} convolutions of "
                f"{kernels} with stride {self.stride} (got {self.image[1]} x {self.image[2]} "
                f"pixels with padding {self.padding}). Use a padding of 1 or fewer layers."
            )

    @property
    def _layers(self) -> range:
        return range(len(self.convolutions))

    def kernel(self, layer: int) -> int:
        """The kernel size of a convolution."""
        return self.kernels[layer] if self.kernels else 3

    def zeros(self, layer: int) -> int:
        """The number of zeros on each side of the inputs of a convolution."""
        return self.kernel(layer) // 2 if isinstance(self.padding, str) else self.padding

    def skip(self, layer: int) -> int:
        """The convolution whose activations are added to the outputs of another, or -1."""
        return self.skips[layer] if self.skips else -1

    @cached_property
    def maps(self) -> list[tuple[int, int]]:
        """Height and width after each convolution."""
        sizes, (height, width) = [], self.image[1:]
        for layer in self._layers:
            more = 2 * self.zeros(layer) - self.kernel(layer)
            height, width = ((n + more) // self.stride + 1 for n in (height, width))
            sizes.append((height, width))
        return sizes

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters of one network, by key."""
        shapes: dict[str, tuple[int, ...]] = {}
        channels, height, width = self.image
        before, layer = channels, 0
        for after in self.convolutions:
            size = self.kernel(layer)
            shapes[f"layers.{layer}.weight"] = (after, before, size, size)
            shapes[f"layers.{layer}.bias"] = (after,)
            before, layer = after, layer + 1
        if not self.convolutions:
            before = channels * height * width
        elif self.pool == "flatten":
            before *= self.maps[-1][0] * self.maps[-1][1]
        for after in (*self.hidden, self.classes):
            shapes[f"layers.{layer}.weight"] = (after, before)
            shapes[f"layers.{layer}.bias"] = (after,)
            before, layer = after, layer + 1
        return shapes

    @cached_property
    def units(self) -> list[tuple[int, ...]]:
        """The shape of every hidden activation of one image; where dropout acts."""
        maps = zip(self.convolutions, self.maps, strict=True)
        return [(c, h, w) for c, (h, w) in maps] + [(n,) for n in self.hidden]

    @property
    def name(self) -> str:
        """A name for files, which differs between any two architectures."""
        image = "x".join(map(str, self.image))
        kernels = [f"k{k}" for k in self.kernels] or [""] * len(self.convolutions)
        skips = [f"+{s}" if s >= 0 else "" for s in self.skips] or [""] * len(self.convolutions)
        signals = self.activations or [""] * len(self.convolutions)
        layers = zip(self.convolutions, kernels, skips, signals, strict=True)
        convolutions = "".join(f"-c{n}{kernel}{skip}{a}" for n, kernel, skip, a in layers)
        hidden = "".join(f"-{n}" for n in self.hidden)
        pool = "" if not self.convolutions else f"-p{self.padding}{self.pool}"
        pool += f"-s{self.stride}" if self.stride != 2 else ""
        return f"{image}{convolutions}{pool}{hidden}-{self.classes}"


def initialise(
    architecture: Architecture, kind: InitKind, scale: float, generator: torch.Generator
) -> Parameters:
    """Fresh parameters of one network; biases are zero, but for `pytorch`.

    Args:
        architecture: The shape.
        kind: The distribution. Glorot and He sample from a normal distribution with their own
            standard deviation, and `orthogonal` gives orthogonal rows or columns; all these are
            multiplied by `scale`. `normal` and `truncated_normal` (within two standard deviations)
            have a standard deviation of `scale / 10`. `pytorch` is how `nn.Linear` and `nn.Conv2d`
            begin: weights and biases are uniform within `scale` by the root of the fan-in.
        scale: See `kind`.
        generator: The random generator.
    """
    parameters: Parameters = {}
    fan_in = 1
    for key, shape in architecture.shapes.items():
        tensor = torch.zeros(shape)
        if key.endswith("weight"):
            # The bias of a layer comes after its weight.
            fan_in = math.prod(shape[1:])
        if kind == "pytorch":
            bound = scale / math.sqrt(fan_in)
            tensor.uniform_(-bound, bound, generator=generator)
        elif key.endswith("weight"):
            fan_out = shape[0] * math.prod(shape[2:])
            if kind == "orthogonal":
                nn.init.orthogonal_(tensor, scale, generator)
            elif kind == "truncated_normal":
                std = scale / 10
                nn.init.trunc_normal_(tensor, 0, std, -2 * std, 2 * std, generator)
            else:
                std = {
                    "glorot_normal": scale * math.sqrt(2 / (fan_in + fan_out)),
                    "he_normal": scale * math.sqrt(2 / fan_in),
                    "normal": scale / 10,
                }[kind]
                tensor.normal_(0, std, generator=generator)
        parameters[key] = tensor
    return parameters


def forward(
    architecture: Architecture,
    parameters: Mapping[str, Tensor],
    activation: Activation,
    images: Tensor,
    dropped: Sequence[Tensor] | None = None,
) -> Tensor:
    """The outputs of many networks.

    Args:
        architecture: Their common shape.
        parameters: Stacked along a first axis of `N`.
        activation: The activation function of the hidden layers, where the architecture has none.
        images: `[batch, N, channels, height, width]` (of their own each), or
            `[batch, 1, ...]` for all of them.
        dropped: The dropout factors of every hidden layer, `[batch, N, *units]`.

    Returns:
        `[N, classes, batch]`.
    """
    # Graphs of these networks can be run, but are not used for training: dropout is not part of
    # their computation, and a step with `Batch.run` takes 1.2 to 2.8 times as long.
    num = next(iter(parameters.values())).shape[0]
    masks = iter(dropped or ())
    x, layer = images, 0
    if architecture.convolutions:
        kept: list[Tensor] = []
        for channels in architecture.convolutions:
            weight, bias = parameters[f"layers.{layer}.weight"], parameters[f"layers.{layer}.bias"]
            if layer == 0 and architecture.stride > 1 and num > 1:
                x = _first_convolution(images, weight, bias, architecture)
            else:
                if layer == 0:
                    # With stride 1, all windows would take as many times the memory as a kernel
                    # has entries.
                    x = images.expand(-1, num, -1, -1, -1).flatten(1, 2)
                sizes = architecture.stride, architecture.zeros(layer)
                x = F.conv2d(x, weight.flatten(0, 1), bias.flatten(), *sizes, groups=num)
            if (source := architecture.skip(layer)) >= 0:
                each, other = (y.unflatten(1, (num, -1)).flatten(0, 1) for y in (x, kept[source]))
                sizes = channels, architecture.convolutions[source]
                x = add_first_channels(each, other, *sizes).unflatten(0, (-1, num)).flatten(1, 2)
            x = _activate(architecture, activation, layer, x)
            kept.append(x)
            if dropped is not None:
                x = x * next(masks).flatten(1, 2)
            layer += 1
        if architecture.pool == "mean":
            x = x.mean((2, 3))
        x = x.unflatten(1, (num, -1))
    x = x.flatten(2).movedim(0, -1)
    for last in [False] * len(architecture.hidden) + [True]:
        weight, bias = parameters[f"layers.{layer}.weight"], parameters[f"layers.{layer}.bias"]
        x = torch.baddbmm(bias.unsqueeze(-1), weight, x.expand(num, -1, -1))
        if not last:
            x = _activate(architecture, activation, layer, x)
            if dropped is not None:
                x = x * next(masks).movedim(0, -1)
        layer += 1
    return x


def _activate(architecture: Architecture, activation: Activation, layer: int, x: Tensor) -> Tensor:
    """The activations of a hidden layer."""
    own = architecture.activations[layer : layer + 1]
    return ACTIVATIONS[own[0] if own else activation](x)


def _first_convolution(
    images: Tensor, weight: Tensor, bias: Tensor, architecture: Architecture
) -> Tensor:
    """Images `[batch, N or 1, channels, ...]` to maps `[batch, N * out, ...]`."""
    batch, pad = len(images), architecture.zeros(0)
    size, stride = architecture.kernel(0), architecture.stride
    windows = F.pad(images, (pad, pad, pad, pad)).unfold(3, size, stride).unfold(4, size, stride)
    patches = windows.permute(1, 2, 5, 6, 0, 3, 4).flatten(4).flatten(1, 3)
    patches = patches.expand(len(weight), -1, -1)
    maps = torch.baddbmm(bias.unsqueeze(-1), weight.flatten(2), patches)
    maps = maps.unflatten(2, (batch, *architecture.maps[0]))
    return maps.movedim(2, 0).flatten(1, 2)


def build_module(architecture: Architecture, activation: Activation) -> nn.Module:
    """One such network as an ordinary module, with the keys of a zoo's checkpoints."""
    return _Classifier(architecture, activation)


class _Classifier(nn.Module):
    def __init__(self, architecture: Architecture, activation: Activation) -> None:
        super().__init__()
        self.architecture = architecture
        self.activation = activation
        self.layers = nn.ModuleList(
            nn.Conv2d(s[1], s[0], s[2], architecture.stride, architecture.zeros(i))
            if len(s) == 4
            else nn.Linear(s[1], s[0])
            for i, s in enumerate(s for k, s in architecture.shapes.items() if k.endswith("weight"))
        )

    def forward(self, images: Tensor) -> Tensor:
        """Outputs `[batch, classes]` of images `[batch, channels, height, width]`."""
        shape = self.architecture
        x, depth = images, len(shape.convolutions)
        kept: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            if i == depth:
                x = x.mean((2, 3)) if depth and shape.pool == "mean" else x.flatten(1)
            x = layer(x)
            if i < depth and (source := shape.skip(i)) >= 0:
                sizes = shape.convolutions[i], shape.convolutions[source]
                x = add_first_channels(x, kept[source], *sizes)
            if i < len(self.layers) - 1:
                x = _activate(shape, self.activation, i, x)
            kept.append(x)
        return x


class TrainingData(NamedTuple):
    """Images `[count, channels, height, width]` and labels of both splits, on one device."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @classmethod
    def of(cls, images: Images, device: torch.device, dtype: torch.dtype) -> TrainingData:
        """The images of a source, centred: pixels within [0, 1] become [-1, 1]."""
        parts = []
        for index in (images.train_index, images.test_index):
            parts.append((images.values(index) * 2 - 1).to(device, dtype))
            parts.append(images.labels[index].to(device))
        return cls(*parts)

    @staticmethod
    def facts(images: Images) -> dict[str, Any]:
        """What a reader of a zoo must know about its images."""
        return {
            "fingerprint": images.fingerprint,
            "classes": list(images.classes),
            "image_shape": list(images.shape),
            "pixels": "scaled from [0, 1] to [-1, 1]",
        }


class Metrics(NamedTuple):
    """How well a network does on the images that it was trained on, and on the test split."""

    train_loss: float
    train_accuracy: float
    test_loss: float
    test_accuracy: float


def measure(
    architecture: Architecture,
    parameters: Parameters,
    activation: Activation,
    data: TrainingData,
    trained_on: Sequence[Tensor],
) -> list[Metrics]:
    """The metrics of stacked networks.

    Args:
        architecture: Their common shape.
        parameters: Stacked parameters.
        activation: The activation function of all networks.
        data: The images.
        trained_on: The training images that every network saw.
    """
    networks = (architecture, parameters, activation)
    seen = torch.zeros(len(trained_on), len(data.train_images), dtype=torch.bool)
    for row, index in zip(seen, trained_on, strict=True):
        row[index] = True
    needed = seen.any(0).nonzero().squeeze(1)
    seen = seen[:, needed].to(data.train_images.device)
    needed = needed.to(data.train_images.device)
    losses, hits = _evaluate(networks, data.train_images[needed], data.train_labels[needed])
    counts = seen.sum(1).to(losses.dtype)
    train_loss = losses.where(seen, 0).sum(1) / counts
    train_accuracy = (hits & seen).sum(1) / counts
    losses, hits = _evaluate(networks, data.test_images, data.test_labels)
    columns = (train_loss, train_accuracy, losses.mean(1), hits.to(losses.dtype).mean(1))
    return [Metrics(*row) for row in torch.stack(columns, 1).tolist()]


def _evaluate(
    networks: tuple[Architecture, Parameters, Activation], images: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss, and whether the answer is right: `[N, images]` each."""
    architecture, parameters, activation = networks
    num = len(next(iter(parameters.values())))
    widest = max([64, *(torch.Size(units).numel() for units in architecture.units)])
    at_once = max(1, _MOST_ENTRIES // (num * widest))
    losses, hits = [], []
    for x, y in zip(images.split(at_once), labels.split(at_once), strict=True):
        outputs = forward(architecture, parameters, activation, x.unsqueeze(1))
        expected = y.expand(num, -1)
        losses.append(F.cross_entropy(outputs, expected, reduction="none"))
        # A network that has diverged gets no answer right.
        hits.append((outputs.argmax(1) == expected) & outputs.isfinite().all(1))
    return torch.cat(losses, 1), torch.cat(hits, 1)
