"""Models of other packages and ours on the same INRs: accuracy, and processor time per step.

python benchmarks/peers.py --zoo zoos/mnist --peer nfn --peer dws=DWSNets --peer dng=DNG \\
  --peer neural-graphs=neural-graphs --peer scalegmn=scalegmn --peer scalegmn-b=scalegmn

Every peer runs in a process of its own, since their packages share names. `nfn` is the package on
PyPI. The others are imported from a checkout that you give; install what they need (neural-graphs:
hydra-core, random-fourier-features-pytorch and torchvision; scalegmn: the last two, pandas and
opencv-python). All models see the same networks in the same batches of 32, with AdamW and a
learning rate that follows a cosine. The rate is chosen among --rates by the accuracy on validation
networks with the first seed, and every row lists what was tried. The test accuracy is that after
the last epoch. The settings of a model are those that the peer publishes for INR classification.
A training step includes making its batch, and freed memory is kept, as `nfn-graph train` does.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from harness.report import keep_memory, show
from torch import Tensor, nn
from torch_geometric.data import Data

from nfn_graph import Batch, WeightGraph
from nfn_graph.converters import WeightDataset
from nfn_graph.tasks.classify_inr import ClassifyInrOptions
from nfn_graph.tasks.models import fit_inputs, sizes_of
from nfn_graph.tasks.models.build import build_model, count_parameters
from nfn_graph.tasks.zoo import open_zoo_folder
from nfn_graph.transforms import CanonicalPhases

OURS = ("nfn-np", "nfn-hnp", "probe")


class Part(NamedTuple):
    """The networks of a split: as graphs, and as the tensors that peers take."""

    graphs: list[WeightGraph]
    weights: list[Tensor]
    biases: list[Tensor]
    labels: Tensor


class Candidate(NamedTuple):
    """A model, and the batch that it takes for some networks of a split."""

    model: nn.Module
    pick: Callable[[Part, Tensor], Any]


def main() -> None:
    """Trains all models, each in a process of its own."""
    args = _arguments()
    keep_memory()
    if args.only:
        print(json.dumps(measure(args, *_named(args.only))))
        return
    rows, failed = [], []
    for name in [*args.ours, *args.peer]:
        command = [sys.executable, __file__, *sys.argv[1:], "--only", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            failed.append(name)
            continue
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    if rows:
        show(rows, "INR classification: ours and peers", args.json)
    if failed:
        raise SystemExit(f"Failed, see above: {', '.join(failed)}")


def measure(args: argparse.Namespace, name: str, path: Path | None) -> dict[str, Any]:
    """The row of one model."""
    torch.set_num_threads(args.threads)
    zoo = open_zoo_folder(args.zoo)
    parts = {split: load(zoo, split, count) for split, count in _counts(args).items()}
    train = parts["train"]

    def make() -> Candidate:
        if name in OURS:
            return ours(name, parts)
        return PACKAGES[name](train) if path is None else from_checkout(name, path, train)

    tried = {rate: fit(make, parts, args.epochs, rate, args.seeds[0]) for rate in args.rates}
    rate = max(tried, key=lambda r: tried[r][0])
    runs = [tried[rate], *(fit(make, parts, args.epochs, rate, s) for s in args.seeds[1:])]
    tests = [test for _, test, *_ in runs]
    return {
        "model": name,
        "parameters": runs[0][3],
        "learning rate": rate,
        "validation accuracy by rate": ", ".join(f"{r:g}: {v:.3f}" for r, (v, *_) in tried.items()),
        "seeds": len(tests),
        "test accuracy": statistics.mean(tests),
        "standard error": statistics.stdev(tests) / len(tests) ** 0.5 if len(tests) > 1 else None,
        "ms of CPU per step": statistics.median(ms for _, _, ms, _ in runs),
    }


def load(zoo: WeightDataset, split: str, count: int) -> Part:
    """The first networks of a split, which must have one shape."""
    chosen = zoo.where(split=split)[:count]
    canonical = CanonicalPhases(30.0)
    graphs = [canonical(graph) for graph in chosen]
    states = [graph.to_tensors() for graph in graphs]
    if len({tuple(x.shape for x in state.values()) for state in states}) != 1:
        raise SystemExit("Expected networks of one shape: peers take no others")
    stacked = {key: torch.stack([state[key] for state in states]) for key in states[0]}
    # Peers keep weights as [networks, in, out, channels].
    weights = [x.transpose(1, 2).unsqueeze(-1) for x in stacked.values() if x.dim() == 3]
    biases = [x.unsqueeze(-1) for x in stacked.values() if x.dim() == 2]
    return Part(graphs, weights, biases, torch.from_numpy(chosen.column("label").to_numpy().copy()))


def from_checkout(name: str, path: Path, train: Part) -> Candidate:
    """The model of a peer, or an error that names what its checkout or this environment lacks."""
    try:
        return ADAPTERS[name](path, train)
    except (ImportError, FileNotFoundError) as error:
        raise SystemExit(
            f"{name}: {error}. Expected a checkout of its repository in '{path}', and the packages "
            "that it imports."
        ) from error


def scales(tensors: list[Tensor]) -> list[tuple[float, float]]:
    """Mean and standard deviation of every tensor."""
    return [(float(x.mean()), float(x.std())) for x in tensors]


def ours(name: str, parts: dict[str, Part]) -> Candidate:
    """One of our models, as `nfn-graph train classify-inr --preset small` builds it."""
    graphs = parts["train"].graphs
    settings = ClassifyInrOptions.PRESETS["small"].model
    model = build_model(name, settings, graphs[0].spec, sizes_of(graphs[:1]), 10, None)
    fit_inputs(
        model, [Batch.from_data_list(graphs[i : i + 256]) for i in range(0, len(graphs), 256)]
    )
    return Candidate(
        model, lambda part, index: Batch.from_data_list([part.graphs[i] for i in index.tolist()])
    )


def dws(path: Path, train: Part) -> Candidate:
    """AvivNavon/DWSNets with the defaults of its `experiments/mnist/trainer.py`."""
    sys.path.insert(0, str(path))
    from nn.models import DWSModelForClassification  # type: ignore[import-not-found]

    model = DWSModelForClassification(
        weight_shapes=tuple(tuple(x.shape[1:3]) for x in train.weights),
        bias_shapes=tuple(tuple(x.shape[1:2]) for x in train.biases),
        input_features=1,
        hidden_dim=32,
        n_hidden=4,
        reduction="max",
        n_fc_layers=1,
        set_layer="sab",
        n_out_fc=1,
        bn=True,
    )
    return Candidate(model, _standardized(train))


def neural_graphs(path: Path, train: Part) -> Candidate:
    """mkofinas/neural-graphs: NG-GNN with 64 probes.

    The settings are those of `configs/model/pna.yaml` and `scripts/mnist_cls_pna_probe_64.sh` in
    its `experiments/inr_classification`.
    """
    sys.path.insert(0, str(path))
    import yaml
    from torch_geometric.utils import _trim_to_layer

    # Newer versions of PyG have given this module another name.
    sys.modules.setdefault("torch_geometric.utils.trim_to_layer", _trim_to_layer)
    from nn.gnn import GNNForClassification  # type: ignore[import-not-found]
    from omegaconf import OmegaConf  # type: ignore[import-not-found]

    configs = path / "experiments" / "inr_classification" / "configs"
    read = [
        yaml.safe_load((configs / p).read_text()) for p in ("model/pna.yaml", "data/mnist.yaml")
    ]
    layout = _layout(train)
    data = {**read[1], "num_classes": 10}
    data["inr_model"] |= {
        "in_features": layout[0],
        "n_layers": len(layout) - 1,
        "hidden_features": layout[1],
        "out_features": layout[-1],
    }
    # It standardizes by itself, since its probes run the networks as they are.
    for name, tensors in (("weights", train.weights), ("biases", train.biases)):
        for i, what in enumerate(("mean", "std")):
            data["stats"][f"{name}_{what}"] = [scale[i] for scale in scales(tensors)]
    config = OmegaConf.create({"model": read[0], "data": data})
    config.model.graph_constructor.num_probe_features = 64
    config.model.gnn_backbone.dropout = 0.2
    config.model.rev_edge_features = True
    config = OmegaConf.to_container(config, resolve=True)["model"]
    config.pop("_target_"), config.pop("_recursive_")
    return Candidate(GNNForClassification(layer_layout=layout, **config), _tensors)


def dng(path: Path, train: Part) -> Candidate:
    """dddiowww/DNG: the encoder and its classifier, without the training on images before it.

    The settings are the defaults of its `experiments/inr_classification/classify_encoder.py`.
    """
    sys.path.insert(0, str(path))
    from data.graph_utils import get_graph_spec  # type: ignore[import-not-found]
    from dng_models import DNG_Classifier  # type: ignore[import-not-found]

    layout = _layout(train)
    model = DNG_Classifier(
        get_graph_spec(torch.tensor(layout)),
        fourier_dim=128,
        fourier_scale=3,
        rnn_mode="gru",
        rnn_layer=1,
        emb_dim=128,
        drop=0.0,
        cls_dim=128,
        cls_drop=0.5,
        ds="cifar" if layout[-1] == 3 else "mnist",
    )

    def pick(part: Part, index: Tensor) -> tuple[Tensor, Tensor]:
        weights, biases = _tensors(part, index)
        return torch.cat([x.flatten(1) for x in weights], 1), torch.cat(biases, 1).squeeze(-1)

    return Candidate(model, pick)


def scalegmn(config: str, path: Path, train: Part) -> Candidate:
    """jkalogero/scalegmn with the settings of a file in its `configs/mnist_cls`."""
    sys.path.insert(0, str(path))
    import yaml
    from src.data.data_utils import (  # type: ignore[import-not-found]
        get_edge_types,
        get_node_types,
        nn_to_edge_index,
    )
    from src.scalegmn.models import ScaleGMN  # type: ignore[import-not-found]

    settings = yaml.safe_load((path / "configs" / "mnist_cls" / config).read_text())
    layout = _layout(train)
    model = ScaleGMN({**settings["scalegmn_args"], "layer_layout": layout})
    edges, num_neurons = nn_to_edge_index(layout, "cpu"), sum(layout)
    node_types, edge_types = get_node_types(layout), get_edge_types(layout)
    hidden = torch.ones(num_neurons, 1, dtype=torch.bool)
    hidden[: layout[0]] = hidden[-layout[-1] :] = False

    def pick(part: Part, index: Tensor) -> Data:
        weights, biases = _tensors(part, index)
        count = len(index)
        first = num_neurons * torch.arange(count).view(1, -1, 1)
        joined = (edges.unsqueeze(1) + first).flatten(1)
        return Data(
            x=torch.cat([biases[0].new_ones(count, layout[0], 1), *biases], 1).flatten(0, 1),
            edge_index=joined,
            bw_edge_index=joined.flip(0),
            edge_attr=torch.cat([x.flatten(1, 2) for x in weights], 1).flatten(0, 1),
            node2type=node_types.repeat(count),
            edge2type=edge_types.repeat(count),
            mask_hidden=hidden.repeat(count, 1),
            batch=torch.arange(count).repeat_interleave(num_neurons),
            num_graphs=count,
        )

    return Candidate(model, pick)


def nfn(train: Part) -> Candidate:
    """The layers of `nfn` 0.1.2 with the sizes of our small preset.

    The package has layers only, so `published_models.py` puts them together: NP layers after the
    encoding of inputs and outputs, with ReLU.
    """
    from published_models import published_model

    settings = ClassifyInrOptions.PRESETS["small"].model
    standardized = _standardized(train)

    def networks(part: Part, index: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        weights, biases = standardized(part, index)
        return [x.squeeze(-1).transpose(1, 2) for x in weights], [x.squeeze(-1) for x in biases]

    model, _, pick = published_model(
        networks(train, torch.tensor([0])),
        "np",
        settings.channels,
        settings.head,
        10,
        dropout=settings.head_dropout,
        io_encoding=True,
    )
    return Candidate(
        model, lambda part, index: pick(networks(part, index), torch.arange(len(index)))
    )


#: The peers that are installed packages, by name.
PACKAGES: dict[str, Callable[[Part], Candidate]] = {"nfn": nfn}

#: The other peers by name. To add one, add a function that imports it from a checkout.
ADAPTERS: dict[str, Callable[[Path, Part], Candidate]] = {
    "dws": dws,
    "neural-graphs": neural_graphs,
    "dng": dng,
    "scalegmn": partial(scalegmn, "scalegmn.yml"),
    "scalegmn-b": partial(scalegmn, "scalegmn_bidir.yml"),
}


def _layout(part: Part) -> list[int]:
    """The number of neurons of every layer."""
    return [part.weights[0].shape[1], *(x.shape[1] for x in part.biases)]


def _tensors(part: Part, index: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    return tuple(x[index] for x in part.weights), tuple(x[index] for x in part.biases)


def _standardized(train: Part) -> Callable[[Part, Tensor], tuple[tuple[Tensor, ...], ...]]:
    """As :func:`_tensors`, each tensor by its mean and deviation over the training networks."""
    means = scales(train.weights), scales(train.biases)

    def pick(part: Part, index: Tensor) -> tuple[tuple[Tensor, ...], ...]:
        return tuple(
            tuple((x - mean) / std for x, (mean, std) in zip(given, known, strict=True))
            for given, known in zip(_tensors(part, index), means, strict=True)
        )

    return pick


def fit(
    make: Callable[[], Candidate], parts: dict[str, Part], epochs: int, rate: float, seed: int
) -> tuple[float, float, float, int]:
    """Accuracy on validation and test networks after the last epoch, time per step, parameters."""
    torch.manual_seed(seed)
    model, pick = make()
    train = parts["train"]
    optimiser = torch.optim.AdamW(model.parameters(), rate, weight_decay=5e-4)
    steps = epochs * math.ceil(len(train.labels) / 32)
    times = []
    for step, index in enumerate(_batches(len(train.labels), epochs, seed)):
        for group in optimiser.param_groups:
            rise = min(1.0, (step + 1) / max(1, round(0.1 * steps)))
            group["lr"] = rate * rise * (1 + math.cos(math.pi * step / steps)) / 2
        before = time.process_time()
        batch = pick(train, index)
        loss = F.cross_entropy(model(batch), train.labels[index])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        times.append(time.process_time() - before)
    scores = [_accuracy(model, pick, parts[split]) for split in ("validation", "test")]
    return scores[0], scores[1], 1000 * statistics.median(times), count_parameters(model)


def _batches(count: int, epochs: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        yield from torch.randperm(count, generator=generator).split(32)


@torch.no_grad()
def _accuracy(model: nn.Module, pick: Callable[[Part, Tensor], Any], part: Part) -> float:
    model.eval()
    right = 0
    for index in torch.arange(len(part.labels)).split(64):
        right += int((model(pick(part, index)).argmax(1) == part.labels[index]).sum())
    model.train()
    return right / len(part.labels)


def _counts(args: argparse.Namespace) -> dict[str, int]:
    return {"train": args.networks, "validation": args.networks // 4, "test": args.networks // 4}


def _named(text: str) -> tuple[str, Path | None]:
    """The name of a model, and the checkout that it is imported from."""
    name, equals, path = text.partition("=")
    return name, Path(path).resolve() if equals else None


def _check_names(ours: list[str], peers: list[str]) -> None:
    wrong = [name for name in ours if name not in OURS]
    for text in peers:
        name, path = _named(text)
        if name not in (PACKAGES if path is None else ADAPTERS):
            wrong.append(text)
    if wrong:
        raise SystemExit(
            f"Expected --peer {', '.join(PACKAGES)}, or --peer NAME=PATH with a NAME of "
            f"{', '.join(ADAPTERS)}, or --ours of {', '.join(OURS)} (got '{wrong[0]}')"
        )
    for name, path in map(_named, peers):
        if path is not None and not path.is_dir():
            raise SystemExit(f"Expected a folder with a checkout of {name} (got '{path}')")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--zoo", type=Path, required=True, help="INRs of one shape, by zoo inr")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME[=PATH]")
    parser.add_argument("--ours", nargs="*", default=["nfn-np"], help=f"of {', '.join(OURS)}")
    parser.add_argument("--networks", type=int, default=4000, help="training networks")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    _check_names(args.ours, args.peer)
    return args


if __name__ == "__main__":
    main()
