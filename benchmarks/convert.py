"""How much time conversion adds to loading a file, and how much memory it takes.

For small INRs, small CNNs and a ResNet of 11 million parameters, in the formats of torch and of
safetensors: networks and MB per second of `nfn_graph.converters.load`, and its time relative to
`torch.load` or `safetensors.torch.load_file` of the same files. Both run in turns; medians of
processor time, which other programs on the machine disturb less than the clock.

Large files are mapped into memory by both loads, which then have read nothing but names and shapes.
So there are two rows: `mapped` for the load alone, and `read` for the load and one use of every
weight, after which all bytes of the file were read. The second is the fair one for large files.
Memory is measured on Linux.

    python benchmarks/convert.py [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from harness.memory import forget_peak, resident
from torch import Tensor, nn

from nfn_graph import WeightGraph
from nfn_graph.converters.files.checks import MAP_FROM
from nfn_graph.converters.io import load


def make_inr() -> nn.Module:
    """An MLP of the size of a SIREN."""
    return nn.Sequential(
        nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )


def make_cnn() -> nn.Module:
    """The size of the networks in the CNN zoos."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


class Block(nn.Module):
    """Two convolutions and a connection around them."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.around = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(y + self.around(x))


def make_resnet() -> nn.Module:
    """ResNet-18: 11.7 million parameters."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = 64
    for size, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(channels, size, stride), Block(size, size, 1)]
        channels = size
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


CASES: dict[str, tuple[Callable[[], nn.Module], int, bool]] = {
    "INR 2-32-32-1": (make_inr, 200, False),
    "small CNN": (make_cnn, 100, False),
    "ResNet-18": (make_resnet, 1, True),
}


def bare_load(path: Path) -> Any:
    """Loads a file as a user without graphs would; large files of torch are mapped, as ours are."""
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    large = path.stat().st_size >= MAP_FROM
    return torch.load(path, map_location="cpu", weights_only=True, mmap=large)


def write_files(folder: Path, make: Callable[[], nn.Module], count: int, suffix: str) -> list[Path]:
    """Different networks of one architecture."""
    paths = []
    for i in range(count):
        path = folder / f"{i}{suffix}"
        tensors = make().state_dict()
        if suffix == ".safetensors":
            safetensors.torch.save_file(tensors, path)
        else:
            torch.save(tensors, path)
        paths.append(path)
    return paths


def read_all(loaded: Any) -> None:
    """Uses every weight once, because a mapped file is only read then."""
    if isinstance(loaded, WeightGraph):
        loaded = {i: store.edge_attr for i, store in enumerate(loaded.edge_stores)}
    for tensor in loaded.values():
        tensor.sum()


def measure(paths: list[Path], arch: nn.Module | None, rounds: int) -> dict[str, Any]:
    """Returns the median processor time per file of loading alone and of ours, measured in turn."""
    times: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds + 1):
        for name, function in (
            ("bare", bare_load),
            ("ours", lambda path: load(path, arch=arch)),
        ):
            start = time.process_time()
            loaded = [function(path) for path in paths]
            middle = time.process_time()
            for item in loaded:
                read_all(item)
            end = time.process_time()
            if turn:  # the first round fills the caches
                times.setdefault((name, "mapped"), []).append((middle - start) / len(paths))
                times.setdefault((name, "read"), []).append((end - start) / len(paths))
    size = sum(path.stat().st_size for path in paths) / len(paths)
    found = {}
    for row in ("mapped", "read"):
        bare, ours = (statistics.median(times[name, row]) for name in ("bare", "ours"))
        found[row] = {
            "bare_seconds": bare,
            "seconds": ours,
            "ratio": ours / bare,
            "networks_per_second": 1 / ours,
            "megabytes_per_second": size / 1e6 / ours,
        }
    return found


def memory(path: Path) -> float:
    """Returns the memory of a graph of the ResNet, with every entry read, relative to the file."""
    result = subprocess.run(
        [sys.executable, __file__, "--memory-of", str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(result.stdout) / path.stat().st_size


def report_memory(path: Path) -> None:
    """Returns the bytes by which the peak grows while a file is loaded and read."""
    with torch.device("meta"):
        arch = make_resnet()
    load(path, arch=arch)  # Imports and caches of the first call do not belong to the graph.
    gc.collect()
    forget_peak()
    before = resident("VmHWM")
    graph = load(path, arch=arch)
    for store in graph.edge_stores:
        store.edge_attr.sum()
    print(max(resident("VmHWM") - before, 0) * 2**20)


def main() -> None:
    """Prints a table, and writes it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few files and rounds")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--memory-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of is not None:
        report_memory(arguments.memory_of)
        return
    torch.set_num_threads(1)
    rounds = 3 if arguments.quick else 15
    results: dict[str, dict[str, Any]] = {}
    print(
        f"{'case':28}{'row':8}{'networks/s':>12}{'MB/s':>10}{'bare ms':>10}{'ours ms':>10}"
        f"{'ratio':>8}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, (make, count, needs_arch) in CASES.items():
            with torch.device("meta"):
                arch = make() if needs_arch else None
            for suffix in (".pt", ".safetensors"):
                count = min(count, 20) if arguments.quick else count
                paths = write_files(Path(folder), make, count, suffix)
                found = measure(paths, arch, rounds)
                results[f"{name} {suffix}"] = found
                for row, numbers in found.items():
                    print(
                        f"{name + ' ' + suffix:28}{row:8}{numbers['networks_per_second']:12.0f}"
                        f"{numbers['megabytes_per_second']:10.1f}"
                        f"{1000 * numbers['bare_seconds']:10.3f}"
                        f"{1000 * numbers['seconds']:10.3f}{numbers['ratio']:8.2f}"
                    )
                if needs_arch and Path("/proc/self/clear_refs").exists():
                    found["memory"] = memory(paths[0])
                    print(f"{'':36}memory {found['memory']:.2f} x the file")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
