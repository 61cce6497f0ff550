"""Everything that the package reads from disk: a good example of every kind, and its reader."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import checkpoints
import numpy as np
import stores
import torch
from file_writers import WRITERS
from imitations_cnn import model_zoo, small_cnn_zoo, wild_park
from imitations_inr import dws_fashion, dws_mnist, inr2vec, nfn_inrs
from PIL import Image
from zoo_data import write_idx

from nfn_graph.converters import ConversionError, WeightDataset, load, open_zoo, save
from nfn_graph.converters.files.graph import write_graph
from nfn_graph.converters.store import Store, find_damage
from nfn_graph.converters.store.export import export_networks
from nfn_graph.converters.summary import summary
from nfn_graph.tasks.edit_inr import EditInr, EditInrOptions
from nfn_graph.tasks.reports.compare import compare
from nfn_graph.tasks.sources import open_images
from nfn_graph.tasks.sources.clouds import open_clouds
from nfn_graph.tasks.training.data import load_data
from nfn_graph.tasks.training.run import load_model
from nfn_graph.tasks.winning_tickets import WinningTickets, WinningTicketsOptions
from nfn_graph.tasks.zoo import open_zoo_folder


class Kind(NamedTuple):
    """A kind of input.

    Attributes:
        build: Function that writes a good example, a file or a folder, to a path.
        read: Function that reads all of it.
        is_sealed: Whether it has checksums, which somebody who damages it may compute again.
    """

    build: Callable[[Path], Any]
    read: Callable[[Path], Any]
    is_sealed: bool = False


def corpus(world: Path) -> Mapping[str, Kind]:
    """Every kind, by name.

    Args:
        world: See :mod:`world`; zoos and runs are copied from it.
    """
    checkpoint_kinds = {name: Kind(write, _read_network) for name, write in WRITERS.items()}
    zoos = {
        "small cnn": partial(small_cnn_zoo, steps=[86, 0]),
        "dws mnist": dws_mnist,
        "dws fashion": dws_fashion,
        "nfn": partial(nfn_inrs, outputs=1),
        "wild park": wild_park,
        "model zoo": partial(model_zoo, trials=2),
        "inr2vec": inr2vec,
    }
    return {
        **checkpoint_kinds,
        "graph": Kind(_write_graph, _read_network),
        "template.onnx": Kind(WRITERS["onnx"], partial(_write_into, suffix=".onnx")),
        "template.h5": Kind(WRITERS["h5"], partial(_write_into, suffix=".h5")),
        "template.keras": Kind(WRITERS["keras"], partial(_write_into, suffix=".keras")),
        "keras, inside": Kind(_write_unpacked, _read_packed),
        "store": Kind(_write_store, _read_store),
        "store, resealed": Kind(_write_store, _read_resealed_store, is_sealed=True),
        **{f"zoo, {name}": Kind(build, _read_zoo) for name, build in zoos.items()},
        "zoo, ours": Kind(partial(_copy, world / "tickets"), _read_own_zoo),
        "zoo, resealed tickets": Kind(
            partial(_copy, world / "tickets"),
            partial(_read_for, WinningTickets, WinningTicketsOptions),
            is_sealed=True,
        ),
        "zoo, resealed INRs": Kind(
            partial(_copy, world / "inr"),
            partial(_read_for, EditInr, EditInrOptions),
            is_sealed=True,
        ),
        "run, edits": Kind(partial(_copy, world / "edits"), _read_run),
        "run, masks": Kind(partial(_copy, world / "masks"), _read_run),
        "images, idx": Kind(partial(_write_idx, compressed=False), open_images),
        "images, idx.gz": Kind(partial(_write_idx, compressed=True), open_images),
        "images, cifar": Kind(_write_cifar, open_images),
        "images, npz": Kind(_write_images, open_images),
        "images, pictures": Kind(_write_pictures, open_images),
        "clouds, npz": Kind(_write_clouds, open_clouds),
        "clouds, off": Kind(_write_off, partial(open_clouds, num_points=8)),
        "clouds, ply": Kind(_write_ply, partial(open_clouds, num_points=8)),
    }


def _copy(source: Path, path: Path) -> None:
    shutil.copytree(source, path)


def _read_network(path: Path) -> object:
    return summary(load(path)).rows


def _write_graph(path: Path) -> None:
    torch.save(checkpoints.mlp().state_dict(), path)
    write_graph(path, load(path))


def _write_into(path: Path, suffix: str) -> None:
    """Writes a network into a copy of a file, which may be damaged by then."""
    good = path.with_name(f"good{suffix}")
    if not good.exists():
        WRITERS[suffix[1:]](good)
    save(load(good), path.with_name(f"out{suffix}"), template=path)


def _write_unpacked(path: Path) -> None:
    """Returns the files in a `.keras` archive, to damage them one by one."""
    WRITERS["keras"](path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    path.unlink()
    path.mkdir()
    for name, data in parts.items():
        (path / name).write_bytes(data)


def _read_packed(path: Path) -> object:
    """Writes an archive with correct checksums, whatever its contents are."""
    packed = path.with_name("packed.keras")
    with zipfile.ZipFile(packed, "w") as archive:
        for file in sorted(p for p in path.rglob("*") if p.is_file()):
            archive.write(file, file.relative_to(path))
    return _read_network(packed)


def _write_store(path: Path) -> None:
    graphs = stores.graphs()
    names = ("mlp", "signalling", "buffers", "labels", "transformed", "two types")
    stores.write_store(path, [graphs[name] for name in names], shard_size=3)


def _read_store(path: Path) -> object:
    store, dataset = Store(path), WeightDataset(path)
    return [store.graph(i) for i in range(len(store))], list(find_damage(path)), dataset[0]


def _read_resealed_store(path: Path) -> object:
    """Verifies a store and exports its networks; both must report the same."""
    damage = list(find_damage(path))
    if damage:
        raise ConversionError(f"Expected a store without damage (got {damage[0].got})")
    out = path.with_name("exported")
    try:
        _read_store(path)
        export_networks(WeightDataset(path), out, "graph", overwrite=True)
    except ValueError as error:
        raise AssertionError(f"Verified, but not exported: {error}") from error
    finally:
        shutil.rmtree(out, ignore_errors=True)
    return None


def _read_for(task: type[Any], options: type[Any], path: Path) -> object:
    """Reads the networks of a zoo as a run does."""
    return load_data(task(options(path, path.with_name("run"), preset="tiny")))


def _read_zoo(path: Path) -> object:
    zoo = open_zoo(path)
    return [(zoo.row(i), zoo[i]) for i in range(min(len(zoo), 3))], zoo.splits


def _read_own_zoo(path: Path) -> object:
    zoo = open_zoo_folder(path)
    return zoo.rows, zoo[0], zoo.state_dict(0), zoo.where(split="test").rows


def _read_run(path: Path) -> object:
    return load_model(path), compare([path], None)


def _write_idx(path: Path, compressed: bool) -> None:
    path.mkdir()
    write_idx(path, compressed=compressed)


def _write_cifar(path: Path) -> None:
    path.mkdir()
    for name in ("data_batch_1.bin", "test_batch.bin"):
        (path / name).write_bytes(bytes([1, *bytes(3072)]) * 2)


def _write_images(path: Path) -> None:
    pixels = np.zeros((10, 4, 4), np.uint8)
    np.savez(_named(path, ".npz"), images=pixels, labels=np.arange(10) % 3)


def _write_pictures(path: Path) -> None:
    for name in ("cats", "dogs"):
        (path / name).mkdir(parents=True)
        for i in range(3):
            Image.new("L", (5, 5), i).save(path / name / f"{i}.png")
            Image.new("RGB", (5, 5)).save(path / name / f"{i}.jpg")


def _write_clouds(path: Path) -> None:
    points = np.random.default_rng(0).random((6, 9, 3), dtype=np.float32)
    np.savez_compressed(_named(path, ".npz"), points=points, labels=np.arange(6) % 2)


_CUBE = "1 0 0\n0 1 0\n0 0 1\n1 1 1\n"


def _write_off(path: Path) -> None:
    for name in ("chair", "desk"):
        (path / name).mkdir(parents=True)
        (path / name / "a.off").write_text(f"OFF\n4 2 0\n{_CUBE}3 0 1 2\n4 0 1 2 3\n")


def _write_ply(path: Path) -> None:
    head = (
        "ply\nformat {}\nelement vertex 4\nproperty float x\nproperty float y\n"
        "property float z\nelement face 2\nproperty list uchar int vertex_indices\nend_header\n"
    )
    (path / "chair").mkdir(parents=True)
    plain = head.format("ascii 1.0") + f"{_CUBE}3 0 1 2\n4 0 1 2 3\n"
    (path / "chair" / "a.ply").write_text(plain)
    points = np.arange(12, dtype="<f4").tobytes()
    faces = b"".join(
        bytes([len(face)]) + np.array(face, "<i4").tobytes() for face in ([0, 1, 2], [0, 1, 2, 3])
    )
    binary = head.format("binary_little_endian 1.0").encode() + points + faces
    (path / "chair" / "b.ply").write_bytes(binary)


def _named(path: Path, suffix: str) -> Path:
    if path.suffix != suffix:
        raise ValueError(f"Expected a path that ends in '{suffix}' (got '{path}')")
    return path


def suffix_of(name: str) -> str:
    """Returns the suffix that paths of a kind must have."""
    return ".npz" if name in ("images, npz", "clouds, npz") else ""
