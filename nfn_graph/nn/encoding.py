"""Encodings of positions and of values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from nfn_graph.features import Incidence, WeightFeatures
from nfn_graph.messages import UserError
from nfn_graph.nn._layer_checks import check_choice, check_features
from nfn_graph.ops._precision import without_autocast
from nfn_graph.spec import Key, NetworkSpec, WeightKey, module_name
from nfn_graph.spec._checks import check_count

End = Literal["target", "source"]


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
        if not isinstance(spec, NetworkSpec):
            raise TypeError(
                f"Expected the networks' own NetworkSpec, before the fold "
                f"(got {type(spec).__name__})"
            )
        self.spec = spec
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
        add = self._learned if self.kind == "learned" else self._sinusoidal
        return add(features)

    def extra_repr(self) -> str:
        """Shown by `print(layer)`."""
        return f"{self.kind}, {self.in_channels} -> {self.out_channels}"

    def _add_embeddings(self) -> None:
        channels = self.in_channels
        for neuron in self.spec.neurons:
            if neuron.fixed and neuron.size is None:
                raise UserError(
                    f"Expected one size of the fixed neuron type '{neuron.name}' for a learned "
                    f"encoding (got an open size). Use kind='sinusoidal'."
                )
            if neuron.size is not None and neuron.taps:
                shape = (neuron.size, neuron.taps, channels)
                self.positions[neuron.name] = torch.empty(shape)
        for weight in self.spec.weights:
            ends: dict[End, str] = {"source": weight.source, "target": weight.target}
            for end, name in ends.items():
                size = self.spec.neuron[name].size
                if size is not None:
                    shape = (size, weight.taps, channels)
                    self.positions[position_name(weight.key, end)] = torch.empty(shape)
        if self.encode_layers:
            for weight in self.spec.weights:
                self.layers[module_name(weight.key)] = torch.empty(weight.taps, channels)
            for neuron in self.spec.neurons:
                if neuron.taps:
                    self.layers[neuron.name] = torch.empty(neuron.taps, channels)

    def _learned(self, features: WeightFeatures) -> WeightFeatures:
        def encoded(key: Key, x: Tensor) -> Tensor:
            for name, positions in self._positions(features, key):
                x = x + self.positions[name].index_select(0, positions)
            if module_name(key) in self.layers:
                x = x + self.layers[module_name(key)]
            return x

        return features.replace({key: encoded(key, x) for key, x in features.tensors()})

    def _positions(self, features: WeightFeatures, key: Key) -> list[tuple[str, Tensor]]:
        """The positions of the neurons of each row of a type, for those that have embeddings."""
        positions = features.incidence.positions
        if isinstance(key, str):
            return [(key, positions[key])] if key in self.positions else []
        ends: dict[End, str] = {"source": key[0], "target": key[2]}
        found = []
        for end, neuron in ends.items():
            name = position_name(key, end)
            if name in self.positions:
                rows = features.rows(key)
                grouping = rows.sources if end == "source" else rows.targets
                found.append((name, positions[neuron].index_select(0, grouping.index)))
        return found

    def _sinusoidal(self, features: WeightFeatures) -> WeightFeatures:
        # A dtype with few digits cannot distinguish hundreds of positions.
        dtype = torch.promote_types(features.dtype, torch.float32)
        fixed = {
            n.name: self._fourier(_places(features.incidence, n.name, dtype))
            for n in self.spec.neurons
            if n.fixed
        }
        depth = self._depths(dtype, features.device)
        width = self.out_channels - self.in_channels
        zeros = torch.zeros(1, width, dtype=dtype, device=features.device)

        def encoded(key: Key, x: Tensor) -> Tensor:
            code = depth.get(key, zeros)
            if isinstance(key, str):
                return cat_channels(x, code + fixed[key] if key in fixed else code)
            rows = features.rows(key)
            for name, grouping in ((key[0], rows.sources), (key[2], rows.targets)):
                if name in fixed:
                    code = code + fixed[name].index_select(0, grouping.index)
            return cat_channels(x, code)

        return features.replace({key: encoded(key, x) for key, x in features.tensors()})

    def _depths(self, dtype: torch.dtype, device: torch.device) -> Mapping[Key, Tensor]:
        """The encoding of the depth of each tensor; a neuron type has that of its first weight."""
        if not self.encode_layers:
            return {}
        count = len(self.spec.weights)
        codes = self._fourier(torch.linspace(-1, 1, count, dtype=dtype, device=device))
        depths: dict[Key, Tensor] = {}
        for weight, code in zip(self.spec.weights, codes.unsqueeze(1), strict=True):
            depths[weight.key] = code
            depths.setdefault(weight.target, code)
        return depths

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


def position_name(key: WeightKey, end: End) -> str:
    """The name of the positions at one end of a weight type in a module's parameters."""
    return f"{module_name(key)}__{end}"


def cat_channels(x: Tensor, code: Tensor) -> Tensor:
    """Appends a code `[count or 1, d]` to the channels of every tap, in the dtype of `x`."""
    return torch.cat([x, code.to(x.dtype).unsqueeze(1).expand(*x.shape[:2], -1)], -1)


def _places(incidence: Incidence, name: str, dtype: torch.dtype) -> Tensor:
    """Positions in layers, spread evenly over [-1, 1]; a single position is at -1."""
    last = (incidence.layer_sizes[name] - 1).clamp(min=1).to(dtype)
    return 2 * incidence.positions[name].to(dtype) / last - 1
