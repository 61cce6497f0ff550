"""Unusual keys: every format keeps them, or names the one that it cannot keep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nfn_graph import WeightGraph
from nfn_graph.converters import ConversionError, from_module, from_state_dict, load, save
from nfn_graph.converters.files import onnx, safetensors
from nfn_graph.converters.files.atomic import replacing
from nfn_graph.converters.files.checks import check_unique
from nfn_graph.converters.io import read_tensors

KEYS = [
    ".weight", "..weight", "/weight", "../up.weight", "/a.weight", "a//b.weight", "a/./b.weight",
    "\\a.weight", "C:\\a.weight", "é.weight", "a b.weight", "\n.weight", "a\0b.weight",
    "__metadata__", "weight", "a:0.weight", "nfn_graph.keys",
]  # fmt: skip


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".npz", ".h5"])
@pytest.mark.parametrize("key", KEYS, ids=ascii)
def test_a_file_is_whole_or_refused(key: str, suffix: str, tmp_path: Path) -> None:
    graph = from_state_dict({key: torch.randn(4, 3)}, orientation="out_in")
    path = tmp_path / f"x{suffix}"
    try:
        save(graph, path)
    except ConversionError as error:
        name = key.removesuffix(".weight") if suffix == ".h5" else key
        assert suffix != ".pt" and repr(name)[1:-1] in str(error) and str(path) in str(error)
        assert list(tmp_path.iterdir()) == []
        return
    if suffix == ".h5":  # which has names and an axis order of its own
        again = load(path)
        assert torch.equal(*(g["input", "weight", "output"].edge_attr for g in (again, graph)))
    else:
        assert list(read_tensors(path)) == [key]


@pytest.mark.parametrize("dtype", ["float8_e4m3fnuz", "complex128"])
def test_safetensors_refuses_types_that_it_would_not_read(dtype: str, tmp_path: Path) -> None:
    tensor = torch.zeros(2, 2).to(getattr(torch, dtype))
    with pytest.raises(ConversionError, match=rf"x\.safetensors.*'a' of torch\.{dtype}"):
        safetensors.write(tmp_path / "x.safetensors", {"a": tensor})
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_type_of_a_safetensors_file_is_named(tmp_path: Path) -> None:
    text = b'{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"\0")
    with pytest.raises(ConversionError, match=r"'a' of .*x\.safetensors.*got 'F4'"):
        safetensors.read(tmp_path / "x.safetensors")


def test_repeated_keys_are_found_in_time() -> None:
    """One comparison for each pair of keys would take hours."""
    keys = [f"key{i}" for i in range(300_000)]
    with pytest.raises(ConversionError, match=r"'key7', 'key9' twice"):
        check_unique(Path("x"), [*keys, "key9", "key7"])


class Turned(nn.Module):
    """A matrix that is stored `[in, out]`, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.kernel = nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Two linear maps."""
        return self.first(x) @ self.kernel


@pytest.mark.parametrize(
    "graph",
    [
        from_module(Turned(), torch.empty(1, 3)),
        from_state_dict(
            {"a/kernel:0": torch.randn(4, 3), "b/kernel:0": torch.randn(2, 4)}, orientation="out_in"
        ),
    ],
    ids=["stored in either order", "with names of Keras"],
)
def test_axes_say_how_kernels_of_keras_are_written(graph: WeightGraph, tmp_path: Path) -> None:
    save(graph, tmp_path / "x.h5")
    again = load(tmp_path / "x.h5")
    assert again.spec == graph.spec
    for key in graph.spec.weight:
        assert torch.equal(again[key].edge_attr, graph[key].edge_attr)


def test_no_tensor_is_lost_on_the_way_to_keras(tmp_path: Path) -> None:
    graph = from_state_dict({"w1": torch.randn(4, 3), "w2": torch.randn(2, 4)})
    with pytest.raises(ConversionError, match="'w1' and 'w2' for 'layer/kernel:0'"):
        save(graph, tmp_path / "x.h5")
    transposed = nn.Sequential(nn.ConvTranspose2d(3, 5, 2), nn.Conv2d(5, 3, 2))
    with pytest.raises(ConversionError, match=r"'0\.weight' of shape \[3, 5, 2, 2\]"):
        save(from_module(transposed, torch.empty(1, 3, 9, 9)), tmp_path / "x.h5")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_onnx_template_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.onnx").write_bytes(b"\x08\x07nonsense")
    with pytest.raises(ConversionError, match=r"complete ONNX model in .*t\.onnx"):
        onnx.write(tmp_path / "x.onnx", {"a": torch.zeros(1)}, tmp_path / "t.onnx")


def test_paths_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    graph = from_state_dict({"w": torch.randn(4, 3)}, orientation="out_in")
    path = tmp_path / "missing" / "x.pt"
    with pytest.raises(FileNotFoundError, match=rf"Expected.*'{path}'.*got no folder"):
        save(graph, path)
    (tmp_path / "folder.pt").mkdir()
    with pytest.raises(IsADirectoryError, match=r"Expected.*folder\.pt' \(got a folder"):
        save(graph, tmp_path / "folder.pt")
    longest = tmp_path / ("x" * 252 + ".pt")
    with replacing(longest) as temporary:
        temporary.write_bytes(b"1")
    assert list(tmp_path.glob("x*")) == [longest]
