"""A training step of the INR classifier, ours and that of `nfn`, loader and update included."""

from __future__ import annotations

import time
from statistics import median

import torch
from harness.cases import CASES
from harness.classifier import nfn_step, our_step
from harness.report import arguments, show
from harness.timing import alternate, ratio

from nfn_graph import NetworkSpec
from nfn_graph.features import Incidence
from nfn_graph.testing import random_graph

SPEC = NetworkSpec.chain(3, input_size=2, output_size=1)


def main() -> None:
    """Times all cases."""
    args = arguments(__doc__, "device")
    rows = []
    for name in ("inr64",) if args.quick else ("inr64", "inr512"):
        case, networks = CASES[name], 128
        functions = {
            "ours": our_step(case, networks, args.device),
            "nfn": nfn_step(case, networks, args.device),
        }
        times = alternate(functions, 10.0 if args.quick else 30.0, args.device)
        step = median(times["ours"])
        rows.append(
            {
                "case": name,
                "ours ms": step,
                "ours / nfn": ratio(times, "ours", "nfn"),
                "new incidence, % of a step": 100 * incidence_ms(case.batch) / step,
            }
        )
        print(".", end="", flush=True)
    show(rows, "Training step of the INR classifier", args.json)


def incidence_ms(networks: int) -> float:
    """The time to build the incidence of a new batch of all different widths."""
    widths = [24 + i % 16 for i in range(networks)]
    times = []
    for _ in range(20):
        widths = [w + 1 if w < 40 else 24 for w in widths]
        graphs = [random_graph(SPEC, {"hidden1": w, "hidden2": w}) for w in widths]
        shapes = tuple(graph.layouts[0].shape for graph in graphs)
        start = time.perf_counter()
        Incidence(SPEC, shapes, torch.device("cpu"))
        times.append((time.perf_counter() - start) * 1e3)
    return median(times)


if __name__ == "__main__":
    main()
