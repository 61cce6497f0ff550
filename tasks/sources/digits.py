"""The digits that come with scikit-learn: 1,797 images of 8 x 8 pixels, ten classes."""

from __future__ import annotations

import torch

from nfn_graph.converters.errors import require
from nfn_graph.tasks.sources.images import Images


def read_digits() -> Images:
    """The digits, every fifth of them for the test split; pixels are multiples of 1/16."""
    found = require("sklearn.datasets", "for the source 'digits'", "tasks").load_digits()
    pixels = torch.from_numpy(found.images).to(torch.float32)[:, None] / 16
    return Images.joined("digits", (pixels, torch.from_numpy(found.target)), None)
