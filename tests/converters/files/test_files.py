"""Every format: whatever is written is read back bit for bit."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import h5py
import numpy as np
import pytest
import torch
from comparing import assert_same, equal_bits

import nfn_graph
from networks import chain
from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files import keras, npz, pytorch, safetensors
from nfn_graph.converters.files.atomic import replacing
from nfn_graph.converters.files.graph import MARK, write_graph
from nfn_graph.converters.files.npz import from_array
from nfn_graph.converters.formats import KERAS, NPZ, ONNX, PYTORCH, SAFETENSORS, detect
from nfn_graph.converters.io import load, save
from nfn_graph.converters.state_dict import from_state_dict
from small_disk import small_disk


@pytest.mark.parametrize(
    ("module", "suffix"), [(pytorch, "pt"), (safetensors, "safetensors"), (npz, "npz")]
)
def test_round_trip_of_all_types(module, suffix: str, tmp_path: Path) -> None:
    tensors = checkpoints.all_types()
    path = tmp_path / f"x.{suffix}"
    module.write(path, tensors)
    assert_same(dict(module.read(path)), tensors)
    assert os.listdir(tmp_path) == [path.name]


def test_legacy_format_of_torch(tmp_path: Path) -> None:
    tensors = checkpoints.all_types()
    path = tmp_path / "x.pt"
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    format_, opened = detect(path)
    assert format_ is PYTORCH and pytorch.is_legacy(opened)
    assert_same(dict(pytorch.read(path, legacy=True)), tensors)


def test_files_of_the_formats_own_libraries(tmp_path: Path) -> None:
    tensors = {k: x for k, x in checkpoints.all_types().items() if x.dtype != torch.bfloat16}
    checkpoints.write_npz(tmp_path / "x.npz", tensors)
    assert_same(npz.read(tmp_path / "x.npz"), tensors)
    np.savez_compressed(tmp_path / "c.npz", zeros=np.zeros((100, 100)))
    assert npz.read(tmp_path / "c.npz")["zeros"].shape == (100, 100)
    checkpoints.write_safetensors(tmp_path / "x.safetensors", tensors)
    got = safetensors.read(tmp_path / "x.safetensors")
    assert_same({key: got[key] for key in tensors}, tensors)


def test_a_safetensors_file_comes_back_byte_for_byte(tmp_path: Path) -> None:
    import safetensors.torch as library

    library.save_file(checkpoints.all_types(), tmp_path / "x.safetensors", {"format": "pt"})
    safetensors.write(tmp_path / "y.safetensors", safetensors.read(tmp_path / "x.safetensors"))
    written = (tmp_path / "y.safetensors").read_bytes()
    assert written == (tmp_path / "x.safetensors").read_bytes()


def test_arrays_in_other_orders(tmp_path: Path) -> None:
    array = np.arange(6, dtype=">f4").reshape(2, 3)
    np.savez(tmp_path / "x.npz", big=array, fortran=np.asfortranarray(array.astype("f8")))
    got = npz.read(tmp_path / "x.npz")
    expected = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(got["big"], expected)
    assert torch.equal(got["fortran"], expected.double())


@pytest.mark.parametrize("dtype", ["f8", ">f8", "c16"])
def test_doubles_are_numbers_where_long_doubles_are_no_longer(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Windows and on ARM, NumPy treats the two types as one."""
    monkeypatch.setattr(np, "longdouble", np.float64)
    monkeypatch.setattr(np, "clongdouble", np.complex128)
    tensor = from_array("it", np.ones(3, dtype)[::-1])
    assert tensor.dtype == (torch.complex128 if "c" in dtype else torch.float64)


@pytest.mark.parametrize("dtype", [np.longdouble, "O", "U2", "M8[s]", "V3"])
def test_other_arrays_are_no_numbers(dtype: Any) -> None:
    with pytest.raises(ConversionError, match="Expected numbers in it"):
        from_array("it", np.zeros(3, dtype))


def mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
@pytest.mark.parametrize(("module", "suffix"), [(pytorch, "pt"), (safetensors, "safetensors")])
def test_large_files_are_mapped_and_small_ones_are_not(module, suffix: str, tmp_path: Path) -> None:
    for name, size in (("large", 2**19), ("small", 2**4)):
        module.write(tmp_path / f"{name}.{suffix}", {"w": torch.randn(size)})
    large = module.read(tmp_path / f"large.{suffix}")
    small = module.read(tmp_path / f"small.{suffix}")
    assert mapped(tmp_path / f"large.{suffix}")
    assert not mapped(tmp_path / f"small.{suffix}")
    # A mapped file can be replaced while it is in use.
    before = large["w"].clone()
    module.write(tmp_path / f"large.{suffix}", {"w": torch.zeros(2**19)})
    assert torch.equal(large["w"], before)
    assert small["w"].numel() == 2**4


def test_a_rezipped_torch_file_is_not_mapped(tmp_path: Path) -> None:
    import zipfile

    tensors = {"w": torch.zeros(2**21)}
    torch.save(tensors, tmp_path / "x.pt")
    with (
        zipfile.ZipFile(tmp_path / "x.pt") as old,
        zipfile.ZipFile(tmp_path / "y.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for entry in old.infolist():
            data = old.read(entry)
            new.writestr(entry.filename, data if entry.file_size < 2**20 else os.urandom(len(data)))
    assert (tmp_path / "y.pt").stat().st_size > 2**20
    got = pytorch.read(tmp_path / "y.pt")
    with zipfile.ZipFile(tmp_path / "y.pt") as new:
        data = next(new.read(n) for n in new.namelist() if n.endswith("data/0"))
    assert got["w"].numpy().tobytes() == data


def test_shared_tensors_are_written_under_both_keys(tmp_path: Path) -> None:
    shared = torch.randn(3, 3)
    tensors = {"a": shared, "b": shared, "c": shared.T, "d": shared[0]}
    safetensors.write(tmp_path / "x.safetensors", tensors)
    got = safetensors.read(tmp_path / "x.safetensors")
    assert all(torch.equal(got[key], tensors[key]) for key in tensors)


def test_format_is_told_by_content(tmp_path: Path) -> None:
    model = checkpoints.mlp()
    tensors = dict(model.state_dict())
    torch.save(tensors, tmp_path / "a.npz")
    checkpoints.write_safetensors(tmp_path / "b.pt", tensors)
    checkpoints.write_npz(tmp_path / "c.npz", tensors)
    (tmp_path / "c.npz").rename(tmp_path / "c.onnx")
    checkpoints.write_keras(tmp_path / "d.pt", checkpoints.keras_mlp(model))
    (tmp_path / "e").write_bytes(checkpoints.onnx_mlp(model).SerializeToString())
    found = [detect(tmp_path / name)[0] for name in ("a.npz", "b.pt", "c.onnx", "d.pt", "e")]
    assert found == [PYTORCH, SAFETENSORS, NPZ, KERAS, ONNX]


def test_keras_files_in_all_layouts(tmp_path: Path) -> None:
    layers = checkpoints.keras_mlp(checkpoints.mlp())
    checkpoints.write_keras(tmp_path / "weights.h5", layers)
    config = checkpoints.sequential(("Dense", "dense_0", {}))
    checkpoints.write_keras(tmp_path / "model.h5", layers, config)
    weights, model = keras.read(tmp_path / "weights.h5"), keras.read(tmp_path / "model.h5")
    assert weights.config is None
    assert model.config == config
    assert_same(weights.tensors, model.tensors)
    assert list(model.tensors)[:2] == ["dense_0/dense_0/kernel:0", "dense_0/dense_0/bias:0"]
    assert np.array_equal(model.tensors["dense_0/dense_0/kernel:0"], layers["dense_0"]["kernel"])
    with h5py.File(tmp_path / "new.weights.h5", "w") as file:
        for name, values in layers.items():
            for i, value in enumerate(values.values()):
                file.create_dataset(f"layers/{name}/vars/{i}", data=value)
    numbered = keras.read(tmp_path / "new.weights.h5")
    assert numbered.layers["layers/dense_1"] == ("layers/dense_1/vars/0", "layers/dense_1/vars/1")


def test_keras_round_trip(tmp_path: Path) -> None:
    tensors = {
        f"layer{i}/layer{i}/{key}:0": x
        for i, (key, x) in enumerate(checkpoints.all_types().items())
    }
    keras.write(tmp_path / "x.h5", tensors)
    assert_same(keras.read(tmp_path / "x.h5").tensors, tensors)


def test_keras_template_keeps_all_else(tmp_path: Path) -> None:
    layers = checkpoints.keras_mlp(checkpoints.mlp())
    config = checkpoints.sequential(("Dense", "dense_0", {}))
    checkpoints.write_keras(tmp_path / "x.h5", layers, config)
    tensors = {key: x + 1 for key, x in keras.read(tmp_path / "x.h5").tensors.items()}
    keras.write(tmp_path / "y.h5", tensors, template=tmp_path / "x.h5")
    again = keras.read(tmp_path / "y.h5")
    assert_same(again.tensors, tensors)
    assert again.config == config
    big = {"dense": {"kernel": np.ones((3, 2), ">f4")}}
    checkpoints.write_keras(tmp_path / "big.h5", big)
    other = {"dense/dense/kernel:0": torch.rand(3, 2)}
    keras.write(tmp_path / "z.h5", other, template=tmp_path / "big.h5")
    assert_same(keras.read(tmp_path / "z.h5").tensors, other)
    key = next(iter(tensors))
    with pytest.raises(ConversionError, match="as in"):
        keras.write(tmp_path / "y.h5", {key: torch.zeros(1)}, template=tmp_path / "x.h5")
    assert_same(keras.read(tmp_path / "y.h5").tensors, tensors)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_graph_round_trip(channels: int, dtype: torch.dtype, tmp_path: Path) -> None:
    graph = chain((2, 5, 4, 3), [(3, 2), (), ()], [True, False, True], dtype, channels)
    graph.layout = replace(
        graph.layout,
        carried={"count": torch.tensor(3), "a/b": torch.zeros(2, dtype=torch.bool)},
        keys=("count", "0.weight", "a/b"),
        channels={"grad": {"0.weight": torch.float16}},
        before=("a transform", replace(graph.layout, carried={"count": torch.tensor(4)})),
    )
    graph.y = torch.tensor([2.0])
    graph.names = ("a", ["b", {"c": None}])
    graph["hidden1"].mark = torch.arange(5)
    write_graph(tmp_path / "g.safetensors", graph)
    again = load(tmp_path / "g.safetensors")
    assert MARK in safetensors.read_file(tmp_path / "g.safetensors").metadata
    assert again.layout == graph.layout
    assert again.layout.keys == graph.layout.keys
    assert again.layout.channels == graph.layout.channels
    assert_same(dict(again.layout.carried), dict(graph.layout.carried))
    assert again.layout.before[0] == "a transform"
    assert again.layout.before[1] == graph.layout.before[1]
    assert_same(again.layout.before[1].carried, graph.layout.before[1].carried)
    for key in graph.spec.neuron:
        assert equal_bits(again[key].x, graph[key].x)
    for key in graph.spec.weight:
        assert equal_bits(again[key].edge_attr, graph[key].edge_attr)
    assert_same(again.to_tensors(), graph.to_tensors())
    assert torch.equal(again.y, graph.y)
    assert again.names == graph.names
    assert torch.equal(again["hidden1"].mark, graph["hidden1"].mark)
    assert again.node_types == graph.node_types
    assert again.edge_types == graph.edge_types


def test_misaligned_numbers_are_read(tmp_path: Path) -> None:
    """Programs need not pad the header or sort the tensors by size."""
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    text = json.dumps(header).encode()
    numbers = torch.tensor([1.5, -2.0])
    content = len(text).to_bytes(8, "little") + text + b"\x07" + numbers.numpy().tobytes()
    (tmp_path / "x.safetensors").write_bytes(content)
    got = safetensors.read(tmp_path / "x.safetensors")
    assert int(got["a"]) == 7
    assert torch.equal(got["b"], numbers)


def test_a_buffer_does_not_drag_its_file_along(tmp_path: Path) -> None:
    """Tensors share the memory of the file they were read from; a saved one does not."""
    tensors = {"w": torch.randn(200, 200), "count": torch.tensor(1)}
    safetensors.write(tmp_path / "x.safetensors", tensors)
    pytorch.write(
        tmp_path / "x.pt", {"count": safetensors.read(tmp_path / "x.safetensors")["count"]}
    )
    assert (tmp_path / "x.pt").stat().st_size < 4000


def test_graph_refuses_what_it_cannot_keep(tmp_path: Path) -> None:
    graph = chain((2, 3, 1))
    with pytest.raises(ValueError, match="one network"):
        write_graph(tmp_path / "g", nfn_graph.Batch.from_data_list([graph, graph]))
    graph.model = torch.nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"'graph\.model'.*Linear"):
        write_graph(tmp_path / "g", graph)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), replacing(path) as temporary:
        temporary.write_bytes(b"new")
        raise ZeroDivisionError
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    with replacing(path) as temporary:
        temporary.write_bytes(b"new")
    assert path.read_bytes() == b"new"


@pytest.mark.skipif(os.name != "posix", reason="needs file modes")
def test_written_files_have_usual_modes(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    usual = stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    for module, name in ((pytorch, "x.pt"), (safetensors, "x.safetensors"), (npz, "x.npz")):
        module.write(tmp_path / name, {"a": torch.zeros(2)})
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == usual


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ModuleNotFoundError, match=r"'h5py'.*pip install 'nfn-graph\[converters\]'"):
        keras.read(tmp_path / "x.h5")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".npz"])
def test_a_full_disk_is_called_that(suffix: str, tmp_path: Path) -> None:
    """Any error of the library that writes a format is reported, and the old file is kept."""
    small, large = (
        from_state_dict(checkpoints.mlp((3, width, 2)).state_dict()) for width in (4, 4000)
    )
    with small_disk(tmp_path / "small", 64 * 1024) as folder:
        path = folder / f"network{suffix}"
        save(small, path)
        before = path.read_bytes()
        with pytest.raises(OSError, match=r"Expected enough space.*network.*got a full disk"):
            save(large, path)
        assert path.read_bytes() == before and list(folder.iterdir()) == [path]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_long_metadata_is_read_in_bounded_memory(tmp_path: Path) -> None:
    """88 MB of text in the header of a small network, as programs of other people write it."""
    path = tmp_path / "x.safetensors"
    tensors = checkpoints.mlp().state_dict()
    safetensors.write(path, tensors, {"comment": "x" * 88_000_000})
    script = (
        "import re, sys, pathlib\n"
        "from nfn_graph.converters.files import safetensors\n"
        "def peak():\n"
        "    status = pathlib.Path('/proc/self/status').read_text()\n"
        "    return int(re.search(r'VmHWM:\\s+(\\d+)', status)[1]) >> 10\n"
        "before = peak()\n"
        "found = safetensors.read(pathlib.Path(sys.argv[1]))\n"
        "print(len(found), peak() - before)\n"
    )
    command = [sys.executable, "-c", script, str(path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert int(found[0]) == len(tensors) and int(found[1]) < 400
