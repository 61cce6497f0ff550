"""Imitations of published zoos of CNNs: opening, splits and outputs."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from imitations import assert_computes, assert_loads
from imitations_cnn import PARK, ParkNet, ZooCnn, model_zoo, small_cnn_zoo, wild_park
from permuting import assert_symmetric, free_sizes

from nfn_graph import NFN, Batch
from nfn_graph.converters import open_zoo, to_state_dict
from nfn_graph.testing import assert_invariant
from nfn_graph.transforms import FillBiases, GrowKernels, RoleTypes

STEPS = [0, 86, 86, 1, 86, 86, 86, 20, 86, 86, 86, 86, 86]


class TestSmallCnnZoo:
    def test_computes(self, tmp_path: Path) -> None:
        imitation = small_cnn_zoo(tmp_path / "cifar10", STEPS)
        zoo = open_zoo(tmp_path / "cifar10")
        assert zoo.description.layout == "Small CNN Zoo"
        assert_computes(zoo, imitation)

    def test_tensors_are_in_the_order_of_torch(self, tmp_path: Path) -> None:
        imitation = small_cnn_zoo(tmp_path / "cifar10", STEPS)
        tensors = to_state_dict(open_zoo(tmp_path / "cifar10")[3])
        for ours, theirs in zip(("conv2d", "conv2d_1", "conv2d_2", "dense"), "abcd", strict=True):
            layer = imitation.networks[3].get_submodule(theirs)
            assert torch.equal(tensors[f"{ours}.weight"], layer.weight)
            assert torch.equal(tensors[f"{ours}.bias"], layer.bias)

    def test_rows(self, tmp_path: Path) -> None:
        small_cnn_zoo(tmp_path / "cifar10", STEPS)
        zoo = open_zoo(tmp_path / "cifar10")
        row = zoo.row(2)
        assert row["config.activation"] == "relu" and row["modeldir"] == "/models/2, again"
        assert row["step"] == 86 and isinstance(row["step"], int)
        assert zoo.labels == [0.1 + i / 1000 for i in range(len(STEPS))]
        assert zoo[2].row == row
        assert len(zoo.where(step=86)) == STEPS.count(86)

    def test_splits_as_published(self, tmp_path: Path) -> None:
        """The rule as the published code applies it: order, filter, halve, shuffle, cut."""
        small_cnn_zoo(tmp_path / "cifar10", STEPS)
        order = np.random.default_rng(0).permutation(len(STEPS))
        # The published files have a header line, which the published code reads as a row.
        order_file = tmp_path / "cifar10" / "cifar10_split.csv"
        order_file.write_text("0\n" + "".join(f"{i}\n" for i in order))
        read = [0, *order.tolist()]
        final = [i for i in read if STEPS[i] == 86]
        trainval = list(range(int(0.5 * len(final))))
        random.Random(0).shuffle(trainval)
        cut = int(0.8 * len(trainval))
        zoo = open_zoo(tmp_path / "cifar10")
        train, val, test = (zoo.split(name) for name in ("train", "validation", "test"))
        assert list(train.indices) == [final[i] for i in trainval[:cut]] and len(train) == 4
        assert list(val.indices) == [final[i] for i in trainval[cut:]] and len(val) == 1
        assert list(test.indices) == final[int(0.5 * len(final)) :] and len(test) == 5
        assert list(zoo.split("validation").indices) == list(val.indices)
        assert train[1].row == zoo.row(train.indices[1])

    def test_the_published_order_repeats_row_0(self, tmp_path: Path) -> None:
        small_cnn_zoo(tmp_path / "zoo", [86, 86, 86])
        file = tmp_path / "order.csv"
        file.write_text("0\n2\n0\n1\n")
        zoo = open_zoo(tmp_path / "zoo", split_file=file)
        assert list(zoo.split("test").indices) == [0, 1]
        assert sorted([*zoo.splits["train"], *zoo.splits["validation"]]) == [0, 2]
        file.write_text("2\n0\n1\n")
        zoo = open_zoo(tmp_path / "zoo", split_file=file)
        assert list(zoo.split("test").indices) == [0, 1]
        assert list(zoo.split("validation").indices) == [2]

    def test_weights_stay_on_the_disk(self, tmp_path: Path) -> None:
        """Neither opening a zoo nor sending it to another process reads the matrix."""
        small_cnn_zoo(tmp_path / "zoo", [86] * 40)
        zoo = open_zoo(tmp_path / "zoo")
        assert isinstance(zoo.source.weights, np.memmap)
        sent = pickle.dumps(zoo)
        assert len(sent) < 40 * 4970
        copy = pickle.loads(sent)
        assert torch.equal(copy.state_dict(7)["dense.weight"], zoo.state_dict(7)["dense.weight"])


def _double(graph: Any) -> Any:
    """A graph or batch in float64."""
    return graph.apply(lambda x: x.double() if x.is_floating_point() else x)


def tied_sizes(config: dict[str, Any]) -> list[int]:
    """Sets of channels that additions tie, counted by the layers that they run through."""
    widths = config["channels"][1:]
    layers = {(i, c): {(i, c)} for i, width in enumerate(widths) for c in range(width)}
    for i, source in enumerate(config["residual"]):
        for c in range(min(widths[i], widths[source]) if source >= 0 else 0):
            merged = layers[i, c] | layers[source, c]
            layers.update(dict.fromkeys(merged, merged))
    classes = {frozenset(tied) for tied in layers.values()}
    return sorted(Counter(frozenset(i for i, _ in tied) for tied in classes).values())


class TestWildPark:
    def test_computes(self, tmp_path: Path) -> None:
        imitation = wild_park(tmp_path / "cifar10_zooV2")
        zoo = open_zoo(tmp_path / "cifar10_zooV2")
        assert zoo.description.layout == "CNN Wild Park"
        assert_computes(zoo, imitation)
        for i in range(len(zoo)):
            row = zoo.row(i)
            assert_loads(zoo[i], ParkNet(row["config"]), imitation, row["path"])

    def test_splits_as_published(self, tmp_path: Path) -> None:
        wild_park(tmp_path / "cifar10_zooV2")
        zoo = open_zoo(tmp_path / "cifar10_zooV2")
        assert zoo.split("train").column("run") == [f"NN_tune_trainable_0000{i}" for i in "4010"]
        assert zoo.split("train").column("iteration") == [20, 10, 20, 20]
        assert zoo.split("validation").labels == [0.2]
        assert zoo.split("test").column("config") == [PARK[3], PARK[2], PARK[5]]

    def test_without_the_file_of_splits(self, tmp_path: Path) -> None:
        wild_park(tmp_path / "cifar10_zooV2")
        (tmp_path / "cnn_park_splits.json").rename(tmp_path / "cifar10_zooV2" / "kept.json")
        zoo = open_zoo(tmp_path / "cifar10_zooV2")
        assert zoo.labels[-1] == 5 / 10 + 20 / 100
        with pytest.raises(ValueError, match=r"cnn_park_splits\.json as split_file"):
            zoo.split("train")
        zoo = open_zoo(zoo.path, split_file=zoo.path / "kept.json")
        assert len(zoo.split("train")) == 4

    @pytest.mark.parametrize("i", range(len(PARK)))
    def test_ties_are_real(self, i: int, tmp_path: Path) -> None:
        """Permuted neurons compute the same, and only layers that must be tied are tied."""
        imitation = wild_park(tmp_path / "cifar10_zooV2")
        zoo = open_zoo(tmp_path / "cifar10_zooV2").where(config=PARK[i])
        graph = _double(zoo[0])
        network = imitation.networks[zoo.row(0)["path"]].double()
        assert_symmetric(graph, network, (imitation.inputs,))
        assert sorted(free_sizes(graph)) == tied_sizes(PARK[i])

    def test_all_go_into_one_batch(self, tmp_path: Path) -> None:
        """Networks of any depth, width, kernel and most wirings become equivalent networks."""
        wild_park(tmp_path / "cifar10_zooV2")
        zoo = open_zoo(tmp_path / "cifar10_zooV2")
        with pytest.raises(ValueError, match="self weight"):
            RoleTypes()(FillBiases(3)(GrowKernels((7, 7))(zoo[-1])))
        zoo = zoo[:-1]
        grow, fill, roles = GrowKernels((7, 7)), FillBiases(3), RoleTypes()
        ready = [roles(fill(grow(graph))) for graph in zoo]
        batch = Batch.from_data_list(ready)
        for i in range(len(zoo)):
            back = to_state_dict(grow.inverse(fill.inverse(roles.inverse(batch[i]))))
            expected = zoo.state_dict(i)
            assert back.keys() == expected.keys()
            assert all(torch.equal(back[key], expected[key]) for key in expected)
        model = NFN(batch.spec, (2,), "np", out_features=2).double()
        together = model(_double(batch))
        for i, graph in enumerate(ready[::2]):
            alone = model(_double(Batch.from_data_list([graph])))[0]
            torch.testing.assert_close(together[2 * i], alone, rtol=0, atol=1e-12)
        assert_invariant(model, _double(batch), "np", folded=False)

    def test_grown_kernels_compute_the_same(self, tmp_path: Path) -> None:
        imitation = wild_park(tmp_path / "cifar10_zooV2")
        zoo = open_zoo(tmp_path / "cifar10_zooV2")
        grow = GrowKernels.to_largest(list(zoo))
        for i in (0, 3):
            row, tensors = zoo.row(i), to_state_dict(grow(zoo[i]))
            config = row["config"]
            layers = [tensors[f"layers.{j}.weight"] for j in range(config["n_layers"])]
            kernels = [layer.shape[-1] for layer in layers]
            assert kernels != config["kernel_size"]
            network = ParkNet({**config, "kernel_size": kernels})
            network.load_state_dict(tensors)
            with torch.no_grad():
                actual = network.double()(imitation.inputs)
            torch.testing.assert_close(actual, imitation.outputs(row["path"]), rtol=0, atol=1e-9)


class TestModelZoos:
    @pytest.mark.parametrize(
        ("kind", "dropout"), [("CNN", False), ("CNN", True), ("CNN2", False), ("CNN3", True)]
    )
    def test_computes(self, kind: str, dropout: bool, tmp_path: Path) -> None:
        imitation = model_zoo(tmp_path / "zoo", kind, trials=4, dropout=dropout)
        zoo = open_zoo(tmp_path / "zoo")
        assert_computes(zoo, imitation)

    def test_rows(self, tmp_path: Path) -> None:
        imitation = model_zoo(tmp_path / "zoo")
        zoo = open_zoo(tmp_path / "zoo")
        assert zoo.where(epoch=3).labels == [i / 10 + 0.03 for i in range(8)]
        row = zoo[5].row
        assert row["config"]["seed"] == 2 and row["config"]["model::nlin"] == "relu"
        keys = [f"module_list.{i}.weight" for i in (0, 3, 6, 9, 11)]
        assert [key for key in zoo.state_dict(5) if "weight" in key] == keys
        network = ZooCnn((1, 8, 6, 4), (5, 5, 2), "relu", False)
        assert_loads(zoo[5], network, imitation, row["path"])

    def test_splits_as_published(self, tmp_path: Path) -> None:
        """The rule of the published code, from sorted names."""
        model_zoo(tmp_path / "zoo", trials=20)
        trials = sorted(path.name for path in (tmp_path / "zoo").iterdir() if path.is_dir())
        random.seed(42)
        random.shuffle(trials)
        expected = {"train": trials[:14], "validation": trials[14:17], "test": trials[17:]}
        zoo = open_zoo(tmp_path / "zoo")
        for split, names in expected.items():
            part = zoo.split(split)
            assert part.column("trial") == [name for name in names for _ in range(2)]
            assert part.column("epoch") == [0, 3] * len(names)
