"""The networks of published zoos, as modules that have the keys of the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.zoos.zoo import Network

Signal = Callable[[Tensor], Tensor]
#: Activations by the names that the zoos use.
ACTIVATIONS: dict[str, Signal] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "elu": F.elu,
    "leaky_relu": F.leaky_relu,
    "leakyrelu": F.leaky_relu,
    "none": lambda x: x,
}


class Layer(NamedTuple):
    """A layer by its key, and the shape of its weight `[out, in, *kernel]`.

    Attributes:
        key: Its name in the state dict, without `.weight`.
        shape: The shape of its weight.
        stride: The stride of a convolution.
        is_pooled: Whether 2 x 2 max pooling follows.
    """

    key: str
    shape: tuple[int, ...]
    stride: int = 1
    is_pooled: bool = False


class _Layers(nn.Module):
    """Layers under dotted names, whatever the original modules around them were."""

    def add(self, layer: Layer) -> None:
        """Adds a linear layer or a convolution without padding."""
        outputs, inputs, *kernel = layer.shape
        made: nn.Module = nn.Linear(inputs, outputs)
        if kernel:
            made = nn.Conv2d(inputs, outputs, (kernel[0], kernel[1]), stride=layer.stride)
        *parents, name = layer.key.split(".")
        owner: nn.Module = self
        for parent in parents:
            if parent not in owner._modules:
                owner.add_module(parent, nn.Module())
            owner = owner.get_submodule(parent)
        owner.add_module(name, made)


class Siren(_Layers):
    r"""An MLP with sines: :math:`h \mapsto \sin(\omega_0 (W h + b))`, except in the last layer."""

    def __init__(self, layers: Sequence[Layer], w0: float, offset: float) -> None:
        super().__init__()
        self.names = [layer.key for layer in layers]
        self.w0, self.offset = w0, offset
        for layer in layers:
            self.add(layer)

    def forward(self, x: Tensor) -> Tensor:
        """Computes outputs `[..., out]` at coordinates `[..., in]`."""
        for name in self.names[:-1]:
            x = torch.sin(self.w0 * self.get_submodule(name)(x))
        return self.get_submodule(self.names[-1])(x) + self.offset


class PlainCnn(_Layers):
    """Convolutions, an optional mean over positions, and linear layers."""

    def __init__(self, layers: Sequence[Layer], activation: str, is_averaged: bool) -> None:
        super().__init__()
        self.convolutions = [layer for layer in layers if len(layer.shape) > 2]
        self.linears = [layer for layer in layers if len(layer.shape) == 2]
        self.activation = activation_of(activation)
        self.average = nn.AdaptiveAvgPool2d(1) if is_averaged else nn.Identity()
        self.flatten = nn.Flatten()
        for layer in layers:
            self.add(layer)

    def forward(self, x: Tensor) -> Tensor:
        """Computes logits `[batch, classes]` of images `[batch, channels, height, width]`."""
        for layer in self.convolutions:
            x = self.get_submodule(layer.key)(x)
            x = self.activation(F.max_pool2d(x, 2) if layer.is_pooled else x)
        x = self.flatten(self.average(x))
        for layer in self.linears[:-1]:
            x = self.activation(self.get_submodule(layer.key)(x))
        return self.get_submodule(self.linears[-1].key)(x)


@lru_cache(maxsize=64)
def make_siren(layers: tuple[Layer, ...], w0: float, offset: float) -> Network:
    """Creates a SIREN on the meta device; networks of one shape share it."""
    with torch.device("meta"):
        return Network(Siren(layers, w0, offset))


@lru_cache(maxsize=64)
def make_plain_cnn(
    layers: tuple[Layer, ...], activation: str, is_averaged: bool, image_size: int
) -> Network:
    """Creates a CNN on the meta device; networks of one shape share it."""
    with torch.device("meta"):
        example = torch.empty(1, layers[0].shape[1], image_size, image_size)
        return Network(PlainCnn(layers, activation, is_averaged), example)


def activation_of(name: str) -> Signal:
    """Returns an activation by its published name."""
    if name not in ACTIVATIONS:
        raise ConversionError(f"Expected an activation: {', '.join(ACTIVATIONS)} (got '{name}')")
    return ACTIVATIONS[name]


def weight_layers(tensors: Mapping[str, Tensor], keys: Sequence[str]) -> tuple[Layer, ...]:
    """Returns the layers with these keys; each must have a weight and a bias, and nothing else."""
    expected = {f"{key}.{part}" for key in keys for part in ("weight", "bias")}
    if not keys or expected != set(tensors):
        raise ConversionError(
            f"Expected the tensors {sorted(expected) or 'of some layers'} (got {sorted(tensors)})"
        )
    layers = []
    for key in keys:
        shape, bias = tuple(tensors[f"{key}.weight"].shape), tuple(tensors[f"{key}.bias"].shape)
        if len(shape) not in (2, 4) or bias != shape[:1]:
            raise ConversionError(
                f"Expected '{key}.weight' of a linear layer or a 2d convolution, and a bias for "
                f"each of its outputs (got shapes {list(shape)} and {list(bias)})"
            )
        layers.append(Layer(key, shape))
    return tuple(layers)


def siren_layers(tensors: Mapping[str, Tensor], keys: Sequence[str]) -> tuple[Layer, ...]:
    """Returns the layers of an MLP; each must read the outputs of the previous one."""
    layers = weight_layers(tensors, keys)
    for before, after in pairwise(layers):
        if len(after.shape) != 2 or before.shape[0] != after.shape[1]:
            raise ConversionError(
                f"Expected '{after.key}.weight' of shape [out, {before.shape[0]}], because "
                f"'{before.key}' has that many outputs (got {list(after.shape)})"
            )
    return layers
