"""Zoos of transformers: every network is trained as if it were alone, and keeps its own graph."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nfn_graph import Batch, WeightGraph, symmetry
from nfn_graph.cli import main
from nfn_graph.converters import to_state_dict
from nfn_graph.tasks.sources import open_images
from nfn_graph.tasks.zoo import (
    TransformerZooOptions,
    build_zoo,
    open_zoo_folder,
)
from nfn_graph.tasks.zoo.classifiers import TrainingData
from nfn_graph.tasks.zoo.training import ImageOrder, train_classifiers
from nfn_graph.tasks.zoo.transformer import (
    RowTransformer,
    Shape,
    TransformerRun,
    draw_transformer,
    initialise_transformer,
)

SMALL: dict[str, Any] = {"epochs": (1, 2), "train_fractions": (0.05,), "widths": (8, 12)}


def options(folder: Path, **changes: Any) -> TransformerZooOptions:
    return TransformerZooOptions(out=folder, networks=12, **{**SMALL, **changes})


def test_networks_are_trained_as_if_alone() -> None:
    images = open_images("digits")
    data = TrainingData.of(images, torch.device("cpu"), torch.float64)
    shape = Shape(8, 8, 10, 8, 2, 1, 2)
    drawn = [draw_transformer(options(Path("zoo")), images, i) for i in range(4)]
    runs = [
        replace(r, shape=shape, optimiser="adam", l2=0.01, num_steps=3 + i)
        for i, r in enumerate(drawn)
    ]
    found = list(train_classifiers(runs, data, 8))
    assert [c.run.network for c in found] == [0, 1, 2, 3]
    for run, step, parameters, metrics in found:
        assert step == run.num_steps
        network = alone(run, data)
        for key, expected in network.state_dict().items():
            assert torch.allclose(parameters[key], expected, atol=1e-8), key
        with torch.no_grad():
            right = network(data.test_images).argmax(1) == data.test_labels
        assert metrics.test_accuracy == pytest.approx(float(right.double().mean()))


def alone(run: TransformerRun, data: TrainingData) -> nn.Module:
    """The same network trained by torch's own optimiser."""
    network = RowTransformer(run.shape).double()
    network.load_state_dict(initialise_transformer(run))
    optimiser = torch.optim.Adam(network.parameters(), run.learning_rate)
    order = ImageOrder(run.seed, run.num_images, len(data.train_images))
    for _ in range(run.num_steps):
        index = order.take(8)
        loss = F.cross_entropy(network(data.train_images[index]), data.train_labels[index])
        weights = [p for key, p in network.named_parameters() if key.endswith("weight")]
        loss = loss + run.l2 * sum(p.square().sum() for p in weights)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return network


def tensors_of(graph: WeightGraph, network: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors of a network without the zeros that pad all networks to one depth."""
    found = to_state_dict(graph)
    return {key: found[key] for key in network.state_dict()}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_zoo(options(tmp_path_factory.mktemp("zoo") / "zoo"))


def test_graphs_are_those_of_the_networks(zoo: Path) -> None:
    found = open_zoo_folder(zoo)
    assert len(found) == 12
    x = torch.randn(3, 1, 8, 8)
    for graph, row in zip(found, found.rows, strict=True):
        shape = Shape(8, 8, 10, *(row[n] for n in ("width", "heads", "depth", "expansion")))
        network = RowTransformer(shape).eval()
        network.load_state_dict(tensors_of(graph, network))
        expected = network(x)
        assert (graph.run(x) - expected).abs().max() < 1e-4
        moved = symmetry.sample(graph, "hnp").apply(graph)
        network.load_state_dict(tensors_of(moved, network))
        assert (network(x) - expected).abs().max() < 1e-4
        assert not torch.equal(moved["hidden1"].x, graph["hidden1"].x)


def test_heads_widths_and_depths_share_a_batch(zoo: Path) -> None:
    found = open_zoo_folder(zoo)
    sizes = {(row["width"], row["heads"], row["depth"]) for row in found.rows}
    assert len(sizes) > 4
    batch = Batch.from_data_list(list(found))
    assert batch.num_graphs == 12
    deep = next(g for g, row in zip(found, found.rows, strict=True) if row["depth"] == 2)
    assert set(batch.spec.neurons) == set(deep.spec.neurons)


def test_a_zoo_is_the_same_in_any_shards(zoo: Path, tmp_path: Path) -> None:
    other = open_zoo_folder(build_zoo(options(tmp_path / "zoo", shard_size=5)))
    for graph, again in zip(open_zoo_folder(zoo), other, strict=True):
        for key, tensor in to_state_dict(graph).items():
            assert torch.allclose(tensor, to_state_dict(again)[key], atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": (3,)}, r"--heads that divide all --widths.*\(got 3 heads and a width of 8\)"),
        ({"optimisers": ()}, r"--optimisers"),
        ({"epochs": (0, 1)}, r"epochs"),
    ],
)
def test_options_that_make_no_sense(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        build_zoo(options(tmp_path / "zoo", **changes))


def test_commands(zoo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo", "info", str(zoo)]) == 0
    assert "12" in capsys.readouterr().out
    command = ["train", "predict-generalization", "--zoo", str(zoo), "--out", str(tmp_path / "run")]
    assert main([*command, "--model", "nfn-np", "--epochs", "1", "--preset", "tiny"]) == 0
