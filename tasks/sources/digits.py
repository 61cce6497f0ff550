"""The digits that come with scikit-learn: 1,797 images of 8 x 8 pixels, ten classes."""

from __future__ import annotations

import importlib

import torch

from nfn_graph.tasks.sources.images import Images


def read_digits() -> Images:
    """The digits, every fifth of them for the test split; pixels are multiples of 1/16."""
    try:
        # Shipped without annotations.
        load_digits = importlib.import_module("sklearn.datasets").load_digits
    except ImportError as error:
        raise ModuleNotFoundError(
            f"Expected the package 'scikit-learn' for the source 'digits' (got: {error}). "
            f"Install it with: pip install 'nfn-graph[tasks]'"
        ) from error
    found = load_digits()
    pixels = torch.from_numpy(found.images).to(torch.float32)[:, None] / 16
    return Images.joined("digits", (pixels, torch.from_numpy(found.target)), None)
