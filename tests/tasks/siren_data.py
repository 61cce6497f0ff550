"""Small SIRENs, and images to fit them to."""

from __future__ import annotations

import torch

from nfn_graph import WeightGraph
from nfn_graph.converters import from_state_dict
from nfn_graph.tasks.sources import Images
from nfn_graph.tasks.zoo.siren import SirenShape, initialise_siren


def sirens(*hidden: tuple[int, ...], outputs: int = 1, seed: int = 0) -> list[WeightGraph]:
    """Fresh SIRENs of some widths in double precision."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [SirenShape(2, widths, outputs) for widths in hidden]
    states = [initialise_siren(shape, 30.0, generator) for shape in shapes]
    return [from_state_dict({k: x.double() for k, x in state.items()}) for state in states]


def blobs(count: int, size: int = 8) -> Images:
    """White rectangles of two classes, flat and upright, on black."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.arange(count) % 2
    pixels = torch.zeros(count, 1, size, size)
    for image, label in zip(pixels, labels.tolist(), strict=True):
        top, left = torch.randint(1, size - 4, (2,), generator=generator).tolist()
        height, width = ((2, 3), (3, 2))[label]
        image[0, top : top + height, left : left + width] = 1
    return Images.joined("blobs", (pixels, labels), None)
