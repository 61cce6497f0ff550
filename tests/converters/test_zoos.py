"""Imitations of published zoos: they open, split as published, compute the published outputs."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from imitations import (
    PARK,
    DwsInr,
    Imitation,
    NfnInr,
    ParkNet,
    ZooCnn,
    dws_fashion,
    dws_mnist,
    inr2vec,
    model_zoo,
    nfn_inrs,
    small_cnn_zoo,
    wild_park,
)
from permuting import assert_symmetric, free_sizes
from torch import nn

from nfn_graph import NFN, Batch, WeightGraph
from nfn_graph.converters import ConversionError, open_zoo, to_module, to_state_dict
from nfn_graph.converters.zoos import Zoo
from nfn_graph.testing import assert_invariant
from nfn_graph.transforms import FillBiases, GrowKernels, RoleTypes

STEPS = [0, 86, 86, 1, 86, 86, 86, 20, 86, 86, 86, 86, 86]


def assert_computes(zoo: Zoo, imitation: Imitation) -> None:
    """Every network is there once and computes what the published one does, in float64."""
    names = [row.get("path", i) for i, row in enumerate(map(zoo.row, range(len(zoo))))]
    assert sorted(names) == sorted(imitation.networks)
    for i, name in enumerate(names):
        with torch.no_grad():
            actual = zoo.module(i).double()(imitation.inputs)
        torch.testing.assert_close(actual, imitation.outputs(name), rtol=0, atol=1e-9)


def assert_loads(graph: WeightGraph, network: nn.Module, imitation: Imitation, name: str) -> None:
    """A graph goes back into the published module."""
    to_module(graph, network)
    with torch.no_grad():
        actual = network.double()(imitation.inputs)
    torch.testing.assert_close(actual, imitation.outputs(name), rtol=0, atol=1e-9)


def paths(zoo: Zoo) -> list[str]:
    return zoo.column("path")


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
        # The published files have a head line, which the published code reads as a row.
        order_file = tmp_path / "cifar10" / "cifar10_split.csv"
        order_file.write_text("0\n" + "".join(f"{i}\n" for i in order))
        read = [0, *order.tolist()]
        final = [i for i in read if STEPS[i] == 86]
        trainval = list(range(int(0.5 * len(final))))
        random.Random(0).shuffle(trainval)
        cut = int(0.8 * len(trainval))
        zoo = open_zoo(tmp_path / "cifar10")
        train, val, test = (zoo.split(name) for name in ("train", "val", "test"))
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
        assert sorted([*zoo.splits["train"], *zoo.splits["val"]]) == [0, 2]
        file.write_text("2\n0\n1\n")
        zoo = open_zoo(tmp_path / "zoo", split_file=file)
        assert list(zoo.split("test").indices) == [0, 1]
        assert list(zoo.split("val").indices) == [2]

    def test_weights_stay_on_the_disk(self, tmp_path: Path) -> None:
        """Neither opening nor sending a zoo to another process reads the matrix."""
        small_cnn_zoo(tmp_path / "zoo", [86] * 40)
        zoo = open_zoo(tmp_path / "zoo")
        assert isinstance(zoo.source.weights, np.memmap)
        sent = pickle.dumps(zoo)
        assert len(sent) < 40 * 4970
        copy = pickle.loads(sent)
        assert torch.equal(copy.state_dict(7)["dense.weight"], zoo.state_dict(7)["dense.weight"])


class TestDwsMnist:
    def test_computes(self, tmp_path: Path) -> None:
        imitation = dws_mnist(tmp_path / "mnist-inrs")
        zoo = open_zoo(tmp_path / "mnist-inrs")
        assert (zoo.description.w0, zoo.description.output_offset) == (30.0, 0.5)
        assert_computes(zoo, imitation)
        assert_loads(zoo[1], DwsInr(), imitation, paths(zoo)[1])

    def test_splits_as_published(self, tmp_path: Path) -> None:
        dws_mnist(tmp_path / "mnist-inrs")
        zoo = open_zoo(tmp_path / "mnist-inrs")
        assert zoo.split("train").labels == [4, 5]
        assert zoo.split("val").labels == [0]
        assert paths(zoo.split("test")) == ["mnist_png_testing_7_0/checkpoints/model_final.pth"]

    def test_without_the_file_of_splits(self, tmp_path: Path) -> None:
        dws_mnist(tmp_path / "mnist-inrs")
        (tmp_path / "mnist_splits.json").unlink()
        zoo = open_zoo(tmp_path / "mnist-inrs")
        assert sorted(zoo.split("train").labels) == [0, 4, 5]
        assert zoo.split("test").labels == [7]
        with pytest.raises(ValueError, match=r"train, test \(got 'val'\).*mnist_splits\.json"):
            zoo.split("val")


class TestDwsFashion:
    def test_computes(self, tmp_path: Path) -> None:
        imitation = dws_fashion(tmp_path / "fmnist_inrs")
        zoo = open_zoo(tmp_path / "fmnist_inrs")
        assert (zoo.description.w0, zoo.description.output_offset) == (30.0, 0.5)
        assert_computes(zoo, imitation)
        assert_loads(zoo[2], DwsInr(), imitation, paths(zoo)[2])

    def test_splits_as_published(self, tmp_path: Path) -> None:
        dws_fashion(tmp_path / "fmnist_inrs")
        zoo = open_zoo(tmp_path / "fmnist_inrs")
        assert paths(zoo.split("train")) == ["train/model_7.pth", "train/model_2.pth"]
        assert zoo.split("train").labels == [2, 0]
        assert zoo.split("val").labels == [1]
        assert zoo.split("test")[0].row == {
            "path": "test/model_3.pth",
            "image": 3,
            "set": "test",
            "label": 3,
        }


class TestNfnInrs:
    @pytest.mark.parametrize("outputs", [1, 3])
    def test_computes(self, outputs: int, tmp_path: Path) -> None:
        imitation = nfn_inrs(tmp_path / "siren_cifar_wts", outputs)
        zoo = open_zoo(tmp_path / "siren_cifar_wts")
        assert (zoo.description.w0, zoo.description.output_offset) == (30.0, 0.0)
        assert_computes(zoo, imitation)
        assert_loads(zoo[3], NfnInr(outputs), imitation, paths(zoo)[3])

    def test_splits_as_published(self, tmp_path: Path) -> None:
        nfn_inrs(tmp_path / "siren_mnist_wts", 1)
        zoo = open_zoo(tmp_path / "siren_mnist_wts")
        images = {name: zoo.split(name).column("image") for name in zoo.splits}
        assert images == {
            "train": [0, 44999],
            "val": [45000, 49999],
            "test": [50000],
            "train_augmented": [0, 44999, 44999, 0],
        }
        assert zoo.split("train_augmented").column("fit") == [0, 0, 1, 13]
        assert zoo.split("test").labels == [0]

    def test_networks_go_into_batches(self, tmp_path: Path) -> None:
        nfn_inrs(tmp_path / "siren_mnist_wts", 1)
        zoo = open_zoo(tmp_path / "siren_mnist_wts")
        batch = Batch.from_data_list(list(zoo[:3]))
        assert torch.equal(
            to_state_dict(batch[2])["net.2.weight"], zoo.state_dict(2)["net.2.weight"]
        )


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
        assert zoo.split("val").labels == [0.2]
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
        """Permuted neurons compute the same, and no layer is tied that need not be."""
        imitation = wild_park(tmp_path / "cifar10_zooV2")
        zoo = open_zoo(tmp_path / "cifar10_zooV2").where(config=PARK[i])
        graph = _double(zoo[0])
        network = imitation.networks[zoo.row(0)["path"]].double()
        assert_symmetric(graph, network, (imitation.inputs,))
        assert sorted(free_sizes(graph)) == tied_sizes(PARK[i])

    def test_all_go_into_one_batch(self, tmp_path: Path) -> None:
        """Of any depth, width, kernel and most wirings, as equivalent networks."""
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
        model = NFN(batch.spec, (4, 4), "np", out_features=2).double()
        together = model(_double(batch))
        for i, graph in enumerate(ready):
            alone = model(_double(Batch.from_data_list([graph])))[0]
            torch.testing.assert_close(together[i], alone, rtol=0, atol=1e-12)
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
        expected = {"train": trials[:14], "val": trials[14:17], "test": trials[17:]}
        zoo = open_zoo(tmp_path / "zoo")
        for split, names in expected.items():
            part = zoo.split(split)
            assert part.column("trial") == [name for name in names for _ in range(2)]
            assert part.column("epoch") == [0, 3] * len(names)


class TestInr2vec:
    @pytest.mark.parametrize(("width", "hidden"), [(16, 4), (13, 3), (512, 4)])
    def test_computes(self, width: int, hidden: int, tmp_path: Path) -> None:
        imitation = inr2vec(tmp_path / "inrs", width, hidden)
        zoo = open_zoo(tmp_path / "inrs")
        assert (zoo.description.w0, zoo.description.output_offset) == (30.0, 0.0)
        assert_computes(zoo, imitation)

    def test_a_vector_that_fits_two_networks_is_refused(self, tmp_path: Path) -> None:
        inr2vec(tmp_path / "inrs", 9, 2)
        with pytest.raises(ConversionError, match=r"0\.h5'.*136, which fits 11 of 3, 2 of 9"):
            open_zoo(tmp_path / "inrs")[0]

    def test_splits_as_published(self, tmp_path: Path) -> None:
        inr2vec(tmp_path / "inrs")
        zoo = open_zoo(tmp_path / "inrs")
        assert paths(zoo.split("train")) == [f"train/{i}.h5" for i in range(11)]
        assert paths(zoo.split("val")) == ["val/0.h5", "val/1.h5"]
        assert zoo.split("test").labels == [7]
        assert zoo.split("train").labels == list(range(7, 18))


def test_a_part_of_a_zoo_splits_too(tmp_path: Path) -> None:
    nfn_inrs(tmp_path / "siren_mnist_wts", 1)
    part = open_zoo(tmp_path / "siren_mnist_wts").where(label=3)
    assert part.split("train").column("image") == [0, 44999]
    assert len(part.split("test")) == 0
    assert [row["fit"] for row in (part[-1].row, part[-2:][0].row)] == [13, 1]
