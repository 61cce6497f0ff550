"""Training on batches whose sizes never repeat: memory must stay constant.

    python tests/soak.py --batches 10000

Every batch has networks of fresh random widths, depths, kernels and kinds; models of both groups
take a step of the optimiser on it, and edit it into graphs. Caches churn all the time.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import DataLoader

if __name__ == "__main__":
    _TESTS = Path(__file__).parent
    sys.path[:0] = [str(_TESTS), str(_TESTS.parent)]
from networks import chain, residual_spec
from nfn_graph import NFN, Batch, NetworkSpec, WeightGraph
from nfn_graph.testing import random_graph

_NETWORKS = 6
_BATCHES_AT_ONCE = 25


def mlp(draw: random.Random) -> WeightGraph:
    """An MLP of one to four hidden layers."""
    hidden = [draw.randint(1, 40) for _ in range(draw.randint(1, 4))]
    return chain((2, *hidden, 3), dtype=torch.float32)


def cnn(draw: random.Random) -> WeightGraph:
    """Two convolutions and a dense layer."""
    first, second = draw.randint(1, 24), draw.randint(1, 24)
    return chain((3, first, second, 2), ((3, 3), (2, 1), ()), dtype=torch.float32)


def residual(draw: random.Random) -> WeightGraph:
    """A residual block."""
    sizes = {"r": draw.randint(2, 30), "h": draw.randint(1, 30)}
    return random_graph(residual_spec(), sizes, dtype=torch.float32)


# Every kind of network, with the spec that all of its graphs share in a batch.
KINDS = {
    mlp: NetworkSpec.union(chain((2, *[2] * depth, 3)).spec for depth in range(1, 5)),
    cnn: chain((3, 2, 2, 2), ((3, 3), (2, 1), ())).spec,
    residual: residual_spec(),
}


def steps(draw: random.Random) -> Iterator[float]:
    """Trains without end on batches that never repeat; yields the losses."""
    models = [
        (kind, NFN(spec, (4, 1), symmetry, edit_scale=0.1, norm=True))
        for kind, spec in KINDS.items()
        for symmetry in ("np", "hnp")
    ]
    optimisers = [torch.optim.Adam(model.parameters()) for _, model in models]
    while True:
        chosen = draw.randrange(len(models))
        kind, model = models[chosen]
        networks = [kind(draw) for _ in range(_NETWORKS * _BATCHES_AT_ONCE)]
        loader = DataLoader(networks, _NETWORKS, collate_fn=Batch.from_data_list)
        for batch in loader:
            edited = model(batch).to_graph()
            loss = sum(store.edge_attr.square().mean() for store in edited.edge_stores)
            optimisers[chosen].zero_grad()
            loss.backward()
            optimisers[chosen].step()
            yield float(loss.detach())


def resident() -> int:
    """Returns the memory of this process in bytes, after garbage collection."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return 4096 * pages


def growth(batches: int, warm_up: int, parts: int = 10) -> list[int]:
    """Returns the resident memory after the warm-up and after equal parts of the batches."""
    training = steps(random.Random(0))
    for _ in range(warm_up):
        next(training)
    found = [resident()]
    for _ in range(parts):
        for _ in range(batches // parts):
            next(training)
        found.append(resident())
    return found


def main() -> int:
    """The long run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=10_000)
    parser.add_argument("--warm-up", type=int, default=1_000)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    started = time.monotonic()
    found = growth(chosen.batches, chosen.warm_up)
    grown = found[-1] - found[0]
    print("MB after each tenth:", " ".join(f"{x / 2**20:.0f}" for x in found))
    print(
        f"{chosen.batches} batches of {_NETWORKS} networks after {chosen.warm_up} to warm up, "
        f"{time.monotonic() - started:.0f} s: {grown / 2**20:+.1f} MB, "
        f"{grown / chosen.batches:+.0f} bytes per batch"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
