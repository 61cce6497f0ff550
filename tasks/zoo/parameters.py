"""Parameters of networks, and of many networks of one shape along a first axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Parameters = dict[str, Tensor]


def stack(networks: Sequence[Mapping[str, Tensor]]) -> Parameters:
    """The parameters of networks of one shape along a first axis."""
    return {key: torch.stack([n[key] for n in networks]) for key in networks[0]}
