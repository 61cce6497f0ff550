"""Additional small layers for models of the published package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from nfn_graph.features import WeightFeatures
from nfn_graph.messages import UserError
from nfn_graph.nn import Dropout, Pool
from nfn_graph.spec import Key, module_name


class ReorderedPool(nn.Module):
    """Our pooling with the published shape and order: layer by layer, weight then bias.

    Args:
        pool: The invariant layer.
        index: For each entry of the output, its position among the entries of the pool.

    Shapes:
        - input: features of the pool's spec.
        - output: `[graphs, channels, entries]`.
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


class JointNorm(nn.Module):
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

    def forward(self, features: WeightFeatures) -> WeightFeatures:
        """Normalises every entry separately."""
        _check_types(features, self.scale)
        return features.map_types(self._normalize)

    def _normalize(self, key: Key, x: Tensor) -> Tensor:
        mean = x.mean((1, 2), keepdim=True)
        y = (x - mean) / (x.std((1, 2), keepdim=True) + self.eps)
        scaled: Tensor = y * self.scale[module_name(key)] + self.shift[module_name(key)]
        return scaled


class TypeScale(nn.Module):
    """The published `LearnedScale`: one learned factor per weight and bias tensor.

    Args:
        scale: The factor of each type.
    """

    def __init__(self, scale: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.scale = nn.ParameterDict(scale)

    def forward(self, features: WeightFeatures) -> WeightFeatures:
        """Scales every tensor."""
        _check_types(features, self.scale)
        return features.map_types(lambda key, x: x * self.scale[module_name(key)])


class MatrixDropout(nn.Module):
    """The published `ChannelDropout`, which zeroes whole channels of the weights and single biases.

    Args:
        p: The probability of zeroing a value.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.weights = Dropout(p, per_channel=True)
        self.neurons = Dropout(p)

    def forward(self, features: WeightFeatures) -> WeightFeatures:
        """Applies dropout; does nothing in `eval`."""
        weights, neurons = self.weights(features), self.neurons(features)
        return features.replace({**weights.weights, **neurons.neurons})


def _check_types(features: WeightFeatures, known: nn.ParameterDict) -> None:
    types = {module_name(key) for key, x in features.tensors() if x.shape[1]}
    if types != set(known.keys()):
        raise UserError(f"Expected features of the types {sorted(known)} (got {sorted(types)})")
