"""Points in space with their unsigned distance to a shape: what 3D INRs are fitted to."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nfn_graph.messages import UserError

# Where the points lie: shares of the near, middle and far ones, and their noise. The rest is
# uniform over the cube.
_NEAR = ((0.5, 0.02), (0.25, 0.1))


class DistanceSamples(NamedTuple):
    """Points `[shapes, points, 3]` within [-1, 1] and their distances `[shapes, points, 1]`."""

    points: Tensor
    distances: Tensor


def sample_distances(clouds: Tensor, num_points: int, seeds: list[int]) -> DistanceSamples:
    """Draws points around shapes, half of them close to the surface.

    Args:
        clouds: Points of the shapes, `[shapes, points, 3]`.
        num_points: How many to draw for each.
        seeds: One for each shape, so that its points do not depend on the others.
    """
    if len(seeds) != len(clouds):
        raise UserError(f"Expected a seed for each of {len(clouds)} shapes (got {len(seeds)})")
    points, distances = [], []
    for cloud, seed in zip(clouds, seeds, strict=True):
        generator = torch.Generator().manual_seed(seed)
        drawn = _draw(cloud, num_points, generator)
        points.append(drawn)
        distances.append(torch.cdist(drawn, cloud).amin(1, keepdim=True))
    return DistanceSamples(torch.stack(points), torch.stack(distances))


def _draw(cloud: Tensor, num_points: int, generator: torch.Generator) -> Tensor:
    parts = []
    for share, noise in _NEAR:
        count = int(num_points * share)
        chosen = cloud[torch.randint(len(cloud), (count,), generator=generator)]
        parts.append(chosen + noise * torch.randn(count, 3, generator=generator))
    rest = num_points - sum(len(p) for p in parts)
    parts.append(torch.rand(rest, 3, generator=generator) * 2 - 1)
    return torch.cat(parts).clamp(-1, 1).to(cloud.dtype)
