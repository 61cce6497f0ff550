"""Imitations of published zoos of INRs: opening, splits and outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from imitations import assert_computes, assert_loads, paths
from imitations_inr import DwsInr, NfnInr, dws_fashion, dws_mnist, inr2vec, nfn_inrs

from nfn_graph import Batch
from nfn_graph.converters import ConversionError, open_zoo, to_state_dict


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
        assert zoo.split("validation").labels == [0]
        assert paths(zoo.split("test")) == ["mnist_png_testing_7_0/checkpoints/model_final.pth"]

    def test_without_the_file_of_splits(self, tmp_path: Path) -> None:
        dws_mnist(tmp_path / "mnist-inrs")
        (tmp_path / "mnist_splits.json").unlink()
        zoo = open_zoo(tmp_path / "mnist-inrs")
        assert sorted(zoo.split("train").labels) == [0, 4, 5]
        assert zoo.split("test").labels == [7]
        with pytest.raises(ValueError, match=r"got 'validation'\).*mnist_splits\.json"):
            zoo.split("validation")

    def test_splits_of_another_system(self, tmp_path: Path) -> None:
        dws_mnist(tmp_path / "mnist-inrs")
        file = tmp_path / "mnist_splits.json"
        expected = open_zoo(tmp_path / "mnist-inrs").splits
        content = json.loads(file.read_text())
        for split in content.values():
            split["path"] = ["D:\\zoos\\" + path.replace("/", "\\") for path in split["path"]]
        file.write_text(json.dumps(content))
        assert open_zoo(tmp_path / "mnist-inrs").splits == expected


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
        assert zoo.split("validation").labels == [1]
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
            "validation": [45000, 49999],
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


class TestInr2vec:
    @pytest.mark.parametrize(("width", "hidden"), [(16, 4), (13, 3), (512, 4)])
    def test_computes(self, width: int, hidden: int, tmp_path: Path) -> None:
        imitation = inr2vec(tmp_path / "inrs", width, hidden, train=1)
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
        assert paths(zoo.split("validation")) == ["val/0.h5", "val/1.h5"]
        assert zoo.split("test").labels == [7]
        assert zoo.split("train").labels == list(range(7, 18))


def test_a_part_of_a_zoo_splits_too(tmp_path: Path) -> None:
    nfn_inrs(tmp_path / "siren_mnist_wts", 1)
    part = open_zoo(tmp_path / "siren_mnist_wts").where(label=3)
    assert part.split("train").column("image") == [0, 44999]
    assert len(part.split("test")) == 0
    zoo = open_zoo(tmp_path / "siren_mnist_wts")
    last = zoo.select([len(zoo) - 1] * len(zoo))  # as many rows, but of one network only
    assert set(last.split("train").indices) <= {len(zoo) - 1}
    assert len(last.split("test")) == 0 or set(last.split("test").indices) == {len(zoo) - 1}
    assert [row["fit"] for row in (part[-1].row, part[-2:][0].row)] == [13, 1]
