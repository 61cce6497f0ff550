"""The networks and channels that are measured, as graphs and as tensors of `nfn`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from nfn.common import WeightSpaceFeatures, network_spec_from_wsfeat
from torch import Tensor

from nfn_graph import Batch, WeightFeatures, WeightGraph


@dataclass(frozen=True)
class Case:
    """A batch of equal networks.

    Args:
        sizes: The number of neurons of every layer.
        batch: The number of networks.
        channels: The numbers of input and output channels of the layer.
        kernels: The kernel size of every weight tensor.
        hnp: Whether the HNP layers fit into memory.
    """

    sizes: tuple[int, ...]
    batch: int
    channels: int
    kernels: tuple[tuple[int, ...], ...] = ()
    hnp: bool = True


CNN = ((3, 3), (3, 3), (3, 3), ())
CASES = {
    "inr512": Case((2, 32, 32, 1), 32, 512),
    "inr64": Case((2, 32, 32, 1), 32, 64),
    "mlp784": Case((784, 128, 128, 10), 4, 64, hnp=False),
    "cnnzoo8": Case((1, 16, 16, 16, 10), 8, 16, CNN),
    "cnnzoo64": Case((1, 16, 16, 16, 10), 64, 16, CNN),
    "small16": Case((10, 16, 16, 10), 64, 16),
}


def random_tensors(
    sizes: Sequence[int], kernels: Sequence[tuple[int, ...]] = ()
) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and biases of one network, with normal random values."""
    kernels = kernels or [()] * (len(sizes) - 1)
    pairs = zip(sizes[1:], sizes[:-1], kernels, strict=True)
    weights = [torch.randn(out, in_, *kernel) for out, in_, kernel in pairs]
    return weights, [torch.randn(n) for n in sizes[1:]]


def graph_features(case: Case, symmetry: str, device: torch.device) -> WeightFeatures:
    """Creates random features of the case for our layers, with gradients."""
    graph = WeightGraph.from_tensors(*random_tensors(case.sizes, case.kernels))
    batch = Batch.from_data_list([graph] * case.batch).to(device)
    return filled(batch.features(symmetry), case.channels)  # type: ignore[arg-type]


def filled(features: WeightFeatures, channels: int) -> WeightFeatures:
    """Creates random features of the given networks, with gradients."""

    def fill(x: Tensor) -> Tensor:
        return torch.randn(*x.shape[:2], channels, device=x.device, requires_grad=True)

    return features.map(fill)


def nfn_features(case: Case, device: torch.device) -> tuple[Any, Any]:
    """Creates random features of the case and the spec for the layers of `nfn`."""
    weights, biases = random_tensors(case.sizes, case.kernels)

    def fill(x: Tensor) -> Tensor:
        shape = (case.batch, case.channels, *x.shape)
        return torch.randn(shape, device=device, requires_grad=True)

    features = WeightSpaceFeatures([fill(w) for w in weights], [fill(b) for b in biases])
    return features, network_spec_from_wsfeat(features)
