"""A batch of networks that all have different widths.

It is compared with a loop of `nfn` over the networks; with `nfn` on tensors padded with
zeros, which is wrong (the error is shown); and with a uniform batch of as many edges, by
the time per edge.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

import torch
from harness.cases import Case, filled, graph_features, random_tensors
from harness.passes import both_passes, our_tensors, their_tensors
from harness.report import arguments, show
from harness.timing import alternate, ratio
from nfn.common import WeightSpaceFeatures, network_spec_from_wsfeat
from nfn.layers import NPLinear
from torch import Tensor, nn
from torch.nn.functional import pad

from nfn_graph import Batch, NFLinear, WeightGraph

ENDS = 10


def main() -> None:
    """Times all sizes."""
    args = arguments(__doc__, "device")
    rows = []
    for networks in (64,) if args.quick else (32, 64):
        for channels in (16, 64):
            rows.append(measure(networks, channels, args))
            print(".", end="", flush=True)
    show(rows, "Mixed widths, NP, forward+backward", args.json)


def measure(networks: int, channels: int, args: argparse.Namespace) -> dict[str, object]:
    """Returns one row of the table."""
    device = args.device
    sizes = [(ENDS, 8 + i % 16, 8 + (7 * i) % 17, ENDS) for i in range(networks)]
    graphs = [WeightGraph.from_tensors(*random_tensors(s)) for s in sizes]
    mixed = filled(Batch.from_data_list(graphs).to(device).features("np"), channels)
    uniform = graph_features(Case((ENDS, 16, 16, ENDS), networks, channels), "np", device)
    ours = NFLinear(mixed.spec, channels, channels).to(device)
    even = NFLinear(uniform.spec, channels, channels).to(device)
    singles = [dense(s, channels, device) for s in sizes]
    widest = tuple(max(column) for column in zip(*sizes, strict=True))
    padded = [stack_padded(singles, i, widest) for i in range(3)]
    together = WeightSpaceFeatures([p[0] for p in padded], [p[1] for p in padded])
    theirs = NPLinear(network_spec_from_wsfeat(together), channels, channels).to(device)

    def loop() -> list[Tensor]:
        return [x for single in singles for x in their_tensors(theirs(single))]

    inputs = [x for single in singles for x in their_tensors(single)]
    functions = {
        "ours": both_passes(
            lambda: our_tensors(ours(mixed)), [*our_tensors(mixed), *ours.parameters()]
        ),
        "uniform": both_passes(
            lambda: our_tensors(even(uniform)), [*our_tensors(uniform), *even.parameters()]
        ),
        "loop": both_passes(loop, [*inputs, *theirs.parameters()]),
        "padded": both_passes(
            lambda: their_tensors(theirs(together)),
            [*their_tensors(together), *theirs.parameters()],
        ),
    }
    times = alternate(functions, 5.0 if args.quick else 15.0, device)
    edges = [sum(x.shape[0] for x in f.weights.values()) for f in (mixed, uniform)]
    return {
        "networks": networks,
        "channels": channels,
        "edges": edges[0],
        "ours ms": median(times["ours"]),
        "ours / loop of nfn": ratio(times, "ours", "loop"),
        "ours / padded nfn": ratio(times, "ours", "padded"),
        "mixed / uniform, per edge": ratio(times, "ours", "uniform") * edges[1] / edges[0],
        "relative error of padded nfn": padding_error(theirs, singles, together),
    }


def dense(sizes: tuple[int, ...], channels: int, device: torch.device) -> Any:
    """Creates random features of one network for `nfn`."""

    def fill(x: Tensor) -> Tensor:
        return torch.randn(1, channels, *x.shape, device=device, requires_grad=True)

    weights, biases = random_tensors(sizes)
    return WeightSpaceFeatures([fill(w) for w in weights], [fill(b) for b in biases])


def stack_padded(singles: list[Any], i: int, widest: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Returns the i-th weights and biases of all networks, padded with zeros."""
    rows, columns = widest[i + 1], widest[i]
    weights, biases = [], []
    for single in singles:
        w, b = single.weights[i].detach(), single.biases[i].detach()
        weights.append(pad(w, (0, columns - w.shape[-1], 0, rows - w.shape[-2])))
        biases.append(pad(b, (0, rows - b.shape[-1])))
    return torch.cat(weights).requires_grad_(), torch.cat(biases).requires_grad_()


@torch.no_grad()
def padding_error(layer: nn.Module, singles: list[Any], together: Any) -> float:
    """Returns the error of the padded result over all weights."""
    padded = layer(together)
    wrong = norm = 0.0
    for n, single in enumerate(singles):
        for right, all_ in zip(layer(single).weights, padded.weights, strict=True):
            cropped = all_[n, :, : right.shape[-2], : right.shape[-1]]
            wrong += float((cropped - right[0]).square().sum())
            norm += float(right.square().sum())
    return (wrong / norm) ** 0.5


if __name__ == "__main__":
    main()
