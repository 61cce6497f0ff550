r"""A conditional variational autoencoder of masks, given the weights that they mask.

.. math:: \ln p(M \mid U) \ge \mathbb{E}_{Z \sim q(Z \mid U, M)} \ln p(M \mid U, Z)
          - D_{KL}(q(Z \mid U, M) \,\|\, p(Z))

Encoder and decoder are equivariant, :math:`f(\sigma U, \sigma M) = \sigma f(U, M)`, and
:math:`Z` has some normal channels for every weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nfn_graph import (
    NFN,
    EquivariantNFN,
    IOEncoding,
    NetworkSpec,
    NFLinear,
    Standardize,
    WeightFeatures,
    WeightGraph,
)
from nfn_graph.messages import UserError

# Variances of the latent channels stay within exp(-8) and exp(8).
_MOST = 8.0
# The mean absolute value of a standard normal variable.
_MEAN_MAGNITUDE = math.sqrt(2 / math.pi)


class Ticket(NamedTuple):
    """The output of the autoencoder for some networks.

    Attributes:
        scores: The logit of the probability that a weight is kept: one channel, before the fold.
        divergence: The divergence of the posterior from the prior, summed over all networks;
            0 where no mask was read.
    """

    scores: WeightFeatures
    divergence: Tensor


class TicketAutoencoder(nn.Module):
    """Learns which weights of an initialisation to keep.

    In training it reads the mask, through the latent channels; in evaluation mode these are
    at the mean of their prior, 0, and the scores depend on the weights alone. Encoder and decoder
    read every weight with its absolute value, which matters most for a ticket, and with
    channels that are learned for every input and output.

    Args:
        spec: The types of all networks.
        channels: The channels of all NF-Layers of encoder and decoder except the last ones.
        latent: Latent channels per weight.
        positions: Learned channels of every input and output; 0 for none.
        pointwise: Whether the NF-Layers drop all aggregates (NFN_PT).
        **options: Further options of both networks, see :class:`~nfn_graph.NFNOptions`.
    """

    def __init__(
        self,
        spec: NetworkSpec,
        channels: Sequence[int],
        latent: int = 5,
        positions: int = 8,
        pointwise: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        if latent < 1:
            raise UserError(f"Expected at least one latent channel (got {latent})")
        self.latent = latent
        both: dict[str, Any] = {"pointwise": pointwise, **options}
        width = 2 + positions
        self.encoder = NFN(spec, (*channels, 2 * latent), "np", in_channels=width + 1, **both)
        self.decoder = NFN(spec, (*channels, 1), "np", in_channels=width + latent, **both)
        # The posterior begins as the prior, because a large divergence would spoil the first steps.
        for parameter in _last(self.encoder).parameters():
            nn.init.zeros_(parameter)
        self.spec = spec if positions else spec.unsized
        self.positions = IOEncoding(spec, positions, "learned") if positions else None
        self.standardize = Standardize(self.spec, 2)

    def forward(self, graph: WeightGraph) -> Ticket:
        """Scores of a network or batch with the channels weights and, for training, mask."""
        features = graph.features(spec=self.spec)
        if features.channels == 1 and not self.training:
            features = features.map(lambda x: torch.cat([x, torch.zeros_like(x)], -1))
        features = self.standardize(features)
        initial = self._initial(features)
        if self.training:
            both = WeightFeatures.cat([initial, features.map(lambda x: x[..., 1:])])
            code: WeightFeatures = self.encoder(both).unfold()
            divergence = sum((_divergence(x) for _, x in code.tensors()), torch.zeros(()))
            latent = code.map(_draw)
        else:
            divergence = torch.zeros(())
            latent = initial.map(lambda x: x.new_zeros(*x.shape[:2], self.latent))
        scores = self.decoder(WeightFeatures.cat([initial, latent])).unfold()
        return Ticket(scores, divergence)

    def _initial(self, features: WeightFeatures) -> WeightFeatures:
        """The features of the weights that encoder and decoder read."""
        parts = [features.map(lambda x: _with_magnitude(x[..., :1]))]
        if self.positions is not None:
            count = self.positions.in_channels
            parts.append(self.positions(features.map(lambda x: x.new_zeros(*x.shape[:2], count))))
        return WeightFeatures.cat(parts)


def _last(network: EquivariantNFN) -> NFLinear:
    return [layer for layer in network.modules() if isinstance(layer, NFLinear)][-1]


def _with_magnitude(x: Tensor) -> Tensor:
    """Returns standardized weights, and their absolute values minus the normal mean."""
    return torch.cat([x, x.abs() - _MEAN_MAGNITUDE], -1)


def _halves(code: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the logarithm of the variance."""
    mean, variance = code.chunk(2, -1)
    return mean, variance.clamp(-_MOST, _MOST)


def _draw(code: Tensor) -> Tensor:
    mean, variance = _halves(code)
    return mean + torch.exp(variance / 2) * torch.randn_like(mean)


def _divergence(code: Tensor) -> Tensor:
    mean, variance = _halves(code)
    return (mean.square() + variance.exp() - 1 - variance).sum() / 2
