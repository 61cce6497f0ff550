"""Small data for zoos."""

from __future__ import annotations

import torch

from nfn_graph.tasks.sources import Images


def tiny_images(count: int = 60, size: int = 8, channels: int = 1, classes: int = 3) -> Images:
    """Noisy images whose brightness tells their class; every fifth is for testing."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(count) % classes
    noise = torch.rand(count, channels, size, size, generator=generator)
    pixels = 0.5 * noise + 0.5 * (labels / (classes - 1)).view(-1, 1, 1, 1)
    return Images.joined("tiny", (pixels, labels), None)
