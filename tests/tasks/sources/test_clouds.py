"""Point clouds and meshes from files that the tests write, and distances to them."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from nfn_graph.tasks.sources import SourceError, open_clouds, sample_distances
from nfn_graph.tasks.sources.clouds import normalise, sample_surface
from nfn_graph.tasks.sources.meshes import read_off, read_ply

VERTICES = np.array([[0, 0, 0], [2, 0, 0], [2, 1, 0], [0, 1, 0], [0, 0, 3]], float)
OFF = "OFF\n5 2 0\n" + "\n".join(" ".join(map(str, v)) for v in VERTICES)
OFF += "\n4 0 1 2 3 # the floor\n3 0 1 4\n"
TRIANGLES = [[0, 1, 2], [0, 2, 3], [0, 1, 4]]
PLY_HEAD = "ply\nformat {}\ncomment c\nelement vertex 5\nproperty double x\nproperty double y\n"
PLY_HEAD += "property double z\nproperty uchar red\nelement face 2\n"
PLY_HEAD += "property list uchar int vertex_indices\nend_header\n"


def ply_ascii() -> bytes:
    rows = "".join(" ".join(map(str, v)) + " 7\n" for v in VERTICES)
    return (PLY_HEAD.format("ascii 1.0") + rows + "4 0 1 2 3\n3 0 1 4\n").encode()


def ply_binary() -> bytes:
    rows = b"".join(struct.pack("<dddB", *v, 7) for v in VERTICES)
    faces = struct.pack("<B4i", 4, 0, 1, 2, 3) + struct.pack("<B3i", 3, 0, 1, 4)
    return PLY_HEAD.format("binary_little_endian 1.0").encode() + rows + faces


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.off", OFF.encode()),
        ("b.off", OFF.replace("OFF\n", "OFF", 1).encode()),
        ("a.ply", ply_ascii()),
        ("b.ply", ply_binary()),
    ],
)
def test_meshes(tmp_path: Path, name: str, data: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    vertices, triangles = (read_off if name.endswith("off") else read_ply)(path)
    np.testing.assert_array_equal(vertices, VERTICES)
    assert triangles.tolist() == TRIANGLES


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.off", b""),
        ("a.off", b"solid"),
        ("a.off", OFF.encode()[:-20]),
        ("a.off", OFF.replace("3 0 1 4", "3 0 1 9").encode()),
        ("a.off", OFF.replace("2.0", "x", 1).encode()),
        ("a.off", OFF.replace("3 0 1 4", "nan 0 1 4").encode()),
        ("a.off", OFF.replace("3 0 1 4", "3 0 inf 4").encode()),
        ("a.off", OFF.replace("3 0 1 4", "3 0 1.5 4").encode()),
        ("a.ply", b"ply\n"),
        ("a.ply", ply_ascii().replace(b"ascii", b"binary_big_endian")),
        ("a.ply", ply_binary()[:-30]),
        ("a.ply", ply_binary()[:-3]),
        ("a.ply", ply_ascii()[:-3]),
        ("a.ply", ply_ascii().replace(b"double x", b"double q")),
    ],
)
def test_damaged_meshes(tmp_path: Path, name: str, data: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"Expected .*a\.(off|ply)"):
        (read_off if name.endswith("off") else read_ply)(path)


def test_points_lie_on_the_surface_in_proportion_to_area() -> None:
    points = sample_surface((VERTICES, np.array(TRIANGLES)), 4000, 0)
    floor = points[:, 2] == 0
    wall = points[:, 1] == 0
    assert (floor | wall).all()
    assert abs(floor.mean() - 2 / 5) < 0.03
    assert (points >= 0).all()


def test_folder_with_splits(tmp_path: Path) -> None:
    for name in ("bed", "chair"):
        for split in ("train", "test"):
            folder = tmp_path / name / split
            folder.mkdir(parents=True)
            (folder / "1.off").write_text(OFF)
    clouds = open_clouds(tmp_path, num_points=50)
    assert clouds.points.shape == (4, 50, 3)
    assert clouds.classes == ("bed", "chair")
    assert clouds.labels.tolist() == [0, 0, 1, 1]
    assert clouds.is_test.tolist() == [True, False, True, False]


def test_npz(tmp_path: Path) -> None:
    points = np.random.default_rng(0).random((4, 30, 3)).astype(np.float16)
    np.savez(tmp_path / "a.npz", points=points, label=[0, 1, 0, 1], train=[1, 1, 0, 0])
    clouds = open_clouds(tmp_path / "a.npz", num_points=20)
    assert clouds.points.shape == (4, 20, 3)
    assert clouds.test_index.tolist() == [2, 3]
    torch.testing.assert_close(clouds.points.mean(1), torch.zeros(4, 3), atol=1e-6, rtol=0)
    torch.testing.assert_close(clouds.points.norm(dim=2).amax(1), torch.ones(4))


@pytest.mark.parametrize(
    ("arrays", "match"),
    [
        ({"points": np.zeros((2, 5, 3))}, "labels"),
        ({"points": np.zeros((2, 5, 2)), "labels": [0, 1]}, r"\[shapes, points, 3\]"),
        ({"points": np.zeros((2, 5, 3)), "labels": [0]}, "2 labels"),
        ({"points": np.zeros((2, 5, 3)), "labels": [0.5, 1]}, "integers in 'labels'"),
        ({"points": np.zeros((2, 5, 3)), "labels": [0, -1]}, "labels from 0"),
        ({"points": np.zeros((2, 5, 3)), "labels": [0, 1], "is_test": [1]}, "2 split flags"),
        ({"points": np.zeros((2, 0, 3)), "labels": [0, 1]}, r"\[shapes, points, 3\]"),
        ({"points": np.zeros((0, 5, 3)), "labels": np.zeros(0, int)}, r"\[shapes, points, 3\]"),
        ({"points": np.full((2, 5, 3), np.inf), "labels": [0, 1]}, "finite points"),
    ],
)
def test_npz_refused(tmp_path: Path, arrays: dict[str, np.ndarray], match: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(SourceError, match=match):
        open_clouds(tmp_path / "a.npz")


def test_files_outside_of_a_class_are_refused(tmp_path: Path) -> None:
    (tmp_path / "1.off").write_text(OFF)
    with pytest.raises(SourceError, match=r"for each class .*1\.off"):
        open_clouds(tmp_path)


def test_where_to_put_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Nothing is downloaded"):
        open_clouds(tmp_path / "nowhere")


def test_distances() -> None:
    sphere = torch.randn(2, 4000, 3)
    sphere = normalise(sphere / sphere.norm(dim=-1, keepdim=True))
    samples = sample_distances(sphere, 200, [1, 2])
    assert samples.points.abs().max() <= 1
    exact = (samples.points.norm(dim=-1, keepdim=True) - 1).abs()
    assert (samples.distances - exact).abs().max() < 0.1
    assert (samples.distances < 0.1).float().mean() > 0.4
    alone = sample_distances(sphere[1:], 200, [2])
    assert torch.equal(alone.points[0], samples.points[1])
    assert not torch.equal(samples.points[0], samples.points[1])
