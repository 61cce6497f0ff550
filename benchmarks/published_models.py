"""Training on a zoo with our layers and with those of `nfn`: quality and time.

A zoo of MLPs on scikit-learn's digits, and models that predict test accuracy from weights: three
NF-Layers with ReLU, a mean pool, an MLP. Both see the same standardized weights in the same
batches, with the same learning rate and number of steps. Kendall's tau on held-out networks over
seeds, and the ratio of the times of training.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness.report import arguments, show
from nfn.common import WeightSpaceFeatures, network_spec_from_wsfeat
from nfn.layers import HNPLinear, HNPPool, IOSinusoidalEncoding, NPLinear, NPPool, TupleOp
from torch import Tensor, nn

from nfn_graph import NFN, Batch, WeightGraph
from nfn_graph.nn.models import mlp
from nfn_graph.spec import Symmetry
from nfn_graph.tasks.metrics import kendall_tau
from nfn_graph.tasks.zoo import CnnZooOptions, build_zoo, open_zoo_folder

CHANNELS, HEAD, BATCH = (16, 16, 5), (128, 128), 16
Networks = tuple[list[Tensor], list[Tensor]]


class Candidate(NamedTuple):
    """A model, and the form in which it takes networks.

    Attributes:
        model: The model.
        load: Function that returns all networks of a split in the form of the model's package.
        pick: Function that returns a batch of some of them.
    """

    model: nn.Module
    load: Callable[[Networks], Any]
    pick: Callable[[Any, Tensor], Any]


def main() -> None:
    """Trains all models."""
    args = arguments(__doc__)
    networks, epochs, seeds = (100, 2, 2) if args.quick else (1000, 10, 3)
    train, test = build_data(networks)
    rows = []
    for symmetry in ("np", "hnp"):
        found: dict[str, list[tuple[float, float]]] = {"ours": [], "nfn": []}
        for seed in range(seeds):
            for name, make in (("ours", our_model), ("nfn", published_model)):
                torch.manual_seed(seed)
                found[name].append(fit(make(train[0], symmetry), train, test, epochs, seed))
                tau, seconds = found[name][-1]
                print(
                    f"{symmetry}, seed {seed}, {name}: tau {tau:.3f}, {seconds:.0f} s", flush=True
                )
        row: dict[str, Any] = {"group": symmetry, "seeds": seeds, "steps": epochs * _steps(train)}
        for name, results in found.items():
            taus = [tau for tau, _ in results]
            row[f"{name} tau"] = statistics.mean(taus)
            row[f"{name} standard error"] = statistics.stdev(taus) / len(taus) ** 0.5
        row["ours / nfn, time"] = statistics.median(
            a[1] / b[1] for a, b in zip(found["ours"], found["nfn"], strict=True)
        )
        rows.append(row)
    show(rows, "Predicting generalisation, ours and nfn", args.json)


def build_data(networks: int) -> tuple[tuple[Networks, Tensor], tuple[Networks, Tensor]]:
    """Returns stacked weights and biases, standardized by tensor, and accuracies, by split."""
    with tempfile.TemporaryDirectory() as folder:
        options = CnnZooOptions(
            Path(folder) / "zoo", networks=networks, arch="mlp", depths=(2,), epochs=(2, 20)
        )
        zoo = open_zoo_folder(build_zoo(options))
        rows = [i for i, row in enumerate(zoo.rows) if row["is_finite"]]
        states = [zoo.state_dict(i) for i in rows]
    labels = torch.tensor([zoo.rows[i]["test_accuracy"] for i in rows])
    is_test = torch.tensor([zoo.rows[i]["split"] == "test" for i in rows])
    tensors = {key: torch.stack([s[key] for s in states]) for key in states[0]}
    for key, x in tensors.items():
        std, mean = torch.std_mean(x[~is_test])
        tensors[key] = (x - mean) / std
    weights = [x for key, x in tensors.items() if key.endswith("weight")]
    biases = [x for key, x in tensors.items() if key.endswith("bias")]
    parts = []
    for chosen in (~is_test, is_test):
        parts.append((([w[chosen] for w in weights], [b[chosen] for b in biases]), labels[chosen]))
    return parts[0], parts[1]


def our_model(networks: Networks, symmetry: Symmetry) -> Candidate:
    """Our layers."""

    def load(chosen: Networks) -> list[WeightGraph]:
        weights, biases = chosen
        return [
            WeightGraph.from_tensors([w[i] for w in weights], [b[i] for b in biases])
            for i in range(len(weights[0]))
        ]

    def pick(graphs: list[WeightGraph], index: Tensor) -> Batch:
        return Batch.from_data_list([graphs[i] for i in index.tolist()])

    spec = load(_select(networks, torch.tensor([0])))[0].spec
    return Candidate(NFN(spec, CHANNELS, symmetry, out_features=1, head=HEAD), load, pick)


def published_model(
    networks: Networks,
    symmetry: Symmetry,
    channels: Sequence[int] = CHANNELS,
    head: Sequence[int] = HEAD,
    out_features: int = 1,
    *,
    dropout: float = 0.0,
    io_encoding: bool = False,
) -> Candidate:
    """The published layers, put together in the same way.

    Args:
        networks: Weights and biases; the first network determines the sizes.
        symmetry: The group of the layers.
        channels: The channels of the NF-Layers.
        head: The hidden sizes of the MLP after them.
        out_features: The number of outputs.
        dropout: The dropout probability in that MLP.
        io_encoding: Whether position encodings tell input and output neurons apart, with the
            frequencies that `nfn` publishes for INRs of MNIST.
    """

    def pick(networks: Networks, index: Tensor) -> WeightSpaceFeatures:
        weights, biases = _select(networks, index)
        return WeightSpaceFeatures(
            [w.unsqueeze(1) for w in weights], [b.unsqueeze(1) for b in biases]
        )

    spec = network_spec_from_wsfeat(pick(networks, torch.tensor([0])))
    linear, pool = (NPLinear, NPPool) if symmetry == "np" else (HNPLinear, HNPPool)
    layers: list[nn.Module] = []
    width = 1
    if io_encoding:
        layers.append(IOSinusoidalEncoding(spec, max_freq=3, num_bands=3))
        width = layers[0].num_out_chan(width)
    for size in channels:
        layers += [linear(spec, width, size), TupleOp(nn.ReLU())]
        width = size
    last = mlp([pool.get_num_outs(spec) * width, *head], out_features, dropout)
    return Candidate(nn.Sequential(*layers, pool(spec), nn.Flatten(), last), lambda x: x, pick)


def fit(
    candidate: Candidate,
    train: tuple[Networks, Tensor],
    test: tuple[Networks, Tensor],
    epochs: int,
    seed: int,
) -> tuple[float, float]:
    """Trains a model; returns tau on the test networks and the seconds of training."""
    model, labels = candidate.model, train[1]
    networks, others = candidate.load(train[0]), candidate.load(test[0])
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    start = time.perf_counter()
    for _ in range(epochs):
        for index in torch.randperm(len(labels), generator=generator).split(BATCH):
            optimizer.zero_grad()
            logits = model(candidate.pick(networks, index)).squeeze(1)
            nn.functional.binary_cross_entropy_with_logits(logits, labels[index]).backward()
            optimizer.step()
    seconds = time.perf_counter() - start
    with torch.no_grad():
        parts = torch.arange(len(test[1])).split(64)
        found = [model(candidate.pick(others, index)).squeeze(1) for index in parts]
    return kendall_tau(torch.cat(found), test[1]), seconds


def _select(networks: Networks, index: Tensor) -> Networks:
    weights, biases = networks
    return [w[index] for w in weights], [b[index] for b in biases]


def _steps(train: tuple[Networks, Tensor]) -> int:
    return -(-len(train[1]) // BATCH)


if __name__ == "__main__":
    main()
