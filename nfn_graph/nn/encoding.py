"""Encodings of positions and of values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from nfn_graph.features import WeightFeatures
from nfn_graph.messages import UserError
from nfn_graph.nn._layer_checks import check_choice, check_features, check_unfolded
from nfn_graph.ops._precision import without_autocast
from nfn_graph.spec import Key, NetworkSpec, WeightKey, module_name
from nfn_graph.spec._checks import check_count


class IOEncoding(nn.Module):
    r"""Marks the neurons of fixed types (inputs, outputs), so that NP layers can distinguish them.

    The IO-encoding of `Permutation Equivariant Neural Functionals
    <https://arxiv.org/abs/2302.14040>`_ (section 2.2): position encodings at the columns of
    the first weight, the rows of the last weight, and the last bias. Acts before the fold.

    - `"learned"`: embeddings per position and tap, added to the features.
    - `"sinusoidal"`: :math:`[\sin(\pi s x), \cos(\pi s x), x]` of the position
      :math:`x \in [-1, 1]` at `num_bands` frequencies :math:`s` from 1 to
      `max_frequency / 2`, concatenated as channels; zeros for all other tensors.

    Args:
        spec: The networks' own spec.
        in_channels: The number of input channels.
        kind: `"learned"` or `"sinusoidal"`.
        max_frequency: The highest frequency of the sinusoidal encoding.
        num_bands: The number of frequencies of the sinusoidal encoding.
        encode_layers: Whether to encode the depth of every tensor as well.

    Shapes:
        - input: features of `spec` with `in_channels`, before the fold.
        - output: the same with `out_channels`.

    Example:
        >>> import torch
        >>> from nfn_graph import IOEncoding, NetworkSpec
        >>> from nfn_graph.testing import random_graph
        >>> spec = NetworkSpec.chain(2, input_size=2, output_size=1)
        >>> graph = random_graph(spec, {"hidden1": 4}).to(torch.float32)
        >>> layer = IOEncoding(spec, in_channels=1, kind="sinusoidal", num_bands=6)
        >>> layer(graph.features()).channels  # the value, 6 sines, 6 cosines and the position
        14
    """

    def __init__(
        self,
        spec: NetworkSpec,
        in_channels: int,
        kind: Literal["learned", "sinusoidal"] = "sinusoidal",
        max_frequency: float = 10.0,
        num_bands: int = 6,
        encode_layers: bool = False,
    ) -> None:
        super().__init__()
        self.spec = check_unfolded(spec)
        self.in_channels = check_count(in_channels, 1, "in_channels")
        self.kind = check_choice(kind, ("learned", "sinusoidal"))
        self.max_frequency = max_frequency
        self.num_bands = check_count(num_bands, 0, "num_bands")
        self.encode_layers = encode_layers
        self.out_channels = in_channels
        self.positions = nn.ParameterDict()
        self.layers = nn.ParameterDict()
        if kind == "sinusoidal":
            self.out_channels += 2 * num_bands + 1
        else:
            self._add_embeddings()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises the embeddings with the standard normal distribution."""
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, features: WeightFeatures) -> WeightFeatures:
        """Adds or concatenates the encodings."""
        check_features(features, self.spec, self.in_channels)
        return self._learned(features) if self.kind == "learned" else self._sinusoidal(features)

    def extra_repr(self) -> str:
        """Shown by `print(layer)`."""
        return f"{self.kind}, {self.in_channels} -> {self.out_channels}"

    def _add_embeddings(self) -> None:
        for neuron in self.spec.neurons:
            if neuron.fixed and neuron.size is None:
                raise UserError(
                    f"Expected one size of the fixed neuron type '{neuron.name}' for a learned "
                    f"encoding (got an open size). Use kind='sinusoidal'."
                )
        keys: list[Key] = [*self.spec.neuron, *self.spec.weight]
        for key in keys:
            names = {key: key} if isinstance(key, str) else _ends(key)
            for name, neuron_name in names.items():
                size, taps = self.spec.neuron[neuron_name].size, self.spec.taps[key]
                if size is not None and taps:
                    self.positions[name] = torch.empty(size, taps, self.in_channels)
        for key, taps in self.spec.taps.items():
            if self.encode_layers and taps:
                self.layers[module_name(key)] = torch.empty(taps, self.in_channels)

    def _learned(self, features: WeightFeatures) -> WeightFeatures:
        positions = features.incidence.positions

        def encoded(key: Key, x: Tensor) -> Tensor:
            if isinstance(key, str):
                if key in self.positions:
                    x = x + self.positions[key].index_select(0, positions[key])
            else:
                rows = features.rows(key)
                ends = zip(_ends(key).items(), (rows.sources, rows.targets), strict=True)
                for (name, neuron), end in ends:
                    if name in self.positions:
                        places = positions[neuron].index_select(0, end.index)
                        x = x + self.positions[name].index_select(0, places)
            name = module_name(key)
            return x + self.layers[name] if name in self.layers else x

        return features.replace({key: encoded(key, x) for key, x in features.tensors()})

    def _sinusoidal(self, features: WeightFeatures) -> WeightFeatures:
        # A dtype with few digits cannot distinguish hundreds of positions.
        dtype = torch.promote_types(features.dtype, torch.float32)
        codes: dict[str, Tensor] = {}
        for neuron in self.spec.neurons:
            if neuron.fixed:
                # Positions are spread evenly over [-1, 1]; a single one is at -1.
                last = features.incidence.layer_sizes[neuron.name] - 1
                places = features.incidence.positions[neuron.name].to(dtype)
                codes[neuron.name] = self._fourier(2 * places / last.clamp(min=1).to(dtype) - 1)
        depths: dict[Key, Tensor] = {}
        if self.encode_layers:
            # A neuron type has the depth of its first weight.
            count = len(self.spec.weights)
            places = torch.linspace(-1, 1, count, dtype=dtype, device=features.device)
            of_weights = self._fourier(places).unsqueeze(1)
            for weight, code in zip(self.spec.weights, of_weights, strict=True):
                depths[weight.key] = code
                depths.setdefault(weight.target, code)
        width = self.out_channels - self.in_channels
        zeros = torch.zeros(1, width, dtype=dtype, device=features.device)
        return append_codes(features, codes, zeros, depths)

    def _fourier(self, x: Tensor) -> Tensor:
        scales = torch.linspace(
            1.0, self.max_frequency / 2, self.num_bands, dtype=x.dtype, device=x.device
        )
        angles = math.pi * x.unsqueeze(-1) * scales
        return torch.cat([angles.sin(), angles.cos(), x.unsqueeze(-1)], -1)


class FourierFeatures(nn.Module):
    r"""Gaussian Fourier features of the values: :math:`[\sin 2\pi Bx, \cos 2\pi Bx]`.

    Args:
        in_channels: The number of input channels.
        num_features: The number of rows of the random matrix :math:`B`; the output has twice this
            number of channels.
        scale: The standard deviation of the entries of the matrix.

    Example:
        >>> import torch
        >>> from nfn_graph import FourierFeatures, NetworkSpec
        >>> from nfn_graph.testing import random_graph
        >>> spec = NetworkSpec.chain(2, input_size=2, output_size=1)
        >>> graph = random_graph(spec, {"hidden1": 4}).to(torch.float32)
        >>> FourierFeatures(in_channels=1, num_features=16)(graph.features()).channels
        32
    """

    frequencies: Tensor

    def __init__(self, in_channels: int, num_features: int = 256, scale: float = 10.0) -> None:
        super().__init__()
        self.in_channels = check_count(in_channels, 1, "in_channels")
        self.out_channels = 2 * check_count(num_features, 1, "num_features")
        self.scale = scale
        self.register_buffer("frequencies", torch.randn(in_channels, num_features) * scale)

    def forward(self, features: WeightFeatures) -> WeightFeatures:
        """Encodes every entry separately."""
        check_features(features, features.spec, self.in_channels)
        return features.map(self._encode)

    def extra_repr(self) -> str:
        """Shown by `print(layer)`."""
        return f"{self.in_channels} -> {self.out_channels}, scale={self.scale}"

    def _encode(self, x: Tensor) -> Tensor:
        # The angles are large, so a dtype with few digits would leave only noise.
        with without_autocast(x.device):
            angles = 2 * math.pi * (x @ self.frequencies)
        return torch.cat([angles.sin(), angles.cos()], -1)


def position_name(key: WeightKey, end: Literal["target", "source"]) -> str:
    """The name of the positions at one end of a weight type in a module's parameters."""
    return f"{module_name(key)}__{end}"


def append_codes(
    features: WeightFeatures,
    codes: Mapping[str, Tensor],
    zeros: Tensor,
    of_types: Mapping[Key, Tensor] | None = None,
) -> WeightFeatures:
    """Appends the codes `[neurons, width]` of neurons as channels.

    A weight gets the sum of those of its source and its target. Neurons without a code get `zeros`,
    `[1, width]`. The codes `of_types`, of the same shape, are added for all entries of a type.
    """

    def appended(key: Key, x: Tensor) -> Tensor:
        code = zeros if of_types is None else of_types.get(key, zeros)
        if isinstance(key, str):
            code = code + codes.get(key, zeros)
        else:
            rows = features.rows(key)
            for name, end in ((key[0], rows.sources), (key[2], rows.targets)):
                if name in codes:
                    code = code + codes[name].index_select(0, end.index)
        return torch.cat([x, code.to(x.dtype).unsqueeze(1).expand(*x.shape[:2], -1)], -1)

    return features.replace({key: appended(key, x) for key, x in features.tensors()})


def _ends(key: WeightKey) -> dict[str, str]:
    """The names of the positions of a weight type, with the neuron types at its ends."""
    return {position_name(key, "source"): key[0], position_name(key, "target"): key[2]}
