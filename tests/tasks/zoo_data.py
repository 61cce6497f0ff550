"""Small data for zoos."""

from __future__ import annotations

import gzip
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from nfn_graph.converters import WeightDataset
from nfn_graph.tasks.sources import Images
from nfn_graph.tasks.zoo import CnnZooOptions


def tiny_images(count: int = 60, size: int = 8, channels: int = 1, classes: int = 3) -> Images:
    """Noisy images whose class is their brightness; every fifth is a test image."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(count) % classes
    noise = torch.rand(count, channels, size, size, generator=generator)
    pixels = 0.5 * noise + 0.5 * (labels / (classes - 1)).view(-1, 1, 1, 1)
    return Images.joined("tiny", (pixels, labels), None)


IMAGES = tiny_images()


def small(out: Path, **options: object) -> CnnZooOptions:
    """Options of a zoo that is built quickly."""
    chosen = CnnZooOptions(
        out, networks=10, widths=(3, 5), depths=(1, 2), epochs=(1, 3), batch_size=16, shard_size=4
    )
    return replace(chosen, **options)  # type: ignore[arg-type]


def same_networks(first: WeightDataset, second: WeightDataset) -> bool:
    """Whether two zoos hold the same networks to the last bit, wherever these are stored."""
    drop = ("shard", "row")
    rows = [
        [{k: v for k, v in r.items() if k not in drop} for r in z.rows] for z in (first, second)
    ]
    if rows[0] != rows[1]:
        return False
    return all(
        first.state_dict(i).keys() == second.state_dict(i).keys()
        and all(torch.equal(v, second.state_dict(i)[k]) for k, v in first.state_dict(i).items())
        for i in range(len(first))
    )


RANDOM = np.random.default_rng(0)


def idx_bytes(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(np.uint8).tobytes()


def write_idx(folder: Path, *, compressed: bool) -> tuple[np.ndarray, np.ndarray]:
    pixels = RANDOM.integers(0, 256, (9, 5, 4), dtype=np.uint8)
    labels = np.arange(9, dtype=np.uint8) % 3
    parts = {"train": slice(0, 6), "t10k": slice(6, 9)}
    for name, part in parts.items():
        for kind, array in (("images-idx3", pixels[part]), ("labels-idx1", labels[part])):
            data = idx_bytes(array)
            path = folder / f"{name}-{kind}-ubyte"
            if compressed:
                path.with_name(path.name + ".gz").write_bytes(gzip.compress(data))
            else:
                path.write_bytes(data)
    return pixels, labels
