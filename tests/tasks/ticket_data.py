"""Small zoos of winning tickets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zoo_data import tiny_images

from nfn_graph.tasks.zoo import TicketZooOptions, build_zoo

IMAGES = tiny_images()
COLOURS = tiny_images(size=16, channels=3)


def small(out: Path, **options: Any) -> TicketZooOptions:
    """Options of a zoo that takes a second."""
    values = {"networks": 30, "sparsity": 0.8, "epochs": 4, "batch_size": 16, "shard_size": 20}
    values |= {"validation_share": 0.2, "test_share": 0.2, "learning_rate": 1e-2}
    return TicketZooOptions(out, **{**values, **options})  # type: ignore[arg-type]


def build_mlps(out: Path) -> Path:
    """MLPs of two widths."""
    return build_zoo(small(out, widths=(5, 7)), source=IMAGES)


def build_cnns(out: Path) -> Path:
    """CNNs whose dense layer reads four positions."""
    options = small(out, arch="cnn", widths=(3,), networks=12)
    return build_zoo(options, source=COLOURS)
