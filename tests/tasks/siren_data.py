"""Small SIRENs, and images to fit them to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nfn_graph import WeightGraph
from nfn_graph.converters import from_state_dict
from nfn_graph.tasks.sources import Images
from nfn_graph.tasks.zoo.siren import SirenShape, initialise_siren, siren_computation


def sirens(
    *hidden: tuple[int, ...],
    outputs: int = 1,
    seed: int = 0,
    w0: Sequence[float] = (),
    offset: Sequence[float] = (),
) -> list[WeightGraph]:
    """Creates SIRENs of some widths in double precision that can be run.

    Their frequency factors are 30 and their offsets 0 unless others are given.
    """
    generator = torch.Generator().manual_seed(seed)
    graphs = []
    for i, widths in enumerate(hidden):
        state = initialise_siren(SirenShape(2, widths, outputs), 30.0, generator)
        graph = from_state_dict({key: x.double() for key, x in state.items()})
        factor, added = w0[i] if w0 else 30.0, offset[i] if offset else 0.0
        steps = siren_computation(graph.layout, factor, added)
        graph.layout = graph.layout.noting(computation=steps)
        graphs.append(graph)
    return graphs


def blobs(count: int, size: int = 8) -> Images:
    """Creates white rectangles of two classes, wide and tall, on black."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.arange(count) % 2
    pixels = torch.zeros(count, 1, size, size)
    for image, label in zip(pixels, labels.tolist(), strict=True):
        top, left = torch.randint(1, size - 4, (2,), generator=generator).tolist()
        height, width = ((2, 3), (3, 2))[label]
        image[0, top : top + height, left : left + width] = 1
    return Images.joined("blobs", (pixels, labels), None)
