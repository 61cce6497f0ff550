"""Folders that are not zoos: missing or repeated files, other networks, wrong splits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from imitations_cnn import PARK, model_zoo, small_cnn_zoo, wild_park
from imitations_inr import dws_fashion, dws_mnist, nfn_inrs

from nfn_graph.converters import ConversionError, open_zoo


class TestSplitFile:
    """mnist_splits.json and its like."""

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            (lambda s: s["train"]["path"].__setitem__(1, "gone.pth"), "entry 1 of 'train'"),
            (lambda s: s["val"].update(s["test"]), r"entry 0 of 'val' and as entry 0 of 'test'"),
            (lambda s: s["train"]["label"].pop(), "2 entries 'label' of 'train'"),
            (lambda s: s["train"]["label"].__setitem__(0, "9"), "label 4 of .*got '9'"),
            (lambda s: s.update(other=[]), "train, val, test"),
            (lambda s: s.update(val=5), "list of paths under 'val'"),
        ],
    )
    def test_entries_are_named(
        self, change: Callable[[Any], Any], match: str, tmp_path: Path
    ) -> None:
        dws_mnist(tmp_path / "zoo")
        file = tmp_path / "mnist_splits.json"
        splits = json.loads(file.read_text())
        change(splits)
        file.write_text(json.dumps(splits))
        with pytest.raises(ConversionError, match=match) as caught:
            open_zoo(tmp_path / "zoo")
        assert "mnist_splits.json" in str(caught.value)

    def test_a_damaged_file(self, tmp_path: Path) -> None:
        dws_fashion(tmp_path / "zoo")
        file = tmp_path / "zoo" / "splits.json"
        text = file.read_text()
        for damaged in (text[:-1], text.replace(":", ";", 1), text.replace("model_7", "model_W")):
            file.write_text(damaged)
            with pytest.raises(ConversionError, match=r"splits\.json"):
                open_zoo(tmp_path / "zoo")

    def test_a_missing_file(self, tmp_path: Path) -> None:
        dws_fashion(tmp_path / "zoo")
        with pytest.raises(FileNotFoundError, match=r"other\.json"):
            open_zoo(tmp_path / "zoo", split_file=tmp_path / "other.json")
        nfn_inrs(tmp_path / "nfn", 1)
        with pytest.raises(ValueError, match="no split file"):
            open_zoo(tmp_path / "nfn", split_file=tmp_path / "zoo" / "splits.json")


class TestFolders:
    def test_unknown(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="gone"):
            open_zoo(tmp_path / "gone")
        (tmp_path / "empty").mkdir()
        with pytest.raises(ConversionError, match=r"Small CNN Zoo.*inr2vec.*an empty folder"):
            open_zoo(tmp_path / "empty")
        small_cnn_zoo(tmp_path / "zoos" / "cifar10", [86])
        with pytest.raises(ConversionError, match=r"Open '.*zoos/cifar10'"):
            open_zoo(tmp_path / "zoos")

    def test_two_zoos_in_one(self, tmp_path: Path) -> None:
        small_cnn_zoo(tmp_path / "zoo", [86])
        nfn_inrs(tmp_path / "zoo", 1)
        with pytest.raises(ConversionError, match="Small CNN Zoo and NFN INRs"):
            open_zoo(tmp_path / "zoo")

    @pytest.mark.parametrize("name", ["layout.csv", "weights.npy", "metrics.csv.gz"])
    def test_missing_table(self, name: str, tmp_path: Path) -> None:
        small_cnn_zoo(tmp_path / "zoo", [86])
        (tmp_path / "zoo" / name).unlink()
        with pytest.raises(FileNotFoundError, match=name):
            open_zoo(tmp_path / "zoo")

    def test_missing_checkpoints(self, tmp_path: Path) -> None:
        dws_mnist(tmp_path / "dws")
        (tmp_path / "dws/mnist_png_testing_7_0/checkpoints/model_final.pth").unlink()
        with pytest.raises(ConversionError, match=r"one file \*\.pth in .*_7_0/checkpoints"):
            open_zoo(tmp_path / "dws")
        for build, name in (
            (wild_park, "NN_tune_trainable_00001/checkpoint_000020"),
            (model_zoo, "NN_tune_trainable_00001_seed=1/checkpoint_000003"),
        ):
            folder = tmp_path / build.__name__
            build(folder)
            for file in (folder / name).iterdir():
                file.unlink()
            with pytest.raises(FileNotFoundError, match=name):
                open_zoo(folder)
            shutil.rmtree((folder / name).parent)
            (folder / name).parent.mkdir()
            with pytest.raises(ConversionError, match=(folder / name).parent.name):
                open_zoo(folder)

    def test_a_network_that_went_after_opening(self, tmp_path: Path) -> None:
        nfn_inrs(tmp_path / "zoo", 1)
        zoo = open_zoo(tmp_path / "zoo")
        (tmp_path / "zoo" / zoo.row(2)["path"]).unlink()
        with pytest.raises(FileNotFoundError, match=r"net45000\.pth"):
            zoo[2]

    def test_repeated_networks(self, tmp_path: Path) -> None:
        dws_mnist(tmp_path / "dws")
        one = tmp_path / "dws" / "mnist_png_training_5_0"
        shutil.copy(one / "checkpoints/model_final.pth", one / "checkpoints/model_copy.pth")
        with pytest.raises(ConversionError, match=r"model_copy\.pth, model_final\.pth"):
            open_zoo(tmp_path / "dws")
        (one / "checkpoints/model_copy.pth").unlink()
        shutil.copytree(one, tmp_path / "dws" / "mnist_png_training_6_0")
        with pytest.raises(ConversionError, match=r"training_5_0' and 'mnist_png_training_6_0"):
            open_zoo(tmp_path / "dws")
        nfn_inrs(tmp_path / "nfn", 1)
        for folder, match in (
            ("randinit_smaller_4s", "label of image 0 .*3s/net0.* and .*4s/net0"),
            ("randinit_smaller_aug0_4s", "label of image 0 .*3s/net0.* and .*4s/net0"),
        ):
            copy = tmp_path / "nfn" / folder
            copy.mkdir()
            shutil.copy(tmp_path / "nfn/randinit_smaller_3s/net0.pth", copy)
            with pytest.raises(ConversionError, match=match):
                open_zoo(tmp_path / "nfn")
            shutil.rmtree(copy)
        model_zoo(tmp_path / "zoo", trials=1)
        trial = next((tmp_path / "zoo").glob("NN_*"))
        shutil.copytree(trial / "checkpoint_000003", trial / "checkpoint_3")
        with pytest.raises(ConversionError, match=r"epoch 3 .*checkpoint_3/"):
            open_zoo(tmp_path / "zoo")


class TestOtherNetworks:
    """Undamaged files with contents that do not fit the layout."""

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            (lambda s: s.pop("seq.1.bias"), r"seq\.1\.bias"),
            (lambda s: s.update({"other.weight": torch.ones(1)}), r"got 'other\.weight'"),
            (lambda s: s.update({"seq.1.weight": torch.ones(32, 31)}), r"\[out, 32\]"),
            (lambda s: s.update({"seq.1.bias": torch.ones(31)}), r"bias for each"),
            (lambda s: s.update({"seq.0.bias": torch.ones(32).long()}), r"seq\.0\.bias"),
            (lambda s: s.update({"seq.0.bias": "text"}), r"seq\.0\.bias' of str"),
            (lambda s: s.pop("label"), r"'label' in .* an integer \(got None\)"),
        ],
    )
    def test_inrs(self, change: Callable[[Any], Any], match: str, tmp_path: Path) -> None:
        dws_fashion(tmp_path / "zoo")
        file = tmp_path / "zoo" / "train" / "model_2.pth"
        content = torch.load(file)
        change(content)
        torch.save(content, file)
        with pytest.raises(ConversionError, match=match) as caught:
            open_zoo(tmp_path / "zoo")[0]
        assert "model_2.pth" in str(caught.value)

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"channels": [3, 8, 4]}, "sizes of 3 layers"),
            ({"channels": [3, 8, 4, 16]}, r"layers\.2\.weight"),
            ({"residual": [-1, 1, 0]}, "layer 1 to add an earlier one"),
            ({"activation": ["relu", "relu", "swish"]}, "activation: .*got 'swish'"),
            ({"stride": 1}, "stride in 'config' .*to_container"),
            ({"n_layers": None}, "n_layers in 'config'"),
            ({"depth": 3}, "'config' in .* to hold n_layers"),
        ],
    )
    def test_park(self, change: dict[str, Any], match: str, tmp_path: Path) -> None:
        wild_park(tmp_path / "zoo")
        name = "NN_tune_trainable_00002/checkpoint_000020/checkpoint.pt"
        content = torch.load(tmp_path / "zoo" / name)
        torch.save({**content, "config": {**PARK[2], **change}}, tmp_path / "zoo" / name)
        zoo = open_zoo(tmp_path / "zoo")
        with pytest.raises(ConversionError, match=match) as caught:
            zoo[zoo.column("path").index(name)]
        assert name in str(caught.value)

    @pytest.mark.parametrize("part", ["model", "last_result", "iteration"])
    def test_park_without_a_part(self, part: str, tmp_path: Path) -> None:
        wild_park(tmp_path / "zoo")
        file = tmp_path / "zoo" / "NN_tune_trainable_00000/checkpoint_000010/checkpoint.pt"
        content = torch.load(file)
        del content[part]
        torch.save(content, file)
        expected = {"last_result": "test/acc"}.get(part, part)
        with pytest.raises(ConversionError, match=rf"{expected}.* in .*000010/checkpoint\.pt"):
            open_zoo(tmp_path / "zoo")[0]

    def test_model_zoo(self, tmp_path: Path) -> None:
        model_zoo(tmp_path / "zoo", trials=1)
        file = next((tmp_path / "zoo").glob("*/checkpoint_000000/checkpoints"))
        content = torch.load(file)
        torch.save({**content, "module_list.3.weight": torch.ones(6, 8, 4, 4)}, file)
        with pytest.raises(ConversionError, match=r"000000/checkpoints': .*kernels of sizes"):
            open_zoo(tmp_path / "zoo")[0]
        torch.save({"conv1.weight": torch.ones(6, 8, 4, 4)}, file)
        with pytest.raises(ConversionError, match=r"'module_list\.\*'.*got 'conv1\.weight'"):
            open_zoo(tmp_path / "zoo")[0]
