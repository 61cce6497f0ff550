"""One NF-Layer: ours, the published `nfn`, and the bare matrix products.

Ratios below 1 mean that ours is faster. All candidates of a row are timed in turn. `--compile`
also times compiled layers in the rows forward+backward of NP; compiling takes minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import torch
from harness.cases import CASES, Case, graph_features, nfn_features
from harness.passes import both_passes, our_tensors, their_tensors
from harness.products import products
from harness.report import arguments, show
from harness.timing import alternate, ratio
from nfn.layers import HNPLinear, NPLinear
from torch import Tensor, nn

from nfn_graph import NFLinear


def main() -> None:
    """Times all cases."""
    args = arguments(__doc__, "device", "compile")
    rows = []
    for name, case in CASES.items():
        for symmetry in ("np", "hnp") if case.hnp else ("np",):
            for backward in (False, True):
                rows.append(measure(name, case, symmetry, backward, args))
                print(".", end="", flush=True)
    show(rows, "One layer", args.json)


def measure(
    name: str, case: Case, symmetry: str, backward: bool, args: argparse.Namespace
) -> dict[str, object]:
    """Returns one row of the table."""
    device = args.device
    features = graph_features(case, symmetry, device)
    ours = NFLinear(features.spec, case.channels, case.channels).to(device)
    theirs_in, spec = nfn_features(case, device)
    layer = NPLinear if symmetry == "np" else HNPLinear
    theirs = layer(spec, case.channels, case.channels).to(device)
    our_inputs = [*our_tensors(features), *ours.parameters()]
    their_inputs = [*their_tensors(theirs_in), *theirs.parameters()]

    def run(function: Callable[[], list[Tensor]], inputs: list[Tensor]) -> Callable[[], object]:
        return both_passes(function, inputs) if backward else torch.no_grad()(function)

    def run_ours(layer: nn.Module) -> Callable[[], object]:
        return run(lambda: our_tensors(layer(features)), our_inputs)

    def run_theirs(layer: nn.Module) -> Callable[[], object]:
        return run(lambda: their_tensors(layer(theirs_in)), their_inputs)

    functions = {
        "ours": run_ours(ours),
        "nfn": run_theirs(theirs),
        "products": products(ours, features, backward),
    }
    if args.compile and backward and symmetry == "np":
        functions["compiled nfn"] = run_theirs(torch.compile(theirs))
        functions["compiled ours"] = run_ours(torch.compile(ours))
    seconds, rounds = (0.5, 3) if args.quick else (5.0, 7)
    times = alternate(functions, seconds, device, rounds)
    row: dict[str, object] = {
        "case": name,
        "group": symmetry,
        "pass": "forward+backward" if backward else "forward",
        "ours ms": median(times["ours"]),
    }
    for other in functions:
        if other != "ours":
            row[f"ours / {other}"] = ratio(times, "ours", other)
    return row


if __name__ == "__main__":
    main()
