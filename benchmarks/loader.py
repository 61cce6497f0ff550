"""How fast a store is read, compared with mapped files and `torch.cat`, and a large conversion.

Batches of 32 small INRs, of one width and of several, in random order. `raw` is what one would do
by hand: safetensors files with a stack of every tensor, mapped into memory; of each tensor the rows
of the batch are joined by `torch.cat` (of several widths: each width in files of its own, joined
flat). The result of `raw` are bare tensors, that of `ours` are batches ready for a model. `bytes`
is less than either needs: the store's own records joined to one tensor without shapes. With
workers, both are sent to the process that uses them.

    python benchmarks/loader.py [--quick] [--json FILE]
    python benchmarks/loader.py --large 100000   # files, converted, opened, read once; minutes
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import safetensors.torch
import torch
import torch.utils.data
from harness.cases import random_tensors
from harness.memory import resident
from harness.report import arguments, show
from harness.timing import alternate, ratio
from torch import Tensor

from nfn_graph import DataLoader, WeightGraph
from nfn_graph.converters import WeightDataset
from nfn_graph.converters.files.safetensors import read_file
from nfn_graph.converters.store.reader import Store
from nfn_graph.converters.store.verification import find_damage
from nfn_graph.converters.store.writer import StoreWriter

BATCH = 32
SHARD = 1024
WIDTHS = {"uniform": (32,), "mixed": (16, 24, 32, 40)}


class RawFiles(torch.utils.data.Dataset[Any]):
    """Stacks of tensors in mapped safetensors files: one file per shard and width."""

    def __init__(self, folder: Path, places: Sequence[tuple[str, int]]) -> None:
        self.folder, self.places = folder, places
        self.mapped: dict[str, list[Tensor]] = {}

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        rows = []
        for name, row in (self.places[i] for i in indices):
            if name not in self.mapped:
                tensors = read_file(self.folder / f"{name}.safetensors", map_from=0).tensors
                self.mapped[name] = list(tensors.values())
            rows.append([stack[row] for stack in self.mapped[name]])
        is_uniform = len({self.places[i][0].split("-")[0] for i in indices}) == 1
        join: Callable[[Tensor], Tensor] = (lambda x: x) if is_uniform else Tensor.flatten
        return [torch.cat([join(x) for x in column]) for column in zip(*rows, strict=True)]

    def __len__(self) -> int:
        return len(self.places)


def sizes_of(width: int) -> tuple[int, ...]:
    """An INR of images."""
    return (2, width, width, 1)


def build(folder: Path, widths: Sequence[int], count: int) -> tuple[WeightDataset, RawFiles]:
    """Writes the same networks as a store and as raw files."""
    raw = folder / "raw"
    raw.mkdir(parents=True)
    writer = StoreWriter(folder / "store", {})
    places: list[tuple[str, int]] = []
    for shard in range(0, count, SHARD):
        networks = [
            random_tensors(sizes_of(widths[i % len(widths)]))
            for i in range(shard, min(shard + SHARD, count))
        ]
        graphs = [WeightGraph.from_tensors(*network) for network in networks]
        writer.publish(f"{shard:06d}", [({}, graph) for graph in graphs])
        for i, width in enumerate(widths):
            members = [[*w, *b] for w, b in networks[i :: len(widths)]]
            stacks = {str(k): torch.stack(x) for k, x in enumerate(zip(*members, strict=True))}
            safetensors.torch.save_file(stacks, raw / f"{width}-{shard}.safetensors")
        places += [
            (f"{widths[i % len(widths)]}-{shard}", i // len(widths)) for i in range(len(graphs))
        ]
    return WeightDataset(folder / "store"), RawFiles(raw, places)


def read_bytes(store: Store, indices: Sequence[int]) -> Tensor:
    """Concatenates the records of networks."""
    return torch.cat(store.records(indices)[torch.float32])


def measure(kind: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Returns rows of the table: without workers, and with one and two."""
    count, seconds = (2048, 3.0) if args.quick else (20480, 10.0)
    with tempfile.TemporaryDirectory() as folder:
        dataset, raw = build(Path(folder), WIDTHS[kind], count)
        order = torch.randperm(count).split(BATCH)
        batches = [batch.tolist() for batch in order]
        chosen = batches[:40]
        functions = {
            "ours": lambda: [dataset.__getitems__(b).collate() for b in chosen],
            "raw": lambda: [raw.__getitems__(b) for b in chosen],
            "bytes": lambda: [read_bytes(dataset.store, b) for b in chosen],
        }
        times = alternate(functions, seconds, torch.device("cpu"))
        yield row(kind, 0, times, BATCH * len(chosen), ratio(times, "bytes", "ours"))
        for workers in (1, 2):
            options = {"batch_sampler": batches, "num_workers": workers, "persistent_workers": True}
            loaders = {
                "ours": DataLoader(dataset, **options),
                "raw": torch.utils.data.DataLoader(raw, collate_fn=list, **options),
            }
            epochs = {name: (lambda x=loader: [0 for _ in x]) for name, loader in loaders.items()}
            times = alternate(epochs, seconds, torch.device("cpu"), rounds=3)
            yield row(kind, workers, times, count)


def row(
    kind: str,
    workers: int,
    times: dict[str, list[float]],
    count: int,
    of_bytes: float | None = None,
) -> dict[str, Any]:
    """Returns one row of the table."""
    speeds = {name: 1e3 * count / median(found) for name, found in times.items()}
    return {
        "networks": kind,
        "workers": workers,
        "ours, graphs/s": round(speeds["ours"]),
        "raw, graphs/s": round(speeds["raw"]),
        "ours / raw": ratio(times, "raw", "ours"),
        "ours / bytes": "" if of_bytes is None else f"{of_bytes:.2f}",
    }


def large(count: int, folder: Path) -> None:
    """Converts files into a store, which is then opened and read once."""
    paths, start = folder / "in", time.perf_counter()
    for i in range(count):
        if i % 1000 == 0:
            (paths / f"{i // 1000:03d}").mkdir(parents=True)
        weights, biases = random_tensors(sizes_of(32))
        tensors = {f"{k}.weight": x for k, x in enumerate(weights)}
        tensors |= {f"{k}.bias": x for k, x in enumerate(biases)}
        safetensors.torch.save_file(tensors, paths / f"{i // 1000:03d}" / f"{i}.safetensors")
    print(f"writing {count} files: {time.perf_counter() - start:.1f} s", flush=True)
    start = time.perf_counter()
    command = ["convert", str(paths), "--out", str(folder / "store"), "--workers", "2"]
    code = subprocess.run([sys.executable, "-c", PEAK, *command], check=False).returncode
    print(f"converting them: {time.perf_counter() - start:.1f} s, exit code {code}", flush=True)
    start = time.perf_counter()
    wrong = list(find_damage(folder / "store"))
    print(f"checksums: {time.perf_counter() - start:.1f} s, {len(wrong)} wrong", flush=True)
    subprocess.run([sys.executable, __file__, "--epoch", str(folder / "store")], check=True)


PEAK = """
import resource, sys
from nfn_graph.cli import main
code = main(sys.argv[1:])
kinds = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
of = [resource.getrusage(kind).ru_maxrss / 1e3 for kind in kinds]
print(f"peak memory: {of[0]:.0f} MB, of the largest process that it started {of[1]:.0f} MB")
sys.exit(code)
"""


def epoch(folder: Path) -> None:
    """Measures the time to the first batch, the time of one epoch, and memory on Linux."""
    start = time.perf_counter()
    dataset = WeightDataset(folder)
    opened = time.perf_counter()
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True)
    batches = iter(loader)
    next(batches)
    first = time.perf_counter()
    print(f"opened after {opened - start:.2f} s, first batch after {first - start:.2f} s")
    seen = BATCH
    marks = {len(loader) * k // 4 for k in range(1, 5)}
    print(f"memory after 1 batch: {_memory()}")
    for i, batch in enumerate(batches, 2):
        seen += batch.num_graphs
        if i in marks:
            print(f"memory after {i} batches: {_memory()}")
    spent = time.perf_counter() - first
    print(f"one epoch of {seen} networks: {spent:.1f} s, {seen / spent:.0f} graphs/s")


def _memory() -> str:
    return f"{resident('RssAnon'):.0f} MB, and {resident('RssFile'):.0f} MB of mapped files"


def main() -> None:
    """Prints the table, or the steps of the large conversion."""
    if "--large" in sys.argv or "--epoch" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--large", type=int)
        parser.add_argument("--epoch", type=Path)
        parser.add_argument("--folder", type=Path, help="keep the files there")
        args = parser.parse_args()
        torch.set_num_threads(1)
        print(f"load {os.getloadavg()[0]:.1f}", flush=True)
        if args.epoch is not None:
            epoch(args.epoch)
        elif args.folder is not None:
            large(args.large, args.folder)
        else:
            with tempfile.TemporaryDirectory() as folder:
                large(args.large, Path(folder))
        return
    args = arguments(__doc__)
    rows = [row for kind in WIDTHS for row in measure(kind, args)]
    show(rows, "Reading a store: batches of 32 INRs", args.json)


if __name__ == "__main__":
    main()
