"""Layers that act on single entries, and wrappers of layers."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch_geometric.resolver import normalize_string

from nfn_graph.features import WeightFeatures
from nfn_graph.messages import UserError
from nfn_graph.spec import Key

#: The activations of `torch.nn` that act on single values.
_ACTIVATIONS = (
    "CELU", "ELU", "GELU", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU",
    "LogSigmoid", "Mish", "PReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus",
    "Softsign", "Tanh",
)  # fmt: skip


class Activation(nn.Module):
    """A pointwise function of the features, such as `Activation("relu")`.

    Args:
        function: The name of an activation of `torch.nn`, spelled as PyG's models accept it
            (`"relu"`, `"ReLU"`, `"leaky_relu"`), or a function of a tensor. The function must act
            on each value separately, and not in place, since features share memory with the graph
            that they came from.

    Example:
        >>> from nfn_graph import Activation
        >>> Activation("leaky_relu")
        Activation(
          (function): LeakyReLU(negative_slope=0.01)
        )
    """

    def __init__(self, function: str | Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        if isinstance(function, str):
            function = _named(function)
        if isinstance(function, type) or not callable(function):
            raise TypeError(
                f"Expected the name of an activation or a function of a tensor (got {function!r}). "
                f"Use 'relu' or torch.nn.ReLU()."
            )
        if getattr(function, "inplace", False):
            raise UserError(f"Expected a function that keeps its input unchanged (got {function})")
        self.function = function

    def forward(self, features: WeightFeatures) -> WeightFeatures:
        """Applies the function to every tensor."""
        return features.map(self.function)


class Dropout(nn.Module):
    """Zeroes features at random and scales the rest in training; does nothing in `eval`.

    Args:
        p: The probability of zeroing a value.
        per_channel: Whether to zero a channel of a tap for all entries of a type in one network
            together. This commutes with permutations for every random sample; elementwise dropout
            does so only in distribution.

    Example:
        >>> from nfn_graph import Dropout, NetworkSpec
        >>> from nfn_graph.testing import random_graph
        >>> spec = NetworkSpec.chain(2, input_size=2, output_size=1)
        >>> graph = random_graph(spec, {"hidden1": 4})
        >>> layer = Dropout(0.5).eval()
        >>> features = graph.features()
        >>> layer(features).neurons["hidden1"].equal(features.neurons["hidden1"])
        True
    """

    def __init__(self, p: float = 0.5, per_channel: bool = False) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise UserError(f"Expected a probability in [0, 1) (got {p})")
        self.p = p
        self.per_channel = per_channel

    def forward(self, features: WeightFeatures) -> WeightFeatures:
        """Applies dropout."""
        if not self.training or self.p == 0:
            return features
        if not self.per_channel:
            return features.map(lambda x: nn.functional.dropout(x, self.p))

        def drop(key: Key, x: Tensor) -> Tensor:
            keep = x.new_ones(features.num_graphs, *x.shape[1:])
            keep = nn.functional.dropout(keep, self.p)
            return x * keep.index_select(0, features.graph_of(key))

        return features.replace({key: drop(key, x) for key, x in features.tensors()})

    def extra_repr(self) -> str:
        """Shown by `print(layer)`."""
        return f"p={self.p}{', per channel' if self.per_channel else ''}"


class Residual(nn.Module):
    """Adds a layer's input to its output, which must have the same number of channels.

    Args:
        layer: The layer, or several layers in an `nn.Sequential`.

    Example:
        >>> from nfn_graph import Activation, NetworkSpec, Residual
        >>> from nfn_graph.testing import random_graph
        >>> spec = NetworkSpec.chain(2, input_size=2, output_size=1)
        >>> graph = random_graph(spec, {"hidden1": 4})
        >>> layer = Residual(Activation("identity"))
        >>> features = graph.features()
        >>> layer(features).neurons["hidden1"].equal(2 * features.neurons["hidden1"])
        True
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, features: WeightFeatures) -> WeightFeatures:
        """Applies the layer."""
        new: WeightFeatures = self.layer(features)
        if new.channels != features.channels:
            raise UserError(
                f"Expected a layer that keeps the {features.channels} channels of its input "
                f"(got {new.channels})"
            )
        return features + new


def _named(name: str) -> nn.Module:
    """The activation with a name, regardless of case, hyphens and underscores."""
    known = {normalize_string(n): n for n in _ACTIVATIONS} | {"swish": "SiLU"}
    if normalize_string(name) not in known:
        raise UserError(f"Expected an activation of {_ACTIVATIONS} (got {name!r})")
    module: nn.Module = getattr(nn, known[normalize_string(name)])()
    return module
