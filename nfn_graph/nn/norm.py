"""Normalisations. Both act per type and never per position, so they preserve the symmetry."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nfn_graph.data import WeightGraph
from nfn_graph.features import WeightFeatures
from nfn_graph.messages import UserError
from nfn_graph.nn._layer_checks import check_features
from nfn_graph.spec import FoldedSpec, Key, NetworkSpec, module_name
from nfn_graph.spec._checks import check_count


class ChannelNorm(nn.Module):
    r"""Normalises the channels of every entry, with a learned scale and shift per type.

    .. math::
        y = \gamma_t \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + \epsilon}} + \beta_t

    With one channel the variance is 0 and the output is the shift.

    Args:
        spec: The spec of the features, folded or not.
        channels: The number of channels of input and output.
        eps: A small number added to the variance.

    Example:
        >>> import torch
        >>> from nfn_graph import ChannelNorm, NetworkSpec
        >>> from nfn_graph.testing import random_graph
        >>> spec = NetworkSpec.chain(2, input_size=2, output_size=1)
        >>> graph = random_graph(spec, {"hidden1": 4}, channels=8).to(torch.float32)
        >>> x = ChannelNorm(spec, 8)(graph.features()).neurons["hidden1"]
        >>> bool(x.mean(-1).abs().max() < 1e-5)
        True
    """

    def __init__(self, spec: NetworkSpec | FoldedSpec, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.spec = spec
        self.channels = check_count(channels, 1, "channels")
        self.eps = eps
        taps = {module_name(key): count for key, count in spec.taps.items() if count}
        self.scale = nn.ParameterDict({k: torch.ones(n, channels) for k, n in taps.items()})
        self.shift = nn.ParameterDict({k: torch.zeros(n, channels) for k, n in taps.items()})

    def forward(self, features: WeightFeatures) -> WeightFeatures:
        """Normalises every entry separately."""
        check_features(features, self.spec, self.channels)
        return features.map_types(self._normalize)

    def extra_repr(self) -> str:
        """Shown by `print(layer)`."""
        return f"{self.channels}, eps={self.eps}"

    def _normalize(self, key: Key, x: Tensor) -> Tensor:
        y = nn.functional.layer_norm(x, (self.channels,), eps=self.eps)
        return y * self.scale[module_name(key)] + self.shift[module_name(key)]


class Standardize(nn.Module):
    """Subtracts the mean and divides by the standard deviation of a set of networks.

    The statistics are per type, tap and channel, over all neurons and networks, so the layer
    commutes with permutations. They are buffers, which are saved with the model and not trained.
    Before :meth:`fit`, the layer changes nothing and issues a warning.

    Args:
        spec: The networks' own spec.
        channels: The number of channels of input and output.

    Example:
        >>> import torch
        >>> from nfn_graph import NetworkSpec, Standardize
        >>> from nfn_graph.testing import random_graph
        >>> spec = NetworkSpec.chain(2, input_size=2, output_size=1)
        >>> graph = random_graph(spec, {"hidden1": 4}).to(torch.float32)
        >>> layer = Standardize(spec, 1).fit(graph)
        >>> x = layer(graph.features()).weights["input", "weight", "hidden1"]
        >>> round(x.std(unbiased=False).item(), 4)
        1.0
    """

    def __init__(self, spec: NetworkSpec, channels: int) -> None:
        super().__init__()
        self.spec = spec
        self.channels = check_count(channels, 1, "channels")
        self.is_fitted = False
        self._has_warned = False
        self.mean, self.std = nn.Module(), nn.Module()
        for key, taps in spec.taps.items():
            if taps:
                self.mean.register_buffer(module_name(key), torch.zeros(taps, channels))
                self.std.register_buffer(module_name(key), torch.ones(taps, channels))

    @torch.no_grad()
    def fit(self, graphs: WeightGraph | Iterable[WeightGraph]) -> Standardize:
        """Sets the statistics from graphs or batches, in one pass.

        A tap that does not vary, or has only one value, is centred but not scaled.
        """
        if isinstance(graphs, WeightGraph):
            graphs = [graphs]
        found = mean_and_std(self._samples(graphs))
        for name, (mean, std) in found.items():
            getattr(self.mean, name).copy_(mean)
            getattr(self.std, name).copy_(std)
        self.is_fitted = True
        return self

    def forward(self, features: WeightFeatures) -> WeightFeatures:
        """Standardizes every entry."""
        check_features(features, self.spec, self.channels)
        if not (self.is_fitted or self._has_warned or torch.compiler.is_compiling()):
            self._has_warned = True
            warnings.warn(
                "Standardize was not fitted, so it changes nothing. Call fit(graphs) first, or for "
                "a whole model, model.standardize.fit(graphs).",
                stacklevel=2,
            )
        return features.map_types(self._standardize)

    def inverse(self, features: WeightFeatures) -> WeightFeatures:
        """Undoes :meth:`forward`."""
        check_features(features, self.spec, self.channels)
        return features.map_types(self._restore)

    def extra_repr(self) -> str:
        """Shown by `print(layer)`."""
        return f"{self.channels}{'' if self.is_fitted else ', not fitted'}"

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        # The statistics show whether a saved layer was fitted.
        fitted = [
            bool((x != (1 if key.startswith(f"{prefix}std.") else 0)).any())
            for key, x in state.items()
            if key.startswith((f"{prefix}mean.", f"{prefix}std."))
        ]
        if fitted:
            self.is_fitted = any(fitted)
        super()._load_from_state_dict(state, prefix, *args)

    def _samples(self, graphs: Iterable[WeightGraph]) -> Iterator[tuple[str, Tensor]]:
        for graph in graphs:
            features = graph.features(spec=self.spec)
            check_features(features, self.spec, self.channels)
            yield from ((module_name(key), x) for key, x in features.tensors())

    def _standardize(self, key: Key, x: Tensor) -> Tensor:
        name = module_name(key)
        return (x - getattr(self.mean, name)) / getattr(self.std, name)

    def _restore(self, key: Key, x: Tensor) -> Tensor:
        name = module_name(key)
        return x * getattr(self.std, name) + getattr(self.mean, name)


def mean_and_std(samples: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
    """The mean and standard deviation of the rows of all samples with the same name.

    Values that do not vary get a standard deviation of 1, so that they are not scaled.
    """
    found: dict[str, tuple[int, Tensor, Tensor]] = {}
    for name, x in samples:
        if not x.numel():
            continue
        x = x.double()
        here, n = x.mean(0), x.shape[0]
        # Chan's update of the mean and the squared deviations by another sample.
        zeros = torch.zeros_like(here)
        before, mean, squares = found.get(name, (0, zeros, zeros))
        delta, count = here - mean, before + n
        squares = squares + (x - here).square().sum(0) + delta.square() * before * n / count
        found[name] = count, mean + delta * n / count, squares
    if not found:
        raise UserError("Expected at least one graph to fit the statistics (got none)")
    results = {}
    for name, (count, mean, squares) in found.items():
        std = (squares / count).sqrt()
        results[name] = mean, torch.where(std > 1e-6 * mean.abs(), std, 1.0)
    return results
