"""Additional small layers for models of the published package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from nfn_graph.features import WeightFeatures
from nfn_graph.messages import UserError
from nfn_graph.nn import Dropout, Pool
from nfn_graph.spec import module_name


class ReorderedPool(nn.Module):
    """Our pooling with the published shape `[graphs, channels, entries]` and order of entries.

    That order is layer by layer, weight then bias: `index` gives the places in our order.
    """

    index: Tensor

    def __init__(self, pool: Pool, index: Sequence[int]) -> None:
        super().__init__()
        self.pool = pool
        self.register_buffer("index", torch.tensor(index), persistent=False)

    def forward(self, features: WeightFeatures) -> Tensor:
        """Pools every network of the batch."""
        entries: Tensor = self.pool(features)
        return entries.index_select(1, self.index).transpose(1, 2)


class _PerType(nn.Module):
    """A layer with parameters for every type, and for no others."""

    scale: nn.ParameterDict

    def forward(self, features: WeightFeatures) -> WeightFeatures:
        """Maps every tensor with the parameters of its type."""
        types = {module_name(key) for key, x in features.tensors() if x.shape[1]}
        if types != set(self.scale.keys()):
            raise UserError(
                f"Expected features of the types {sorted(self.scale)} (got {sorted(types)})"
            )
        return features.map_types(lambda key, x: self._map(module_name(key), x))

    def _map(self, name: str, x: Tensor) -> Tensor:
        raise NotImplementedError


class JointNorm(_PerType):
    r"""The published `SimpleLayerNorm`: the taps and channels of an entry normalised together.

    .. math::
        y = \gamma_t \frac{x - \mathrm{mean}(x)}{\mathrm{std}(x) + \epsilon} + \beta_t

    It uses the unbiased standard deviation, which is NaN for a single tap with one channel. New
    models should use :class:`nfn_graph.ChannelNorm`.

    Args:
        scale: :math:`\gamma` per type, `[taps, channels]`.
        shift: :math:`\beta` per type, `[taps, channels]`.
        eps: A small number added to the standard deviation.
    """

    def __init__(
        self, scale: Mapping[str, Tensor], shift: Mapping[str, Tensor], eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.scale = nn.ParameterDict(scale)
        self.shift = nn.ParameterDict(shift)
        self.eps = eps

    def _map(self, name: str, x: Tensor) -> Tensor:
        std, mean = torch.std_mean(x, (1, 2), keepdim=True)
        return (x - mean) / (std + self.eps) * self.scale[name] + self.shift[name]


class TypeScale(_PerType):
    """The published `LearnedScale`: one learned factor per weight and bias tensor."""

    def __init__(self, scale: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.scale = nn.ParameterDict(scale)

    def _map(self, name: str, x: Tensor) -> Tensor:
        return x * self.scale[name]


class MatrixDropout(nn.Module):
    """The published `ChannelDropout`, which zeroes whole channels of the weights and single biases.

    Both are zeroed with probability `p`.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.weights = Dropout(p, per_channel=True)
        self.neurons = Dropout(p)

    def forward(self, features: WeightFeatures) -> WeightFeatures:
        """Applies dropout; does nothing in `eval`."""
        weights, neurons = self.weights(features), self.neurons(features)
        return features.replace({**weights.weights, **neurons.neurons})
