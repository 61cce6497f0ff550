"""Both passes of a layer, and their tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nfn_graph import WeightFeatures


def both_passes(
    function: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor]
) -> Callable[[], object]:
    """Runs forward and backward with random gradients of everything that a function returns."""
    grads = [torch.randn_like(x) for x in function()]
    return lambda: torch.autograd.grad(function(), inputs, grads)


def our_tensors(features: WeightFeatures) -> list[Tensor]:
    """Returns all tensors of our features that are not empty."""
    return [x for _, x in features.tensors() if x.numel()]


def their_tensors(features: Any) -> list[Tensor]:
    """Returns all tensors of the features of `nfn`."""
    return [*features.weights, *features.biases]
