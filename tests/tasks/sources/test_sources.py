"""Image sources: every format, from files that the tests write, and refusals."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from zoo_data import RANDOM, write_idx

from nfn_graph.tasks.sources import SourceError, open_images


def test_digits() -> None:
    images = open_images("digits")
    assert images.pixels.shape == (1797, 1, 8, 8)
    assert images.pixels.max() == 1 and images.pixels.min() == 0
    assert len(images.train_index) + len(images.test_index) == 1797
    assert len(images.test_index) == 359
    assert len(images.classes) == 10


@pytest.mark.parametrize("compressed", [False, True])
def test_idx(tmp_path: Path, compressed: bool) -> None:
    pixels, labels = write_idx(tmp_path, compressed=compressed)
    images = open_images(tmp_path)
    assert images.pixels.dtype == torch.uint8
    np.testing.assert_array_equal(images.pixels.squeeze(1).numpy(), pixels)
    np.testing.assert_array_equal(images.labels.numpy(), labels)
    assert images.test_index.tolist() == [6, 7, 8]
    assert images.values(slice(0, 1)).max() == pixels[0].max() / np.float32(255)


def test_idx_missing_file(tmp_path: Path) -> None:
    write_idx(tmp_path, compressed=False)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(SourceError, match=r"test labels.*t10k-labels-idx1-ubyte"):
        open_images(tmp_path)


@pytest.mark.parametrize("change", ["short", "long", "magic", "gzip", "huge"])
def test_idx_damaged(tmp_path: Path, change: str) -> None:
    write_idx(tmp_path, compressed=change == "gzip")
    path = tmp_path / f"train-images-idx3-ubyte{'.gz' if change == 'gzip' else ''}"
    data = path.read_bytes()
    changed = {
        "short": data[:-1],
        "long": data + b"x",
        "magic": b"\1" + data[1:],
        "gzip": data[:-9],
        "huge": data[:4] + b"\xff" * 12 + data[16:],
    }
    path.write_bytes(changed[change])
    with pytest.raises(SourceError, match=r"Expected .*train-images"):
        open_images(tmp_path)


def cifar_records(count: int, labels: int) -> tuple[np.ndarray, bytes]:
    pixels = RANDOM.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)
    head = np.stack([np.arange(count) % 2] * labels, 1).astype(np.uint8)
    return pixels, np.concatenate([head, pixels.reshape(count, -1)], 1).tobytes()


@pytest.mark.parametrize(
    ("train", "test", "labels"),
    [("data_batch_1.bin", "test_batch.bin", 1), ("train.bin", "test.bin", 2)],
)
def test_cifar_binary(tmp_path: Path, train: str, test: str, labels: int) -> None:
    pixels, data = cifar_records(4, labels)
    (tmp_path / train).write_bytes(data)
    more, data = cifar_records(2, labels)
    (tmp_path / test).write_bytes(data)
    images = open_images(tmp_path)
    np.testing.assert_array_equal(images.pixels.numpy(), np.concatenate([pixels, more]))
    assert images.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert images.is_test.tolist() == [False] * 4 + [True] * 2


def test_cifar_truncated(tmp_path: Path) -> None:
    _, data = cifar_records(2, 1)
    (tmp_path / "data_batch_1.bin").write_bytes(data[:-5])
    with pytest.raises(SourceError, match=r"records of 3,073 bytes.*data_batch_1\.bin"):
        open_images(tmp_path)


def test_cifar_pickles_are_refused_unread(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (tmp_path / "ran",))  # type: ignore[return-value]

    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(SourceError, match="binary version") as caught:
        open_images(tmp_path)
    assert "np.savez" in str(caught.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("layout", ["hw", "chw", "hwc"])
def test_npz(tmp_path: Path, layout: str) -> None:
    pixels = RANDOM.integers(0, 256, (6, 3, 5, 4), dtype=np.uint8)
    stored = {"hw": pixels[:, 0], "chw": pixels, "hwc": pixels.transpose(0, 2, 3, 1)}[layout]
    labels = np.array([[0], [1], [2], [0], [1], [2]])
    np.savez(
        tmp_path / "a.npz", x_train=stored[:4], y_train=labels[:4], x_test=stored[4:], y_test=[1, 2]
    )
    images = open_images(tmp_path / "a.npz")
    expected = pixels[:, :1] if layout == "hw" else pixels
    np.testing.assert_array_equal(images.pixels.numpy(), expected)
    assert images.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert images.test_index.tolist() == [4, 5]


def test_npz_with_flags(tmp_path: Path) -> None:
    pixels = RANDOM.random((4, 5, 4))
    np.savez(tmp_path / "a.npz", images=pixels, labels=[0, 1, 0, 1], is_test=[1, 0, 0, 1])
    images = open_images(tmp_path / "a.npz")
    assert images.test_index.tolist() == [0, 3]
    assert images.pixels.dtype == torch.float32


@pytest.mark.parametrize(
    ("arrays", "match"),
    [
        ({"a": np.zeros(3)}, "x_train, y_train"),
        ({"images": np.full((2, 3, 3), 2.0), "labels": [0, 1]}, r"within \[0, 1\]"),
        ({"images": np.full((2, 3, 3), np.nan), "labels": [0, 1]}, r"within \[0, 1\]"),
        ({"images": np.zeros((2, 3, 3)), "labels": [0]}, "2 labels"),
        ({"images": np.zeros((2, 3, 3)), "labels": [0, -1]}, "labels from 0"),
        ({"images": np.zeros((2, 5, 3, 5)), "labels": [0, 1]}, "one or three channels"),
        ({"images": np.zeros((2, 3, 3), np.int64), "labels": [0, 1]}, "uint8"),
        ({"images": np.zeros((2, 3, 3)), "labels": [0.5, 1]}, "integers"),
        ({"images": np.array([None, 1]), "labels": [0, 1]}, "plain arrays"),
        ({"images": np.zeros((2, 3, 3)), "labels": [0, 10**12]}, "labels below 100,000"),
    ],
)
def test_npz_refused(tmp_path: Path, arrays: dict[str, np.ndarray], match: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(SourceError, match=match):
        open_images(tmp_path / "a.npz")


def test_image_folder(tmp_path: Path) -> None:
    for i, name in enumerate(("cat", "dog")):
        (tmp_path / name).mkdir()
        for k in range(3):
            Image.fromarray(np.full((4, 6), 100 * i + k, np.uint8)).save(
                tmp_path / name / f"{k}.png"
            )
    images = open_images(tmp_path)
    assert images.classes == ("cat", "dog")
    assert images.shape == (1, 4, 6)
    assert images.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert images.pixels[:, 0, 0, 0].tolist() == [0, 100, 1, 101, 2, 102]
    (tmp_path / "dog" / "3.png").write_bytes(b"no picture")
    with pytest.raises(SourceError, match=r"3\.png"):
        open_images(tmp_path)


def test_every_class_of_an_image_folder_is_trained_and_tested(tmp_path: Path) -> None:
    for label in range(5):
        (tmp_path / f"class{label}").mkdir()
        for k in range(10):
            Image.new("L", (2, 2)).save(tmp_path / f"class{label}" / f"{k}.png")
    (tmp_path / ".checkpoints").mkdir()
    images = open_images(tmp_path)
    assert images.labels[images.test_index].bincount().tolist() == [2] * 5
    assert images.labels[images.train_index].bincount().tolist() == [8] * 5


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_pictures_with_more_than_8_bits_are_refused(tmp_path: Path, dtype: type) -> None:
    (tmp_path / "a").mkdir()
    Image.fromarray(np.full((2, 2), 1000, dtype)).save(tmp_path / "a" / "x.tiff")
    with pytest.raises(SourceError, match=r"8 bits per channel in .*x\.tiff"):
        open_images(tmp_path)


def test_image_folder_with_splits_sizes_and_colours(tmp_path: Path) -> None:
    for split, mode, size in (("train", "RGB", (4, 4)), ("test", "L", (6, 8))):
        for name in ("a", "b"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.new(mode, size).save(tmp_path / split / name / "x.png")
    with pytest.raises(SourceError, match="test images of shape"):
        open_images(tmp_path)
    images = open_images(tmp_path, size=5)
    assert images.shape == (3, 5, 5)
    assert images.is_test.tolist() == [False, False, True, True]


def test_where_to_put_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Nothing is downloaded"):
        open_images(tmp_path / "nowhere")
    with pytest.raises(SourceError, match="a subfolder of pictures"):
        open_images(tmp_path)


def test_fingerprint_tells_data_apart(tmp_path: Path) -> None:
    pixels = RANDOM.random((4, 5, 4))
    np.savez(tmp_path / "a.npz", images=pixels, labels=[0, 1, 0, 1])
    np.savez(tmp_path / "b.npz", images=pixels, labels=[0, 1, 1, 1])
    prints = [open_images(tmp_path / f"{n}.npz").fingerprint for n in "aab"]
    assert prints[0] == prints[1] != prints[2]


def test_a_damaged_picture_is_refused(tmp_path: Path) -> None:
    """For a broken part of a PNG, Pillow raises a SyntaxError."""
    (tmp_path / "cats").mkdir()
    path = tmp_path / "cats" / "a.png"
    Image.new("L", (5, 5)).save(path)
    data = path.read_bytes()
    size = data.index(b"IDAT") - 4
    (length,) = struct.unpack(">I", data[size : size + 4])
    # The pixels end too soon, and the following bytes have no name.
    short = struct.pack(">I", 3) + data[size + 4 : size + 11] + bytes(4)
    path.write_bytes(data[:size] + short + data[size + 12 + length :].replace(b"IEND", b"\xffEND"))
    with pytest.raises(SourceError, match=r"a picture in .*a\.png"):
        open_images(tmp_path)
