"""A forward pass of 100,000 tiny networks of six widths in one batch, step by step.

Memory is the largest resident size of the process during a step, and by how much it exceeds the
size before the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from harness.cases import random_tensors
from harness.memory import forget_peak, resident
from harness.report import arguments, show

from nfn_graph import NFN, Batch, NFLinear, WeightGraph


def main() -> None:
    """Measures every step once."""
    args = arguments(__doc__)
    count = 10_000 if args.quick else 100_000
    rows: list[dict[str, object]] = []

    def measured(step: str, function: Callable[[], Any]) -> Any:
        forget_peak()
        before, start = resident("VmRSS"), time.perf_counter()
        with torch.no_grad():
            result = function()
        seconds = time.perf_counter() - start
        peak = resident("VmHWM")
        rows.append({"step": step, "seconds": seconds, "peak MB": peak, "new MB": peak - before})
        return result

    def networks() -> list[WeightGraph]:
        return [WeightGraph.from_tensors(*random_tensors((2, 3 + i % 6, 1))) for i in range(count)]

    graphs = measured("make the graphs", networks)
    batch = measured("make the batch", lambda: Batch.from_data_list(graphs))
    features = measured("features of a new batch", lambda: batch.features("np"))
    layer = NFLinear(features.spec, 1, 8)
    measured("one layer, 8 channels", lambda: layer(features))
    model = NFN(batch.spec, (8, 8), out_features=1).eval()
    measured("a model, two such layers and a head of 1000 and 1000", lambda: model(batch))
    show(rows, f"{count:,} tiny networks, forward", args.json)


if __name__ == "__main__":
    main()
