"""Errors about damaged files of zoos name the file and the record."""

from __future__ import annotations

import gzip
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from imitations_cnn import model_zoo, small_cnn_zoo, wild_park
from imitations_inr import dws_fashion, dws_mnist, inr2vec, nfn_inrs

from nfn_graph.converters import ConversionError, open_zoo

ERRORS = (ConversionError, FileNotFoundError)
# One file with checksums from every layout that has one.
CHECKSUMMED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "small_cnn": (lambda p: small_cnn_zoo(p, [86, 0]), "metrics.csv.gz"),
    "dws_mnist": (dws_mnist, "mnist_png_testing_7_0/checkpoints/model_final.pth"),
    "dws_fashion": (dws_fashion, "train/model_10.pth"),
    "nfn": (lambda p: nfn_inrs(p, 1), "randinit_smaller_5s/net45000.pth"),
    "wild_park": (wild_park, "NN_tune_trainable_00002/checkpoint_000020/checkpoint.pt"),
    "model_zoo": (
        lambda p: model_zoo(p, trials=2),
        "NN_tune_trainable_00001_seed=1/checkpoint_000003/checkpoints",
    ),
}


def flip(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def everything(path: Path) -> list[Any]:
    """Everything that a zoo returns: rows and tensors."""
    zoo = open_zoo(path)
    return [(zoo.row(i), zoo.state_dict(i), zoo[i].row) for i in range(len(zoo))]


def is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return bool(one == other)


@pytest.mark.parametrize("layout", CHECKSUMMED)
def test_a_flipped_bit_never_passes_unseen(layout: str, tmp_path: Path) -> None:
    """Wherever the damage is, the file is named, or everything read is what was written."""
    build, name = CHECKSUMMED[layout]
    build(tmp_path / "zoo")
    file = tmp_path / "zoo" / name
    expected = everything(tmp_path / "zoo")
    intact = file.read_bytes()
    chosen = random.Random(0)
    reported = 0
    for position in chosen.sample(range(len(intact)), 25):
        flip(file, position, chosen.randrange(8))
        try:
            assert is_equal(everything(tmp_path / "zoo"), expected), position
        except ERRORS as error:
            assert file.name in str(error) and "\n" not in str(error), position
            reported += 1
        file.write_bytes(intact)
    assert reported >= 5
    assert is_equal(everything(tmp_path / "zoo"), expected)


@pytest.mark.parametrize("layout", CHECKSUMMED)
@pytest.mark.parametrize("kept", [0.0, 0.3, 0.999])
def test_a_truncated_file_is_named(layout: str, kept: float, tmp_path: Path) -> None:
    build, name = CHECKSUMMED[layout]
    build(tmp_path / "zoo")
    file = tmp_path / "zoo" / name
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(ERRORS, match=re.escape(file.name)):
        everything(tmp_path / "zoo")


def test_a_damaged_tensor_is_named(tmp_path: Path) -> None:
    """Damages the middle of the largest tensor, where torch itself would read a wrong number."""
    dws_mnist(tmp_path / "zoo")
    file = tmp_path / "zoo" / "mnist_png_training_4_2" / "checkpoints" / "model_final.pth"
    weight = torch.load(file)["seq.1.weight"]
    position = file.read_bytes().find(weight.numpy().tobytes()) + 2000
    flip(file, position)
    assert not torch.equal(torch.load(file)["seq.1.weight"], weight)
    zoo = open_zoo(tmp_path / "zoo")
    at = zoo.column("label").index(4)
    with pytest.raises(ConversionError, match=r"data/2' in .*training_4_2.* match its checksum"):
        zoo[at]
    assert zoo[at - 1].row["label"] == 0


class TestMatrix:
    """weights.npy has no checksums, so its header is checked, and that its numbers are finite."""

    def test_head(self, tmp_path: Path) -> None:
        small_cnn_zoo(tmp_path / "zoo", [86, 0])
        file = tmp_path / "zoo" / "weights.npy"
        expected = everything(tmp_path / "zoo")
        intact = file.read_bytes()
        for position in range(intact.index(b"}") + 1):
            flip(file, position, position % 7)
            try:
                assert is_equal(everything(tmp_path / "zoo"), expected), position
            except ConversionError as error:
                assert "weights.npy" in str(error), position
            file.write_bytes(intact)
        # One bit turns little-endian into big-endian, and 2 rows into 0.
        for sign, bit in ((b"<", 1), (b"(2", 1)):
            flip(file, intact.index(sign) + len(sign) - 1, bit)
            with pytest.raises(ConversionError, match=r"weights\.npy"):
                open_zoo(tmp_path / "zoo")
            file.write_bytes(intact)

    @pytest.mark.parametrize("change", [-1, 1])
    def test_length(self, change: int, tmp_path: Path) -> None:
        small_cnn_zoo(tmp_path / "zoo", [86, 0])
        file = tmp_path / "zoo" / "weights.npy"
        content = file.read_bytes()
        file.write_bytes(content[:-1] if change < 0 else content + b"\0")
        with pytest.raises(ConversionError, match=r"weights\.npy.*truncated or damaged"):
            open_zoo(tmp_path / "zoo")

    def test_no_number(self, tmp_path: Path) -> None:
        small_cnn_zoo(tmp_path / "zoo", [86, 0, 86])
        file = tmp_path / "zoo" / "weights.npy"
        weights = np.load(file)
        weights[1, 4000] = 1.5
        np.save(file, weights)
        # In 1.5, all bits of the exponent but one are set; one more makes it NaN.
        position = len(file.read_bytes()) - weights.nbytes + (4970 + 4000) * 4
        flip(file, position + 3, 6)
        zoo = open_zoo(tmp_path / "zoo")
        with pytest.raises(ConversionError, match=r"row 1 of .*weights\.npy.* 'conv2d_2\.weight'"):
            zoo[1]
        assert zoo[0].row["step"] == 86
        assert open_zoo(tmp_path / "zoo", check_finite=False)[1].row["step"] == 0

    def test_other_shapes(self, tmp_path: Path) -> None:
        small_cnn_zoo(tmp_path / "zoo", [86, 0])
        np.save(tmp_path / "zoo" / "weights.npy", np.zeros((3, 4970), np.float32))
        with pytest.raises(ConversionError, match=r"2 rows .* 4970 columns .* \[3, 4970\]"):
            open_zoo(tmp_path / "zoo")


class TestLayoutTable:
    def test_every_character_counts(self, tmp_path: Path) -> None:
        small_cnn_zoo(tmp_path / "zoo", [86, 0])
        file = tmp_path / "zoo" / "layout.csv"
        expected = [tensors for _, tensors, _ in everything(tmp_path / "zoo")]
        intact = file.read_bytes()
        reported = 0
        for position in range(0, len(intact), 3):
            flip(file, position)
            try:
                found = [tensors for _, tensors, _ in everything(tmp_path / "zoo")]
                assert is_equal(found, expected), position
            except ConversionError as error:
                assert "layout.csv" in str(error), position
                reported += 1
            file.write_bytes(intact)
        assert reported > len(intact) / 3 / 2

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ('"(3, 3, 1, 16)"', "\"__import__('os').getcwd()\""),
            ("16,160", "17,161"),
            ("conv2d_1/bias", "conv2d_1/gamma"),
            ("(16, 10)", "(10, 17)"),
        ],
    )
    def test_records_are_named(self, old: str, new: str, tmp_path: Path) -> None:
        small_cnn_zoo(tmp_path / "zoo", [86, 0])
        file = tmp_path / "zoo" / "layout.csv"
        text = file.read_text()
        number = text[: text.index(old)].count("\n")
        file.write_text(text.replace(old, new))
        with pytest.raises(ConversionError, match=rf"record {number} of .*layout\.csv"):
            open_zoo(tmp_path / "zoo")


def test_a_short_record_of_the_metrics_is_named(tmp_path: Path) -> None:
    small_cnn_zoo(tmp_path / "zoo", [86, 0, 1])
    file = tmp_path / "zoo" / "metrics.csv.gz"
    lines = gzip.decompress(file.read_bytes()).splitlines()
    lines[2] = lines[2].rsplit(b",", 1)[0]
    file.write_bytes(gzip.compress(b"\n".join(lines)))
    with pytest.raises(ConversionError, match=r"22 values in record 2 of .*metrics\.csv\.gz"):
        open_zoo(tmp_path / "zoo")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("2\n0\n3\n", r"line 3 of .*_split\.csv' \(got '3'\)"),
        ("2\n0\nx\n", r"line 3 of .*_split\.csv' \(got 'x'\)"),
        ("2\n0\n0\n", r"each of 3 rows once in .*_split\.csv.*2 different"),
        ("2\n0\n", r"each of 3 rows once in .*_split\.csv.*2 numbers"),
    ],
)
def test_a_damaged_order(text: str, match: str, tmp_path: Path) -> None:
    small_cnn_zoo(tmp_path / "zoo", [86, 0, 1])
    (tmp_path / "zoo" / "cifar10_split.csv").write_text(text)
    with pytest.raises(ConversionError, match=match):
        open_zoo(tmp_path / "zoo")


class TestHdf5:
    def test_structure(self, tmp_path: Path) -> None:
        """Without checksums, a changed number goes unnoticed; all other damage is reported."""
        inr2vec(tmp_path / "zoo")
        file = tmp_path / "zoo" / "val" / "1.h5"
        zoo = open_zoo(tmp_path / "zoo").split("validation")
        shapes = {key: x.shape for key, x in zoo.state_dict(1).items()}
        intact = file.read_bytes()
        reported = 0
        for position in random.Random(1).sample(range(len(intact) // 4), 30):
            flip(file, position, position % 8)
            try:
                assert {k: x.shape for k, x in zoo.state_dict(1).items()} == shapes, position
            except ConversionError as error:
                assert "1.h5" in str(error) and "\n" not in str(error), position
                reported += 1
            file.write_bytes(intact)
        assert reported >= 3

    @pytest.mark.parametrize("kept", [0, 100, -10])
    def test_truncated(self, kept: int, tmp_path: Path) -> None:
        inr2vec(tmp_path / "zoo")
        file = tmp_path / "zoo" / "train" / "3.h5"
        file.write_bytes(file.read_bytes()[:kept])
        with pytest.raises(ConversionError, match=r"train/3\.h5"):
            open_zoo(tmp_path / "zoo")[3]

    def test_no_number(self, tmp_path: Path) -> None:
        inr2vec(tmp_path / "zoo")
        with h5py.File(tmp_path / "zoo" / "val" / "0.h5", "a") as file:
            file["params"][10] = np.inf
        with pytest.raises(ConversionError, match=r"finite weights in .*val/0\.h5.*layers\.0"):
            open_zoo(tmp_path / "zoo").split("validation")[0]

    @pytest.mark.parametrize("name", ["params", "class_id"])
    def test_missing_or_other_arrays(self, name: str, tmp_path: Path) -> None:
        inr2vec(tmp_path / "zoo")
        path = tmp_path / "zoo" / "test" / "0.h5"
        with h5py.File(path, "a") as file:
            del file[name]
        with pytest.raises(ConversionError, match=rf"'{name}' in .*test/0\.h5"):
            open_zoo(tmp_path / "zoo").split("test")[0]
        with h5py.File(path, "a") as file:
            file[name] = np.zeros((2, 2))
        with pytest.raises(ConversionError, match=rf"'{name}' in .*test/0\.h5"):
            open_zoo(tmp_path / "zoo").split("test")[0]

    def test_missing_files(self, tmp_path: Path) -> None:
        inr2vec(tmp_path / "zoo")
        (tmp_path / "zoo" / "train" / "4.h5").unlink()
        with pytest.raises(ConversionError, match=r"0\.h5 to 9\.h5 in .*train' .*up to 10"):
            open_zoo(tmp_path / "zoo")


class TestResults:
    """result.json and params.json of the Model Zoos."""

    @pytest.mark.parametrize(
        ("line", "match"),
        [
            ('{"test_acc": 0.5, ', r"line 3 of .*result\.json"),
            ("[1]", r"object in line 3 of .*result\.json"),
            ('{"training_iteration": 1}', r"new training_iteration in line 3"),
            ('{"training_iteration": 2}', r"number as test_acc in line 3"),
            ('{"a": 1, "a": 2}', r"line 3 of .*'a' twice"),
        ],
    )
    def test_lines_are_named(self, line: str, match: str, tmp_path: Path) -> None:
        model_zoo(tmp_path / "zoo", trials=2)
        file = next((tmp_path / "zoo").glob("*_seed=1/result.json"))
        lines = file.read_text().splitlines()
        lines[2] = line
        file.write_text("\n".join(lines))
        zoo = open_zoo(tmp_path / "zoo")
        assert zoo[0].row["test_acc"] == 0
        with pytest.raises(ConversionError, match=match):
            zoo[2]

    def test_a_missing_epoch(self, tmp_path: Path) -> None:
        model_zoo(tmp_path / "zoo", trials=1)
        file = next((tmp_path / "zoo").glob("*/result.json"))
        lines = file.read_text().splitlines()
        file.write_text("\n".join(lines[1:3]))
        zoo = open_zoo(tmp_path / "zoo")
        assert math.isnan(zoo[0].row["test_acc"])
        with pytest.raises(ConversionError, match=r"training_iteration 3 in .*2 lines up to 2"):
            zoo[1]

    @pytest.mark.parametrize("content", [b"{", b"\xff", b"[]", b"{}"])
    def test_params(self, content: bytes, tmp_path: Path) -> None:
        model_zoo(tmp_path / "zoo", trials=1)
        next((tmp_path / "zoo").glob("*/params.json")).write_bytes(content)
        with pytest.raises(ConversionError, match=r"params\.json"):
            open_zoo(tmp_path / "zoo")[0]
