"""Bytes and operations of one NF-Layer, computed by arithmetic and compared with measurements.

The layer maps C to C channels. Operations are those of its matrix products, two for every
multiplication: per edge of a type with k taps k * k * C * C multiplications, per neuron and per
network the same with the taps that they read; backward, twice as many again. S is the size of the
features, 4 * C bytes for every entry of weights and biases. No network is allocated for the
arithmetic. With `--measure`, small batches of the same networks run on one thread: processor time,
which other work on the machine changes little, and the most that the live tensors of a forward and
backward pass, or of a forward pass without gradients, take beside the layer's input and the indices
of its batch, which are counted on their own.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from harness.cases import CNN, Case, filled, graph_features
from harness.memory import peak_bytes
from harness.passes import both_passes, our_tensors
from harness.report import show

from nfn_graph import NFLinear, WeightGraph
from nfn_graph.spec import FoldedSpec

#: Three square layers.
WIDTH_1E9 = 18_257
CASES = {
    "INR 2-32-32-1, 64 channels": Case((2, 32, 32, 1), 1_000_000, 64),
    "INR 2-32-32-1, 512 channels": Case((2, 32, 32, 1), 1_000_000, 512),
    "Small CNN Zoo, 16 channels": Case((1, 16, 16, 16, 10), 1_000_000, 16, CNN),
    "one network of 1e9 weights, 1 channel": Case((WIDTH_1E9,) * 4, 1, 1),
    "one network of 1e9 weights, 16 channels": Case((WIDTH_1E9,) * 4, 1, 16),
}
#: Smaller ones of the same kind, which fit here.
MEASURED = {
    "INR 2-32-32-1, 64 channels": [((2, 32, 32, 1), n) for n in (32, 256, 1024)],
    "INR 2-32-32-1, 512 channels": [((2, 32, 32, 1), n) for n in (8, 32)],
    "Small CNN Zoo, 16 channels": [((1, 16, 16, 16, 10), n) for n in (64, 256, 512)],
    "one network of 1e9 weights, 1 channel": [((w,) * 4, 1) for w in (577, 1826)],
    "one network of 1e9 weights, 16 channels": [((w,) * 4, 1) for w in (183, 577)],
}


@dataclass(frozen=True)
class Cost:
    """The requirements of one layer for one network.

    Attributes:
        entries: The number of weights and biases.
        parameters: The number of parameters of the layer.
        flops: The operations of its products in the forward pass.
    """

    entries: int
    parameters: int
    flops: int

    def feature_bytes(self, channels: int) -> int:
        """The size S of the features of one network, in bytes."""
        return 4 * channels * self.entries


def cost(case: Case) -> Cost:
    """Counts from the types and sizes alone."""
    kernels = case.kernels or ((),) * (len(case.sizes) - 1)
    layers = zip(case.sizes[1:], case.sizes[:-1], kernels, strict=True)
    weights = [torch.empty(out, in_, *kernel, device="meta") for out, in_, kernel in layers]
    biases = [torch.empty(out, device="meta") for out in case.sizes[1:]]
    layout = WeightGraph.from_tensors(weights, biases).layout
    spec = FoldedSpec.of(layout.spec, "np")
    maps = [
        (layout.num_rows(site.key) if site.indices else 1, site.summary_taps * site.read_taps)
        for site in spec.sites
    ]
    pairs = case.channels**2
    return Cost(
        sum(x.numel() for x in (*weights, *biases)),
        pairs * sum(taps for _, taps in maps) + spec.summary_taps * case.channels,
        2 * pairs * sum(rows * taps for rows, taps in maps),
    )


def arithmetic() -> Iterator[dict[str, object]]:
    """Returns a row for every case."""
    for name, case in CASES.items():
        one = cost(case)
        size = case.batch * one.feature_bytes(case.channels)
        yield {
            "case": name,
            "networks": case.batch,
            "entries each": one.entries,
            "parameters of the layer": one.parameters,
            "raw weights GB": 4 * one.entries * case.batch / 1e9,
            "S GB": size / 1e9,
            "S each KB": one.feature_bytes(case.channels) / 1e3,
            "forward TFLOP": case.batch * one.flops / 1e12,
            "forward+backward TFLOP": 3 * case.batch * one.flops / 1e12,
            "flops per byte of S": one.flops / one.feature_bytes(case.channels),
        }


def measurements() -> Iterator[dict[str, object]]:
    """Returns a row for every size that runs here."""
    device = torch.device("cpu")
    for name, sizes in MEASURED.items():
        whole = CASES[name]
        for neurons, networks in sizes:
            case = Case(neurons, networks, whole.channels, whole.kernels)
            one = cost(case)
            features = filled(graph_features(case, "np", device), case.channels)
            layer = NFLinear(features.spec, case.channels, case.channels)
            counted = sum(p.numel() for p in layer.parameters())
            if counted != one.parameters:
                raise ValueError(f"Expected {one.parameters} parameters (got {counted})")
            run = both_passes(
                lambda: our_tensors(layer(features)),  # noqa: B023
                [*our_tensors(features), *layer.parameters()],
            )
            with torch.no_grad():
                forward = peak_bytes(lambda: layer(features), device)  # noqa: B023
            peak = peak_bytes(run, device)
            edges = sum(x.shape[0] for x in features.weights.values())
            seconds = min(_processor_time(run) for _ in range(3))
            size = networks * one.feature_bytes(case.channels)
            flops = 3 * networks * one.flops
            print(".", end="", flush=True)
            yield {
                "case": name,
                "neurons": "-".join(map(str, neurons)),
                "networks": networks,
                "S MB": size / 1e6,
                "peak MB": peak / 1e6,
                "peak / S": peak / size,
                "forward peak / S": forward / size,
                "index bytes per edge": features.incidence.num_bytes / edges,
                "GFLOP": flops / 1e9,
                "processor ms": 1e3 * seconds,
                "GFLOP/s": flops / seconds / 1e9,
                "GB of S per s": size / seconds / 1e9,
            }


def _processor_time(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true", help="also run smaller cases; a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tables = {"One NF-Layer (NP), by arithmetic": list(arithmetic())}
    if args.measure:
        tables["One NF-Layer (NP), measured"] = list(measurements())
    for title, rows in tables.items():
        show(rows, title, None)
    if args.json is not None:
        args.json.write_text(json.dumps(tables, indent=2) + "\n")


if __name__ == "__main__":
    main()
