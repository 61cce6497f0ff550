"""How time and memory grow with edges, channels, and the number of networks.

The time is that of forward and backward of one layer; ours and the products run in turn.
Memory is the largest size of the live tensors of such a pass, without the input. The
slopes are those of the least-squares lines through their logarithms against that of the number
of edges, from 1e5 edges on: 1 is growth in proportion.
"""

from __future__ import annotations

import argparse
import math
from statistics import linear_regression, median

from harness.cases import Case, graph_features
from harness.memory import peak_bytes
from harness.passes import both_passes, our_tensors
from harness.products import products
from harness.report import arguments, show
from harness.timing import alternate, ratio

from nfn_graph import NFLinear

CHANNELS = 16


def main() -> None:
    """Measures all three."""
    args = arguments(__doc__, "device")
    most = 6 if args.quick else 7
    rows = []
    # Three square layers, four networks.
    for power in (4, 4.5, 5, 5.5, 6, 6.5, 7):
        if power <= most:
            width = round(math.sqrt(10**power / 12))
            rows.append(measure("edges", Case((width,) * 4, 4, CHANNELS), args))
    for channels in (8, 16, 32, 64, 128, 256):
        rows.append(measure("channels", Case((64,) * 4, 8, channels), args))
    for networks in (1, 4, 16, 64, 256):
        width = round(math.sqrt(1e5 / 3 / networks))
        rows.append(measure("networks", Case((width,) * 4, networks, CHANNELS), args))
    columns = ("ours ms", "products ms", "ours peak MB")
    slopes = {f"slope of {name} against edges from 1e5": slope(rows, name) for name in columns}
    show(rows, "Scaling, NP, forward+backward", args.json, slopes)


def slope(rows: list[dict[str, object]], name: str) -> float:
    """Returns the slope of a column against the edges, on logarithmic scales."""
    large = [row for row in rows if row["against"] == "edges" and float(row["edges"]) >= 9e4]  # type: ignore[arg-type]
    logs = [[math.log(float(row[key])) for row in large] for key in ("edges", name)]  # type: ignore[arg-type]
    return linear_regression(*logs).slope


def measure(against: str, case: Case, args: argparse.Namespace) -> dict[str, object]:
    """Returns one row of the table."""
    features = graph_features(case, "np", args.device)
    layer = NFLinear(features.spec, case.channels, case.channels).to(args.device)
    inputs = [*our_tensors(features), *layer.parameters()]
    ours = both_passes(lambda: our_tensors(layer(features)), inputs)
    functions = {"ours": ours, "products": products(layer, features, True)}
    times = alternate(functions, 1.0 if args.quick else 3.0, args.device)
    peak = peak_bytes(ours, args.device)
    edges = sum(x.shape[0] for x in features.weights.values())
    ms = {name: median(values) for name, values in times.items()}
    print(".", end="", flush=True)
    return {
        "against": against,
        "networks": case.batch,
        "width": case.sizes[0],
        "channels": case.channels,
        "edges": edges,
        "ours ms": ms["ours"],
        "products ms": ms["products"],
        "ours / products": ratio(times, "ours", "products"),
        "ours peak MB": peak / 2**20,
        "bytes per edge and channel": peak / edges / case.channels,
    }


if __name__ == "__main__":
    main()
