"""Bad files: every error names the file and the key, and says what was expected and found."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import h5py
import numpy as np
import onnx
import pytest
import torch
from file_writers import (
    WRITERS,
    keras_config,
    write_archive,
    write_keras,
    write_legacy,
    write_npz,
    write_torch,
)
from onnx import helper

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files.graph import MARK
from nfn_graph.converters.io import load, read_tensors, save
from nfn_graph.converters.summary import summary

HUGE = 10**13


def write_safetensors_header(path: Path, header: str, data: bytes = b"") -> None:
    text = header.encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_npy_entry(path: Path, shape: tuple[int, ...], dtype: str = "<f4") -> None:
    buffer = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, header)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("w.npy", buffer.getvalue() + bytes(16))


def truncated(write: Callable[[Path], Any], part: float = 0.6) -> Callable[[Path], None]:
    def build(path: Path) -> None:
        write(path)
        data = path.read_bytes()
        path.write_bytes(data[: int(part * len(data))])

    return build


def huge_legacy(path: Path) -> None:
    """The old format declares how many numbers follow; this one declares too many."""
    write_legacy(path)
    data = path.read_bytes()
    # The storage of the first weight has 5 * 3 entries: BININT1 15, as the last of a tuple.
    assert data.count(b"cpuq\x08K\x0fNt") == 1 or data.count(b"K\x0fN") >= 1
    place = data.index(b"K\x0fN")
    long = b"\x8a\x06" + HUGE.to_bytes(6, "little")
    path.write_bytes(data[:place] + long + data[place + 2 :])


def huge_torch(path: Path) -> None:
    tensor = torch.zeros(1).expand(HUGE)
    torch.save({"0.weight": tensor.reshape(10, HUGE // 10)}, path)


def huge_safetensors(path: Path) -> None:
    entry = {"dtype": "F32", "shape": [HUGE, 4], "data_offsets": [0, 16 * HUGE]}
    write_safetensors_header(path, json.dumps({"w": entry}), bytes(64))


def huge_keras(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.attrs["layer_names"] = [b"dense"]
        group = file.create_group("dense")
        group.attrs["weight_names"] = [b"kernel:0"]
        group.create_dataset("kernel:0", (HUGE, 4), "f4", chunks=(1024, 4))


def huge_onnx(path: Path) -> None:
    model = checkpoints.onnx_mlp(checkpoints.mlp())
    model.graph.initializer[0].dims[0] = HUGE
    path.write_bytes(model.SerializeToString())


def duplicate_safetensors(path: Path) -> None:
    entry = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
    write_safetensors_header(path, f'{{"w":{entry},"w":{entry}}}', bytes(8))


def duplicate_zip(name: str, write: Callable[[Path], Any]) -> Callable[[Path], None]:
    def build(path: Path) -> None:
        write(path)
        with zipfile.ZipFile(path) as archive:
            entry = next(n for n in archive.namelist() if n.endswith(name))
            data = archive.read(entry)
        with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "a") as archive:
            archive.writestr(entry, data)

    return build


def duplicate_onnx(path: Path) -> None:
    model = checkpoints.onnx_mlp(checkpoints.mlp())
    model.graph.initializer.append(model.graph.initializer[0])
    path.write_bytes(model.SerializeToString())


def external_onnx(path: Path) -> None:
    model = checkpoints.onnx_mlp(checkpoints.mlp())
    tensor = model.graph.initializer[0]
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/passwd")
    tensor.ClearField("raw_data")
    path.write_bytes(model.SerializeToString())


def huge_archive(path: Path) -> None:
    """Zeros that take a thousand times more space when they are unpacked."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("config.json", json.dumps(keras_config()))
        archive.writestr("model.weights.h5", bytes(2**27))


def bare_archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model.weights.h5", b"")


def lambda_archive(path: Path) -> None:
    config = keras_config()
    code = {"name": "code", "function": {"class_name": "__lambda__", "config": {"code": "4wAAAA"}}}
    config["config"]["layers"].append({"class_name": "Lambda", "config": code})
    checkpoints.write_keras_archive(path, checkpoints.keras_mlp(checkpoints.mlp()), config)


def linked_keras(path: Path) -> None:
    write_keras(path.with_name("other.h5"))
    write_keras(path)
    with h5py.File(path, "r+") as file:
        del file["dense_0"]["dense_0"]["kernel:0"]
        target = h5py.ExternalLink("other.h5", "dense_0/dense_0/kernel:0")
        file["dense_0"]["dense_0"]["kernel:0"] = target


def external_keras(path: Path) -> None:
    path.with_name("raw.bin").write_bytes(bytes(60))
    write_keras(path)
    with h5py.File(path, "r+") as file:
        del file["dense_0"]["dense_0"]["kernel:0"]
        stored = [(str(path.with_name("raw.bin")), 0, 60)]
        file["dense_0"]["dense_0"].create_dataset("kernel:0", (3, 5), "f4", external=stored)


def module_pickle(path: Path) -> None:
    torch.save(checkpoints.mlp(), path)


def sparse(path: Path) -> None:
    torch.save({"0.weight": torch.eye(3).to_sparse()}, path)


def not_a_chain(path: Path) -> None:
    torch.save({"0.weight": torch.randn(4, 3), "1.weight": torch.randn(2, 5)}, path)


def unknown_operation(path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("LSTM", ["y", "w", "w"], ["z"], "memory", hidden_size=2),
    ]
    model = checkpoints.onnx_model(nodes, {"w": torch.randn(3, 3)}, {"x": [1, 3]}, ["z"])
    path.write_bytes(model.SerializeToString())


def damaged_graph(path: Path) -> None:
    header = {"__metadata__": {MARK: '{"version": 1, "layout": {}}'}}
    write_safetensors_header(path, json.dumps(header))


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    **{f"truncated.{name}": (truncated(write), "truncated") for name, write in WRITERS.items()},
    **{
        f"beginning.{name}": (truncated(write, 0.02), "truncated")
        for name, write in WRITERS.items()
    },
    "empty.pt": (lambda p: p.touch(), "empty file"),
    "magic.pt": (lambda p: p.write_bytes(b"\x00\x01" * 300), "begins with"),
    "text.safetensors": (lambda p: p.write_text("hello " * 100), "begins with"),
    "array.npz": (lambda p: p.write_bytes(b"\x93NUMPY" + bytes(100)), "single array"),
    "directory.pt": (lambda p: p.mkdir(), "directory"),
    "pickle.pt": (lambda p: p.write_bytes(pickle.dumps({"a": 1})), "it may run code"),
    "zip.pt": (lambda p: zipfile.ZipFile(p, "w").writestr("a.txt", "b"), "zip archive of"),
    "module.pt": (module_pickle, "Save model.state_dict"),
    "tensor.pt": (lambda p: torch.save(torch.zeros(3), p), "Tensor"),
    "nothing.pt": (lambda p: torch.save({}, p), "no tensors"),
    "huge.pt": (huge_torch, "'0.weight'.*at most"),
    "huge.legacy.pt": (huge_legacy, "'0.weight'.*at most"),
    "huge.safetensors": (huge_safetensors, "truncated"),
    "huge.npz": (lambda p: write_npy_entry(p, (HUGE, 4)), "'w'.*at most"),
    "negative.npz": (lambda p: write_npy_entry(p, (-1, 4)), "'w'.*at most"),
    "huge.h5": (huge_keras, "kernel:0'.*at most"),
    "huge.onnx": (huge_onnx, "'w0'.*at most"),
    "objects.npz": (lambda p: write_npy_entry(p, (2,), "|O"), "'w'.*Python objects"),
    "words.npz": (lambda p: write_npy_entry(p, (2,), "<U2"), "'w'.*<U2"),
    "duplicate.safetensors": (duplicate_safetensors, "'w' twice"),
    "duplicate.npz": (duplicate_zip("0.weight.npy", write_npz), "'0.weight.npy' twice"),
    "duplicate.pt": (duplicate_zip("data/0", write_torch), "data/0' twice"),
    "duplicate.onnx": (duplicate_onnx, "'w0' twice"),
    "complex.pt": (
        lambda p: torch.save({"0.weight": torch.zeros(2, 2, dtype=torch.complex64)}, p),
        "dense real tensor '0.weight'.*complex",
    ),
    "complex.npz": (lambda p: write_npy_entry(p, (2, 1), "<c8"), "dense real tensor 'w'.*complex"),
    "sparse.pt": (sparse, "'0.weight'.*to_dense"),
    "shapes.pt": (not_a_chain, "weight"),
    "external.onnx": (external_onnx, "'w0'.*not followed"),
    "operation.onnx": (unknown_operation, "'memory' .LSTM"),
    "linked.h5": (linked_keras, "kernel:0'.*a link"),
    "external.h5": (external_keras, "kernel:0'.*not followed"),
    "duplicate.keras": (duplicate_zip("config.json", write_archive), "config.json' twice"),
    "huge.keras": (huge_archive, "'model.weights.h5'.*at most"),
    "bare.keras": (bare_archive, "'config.json'.*got .'model.weights.h5'"),
    "lambda.keras": (lambda_archive, "'code' .Lambda.*never run"),
    "damaged.graph": (damaged_graph, "written by nfn-graph"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_file(name: str, tmp_path: Path) -> None:
    build, reason = BAD[name]
    path = tmp_path / name
    build(path)
    with pytest.raises(ConversionError, match=reason) as error:
        load(path)
    message = str(error.value)
    assert str(path) in message
    assert "Expected" in message
    assert "got" in message


def test_the_same_files_are_good_when_whole(tmp_path: Path) -> None:
    for name, write in WRITERS.items():
        write(tmp_path / name)
        sizes = [graph_type.size for graph_type in load(tmp_path / name).spec.neurons]
        assert sizes == [3, None, None, 2]


def test_missing_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.pt"):
        load(tmp_path / "nothing.pt")


class Payload:
    """A pickle that would create a file when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["zip", "legacy", "pickle", "npz"])
def test_code_in_a_file_is_not_run(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    made, path = tmp_path / "made", tmp_path / "file"
    content = {"0.weight": torch.zeros(2, 2), "payload": Payload(made)}
    if kind == "pickle":
        path.write_bytes(pickle.dumps(content))
    elif kind == "npz":
        path = tmp_path / "file.npz"
        np.savez(path, **{"0.weight": np.array([Payload(made)], dtype=object)})
    else:
        torch.save(content, path, _use_new_zipfile_serialization=kind == "zip")
    with pytest.raises(ConversionError):
        load(path)
    assert not made.exists()
    # The payload is harmful indeed.
    pickle.loads(pickle.dumps(Payload(made)))
    assert made.exists()


def test_nan_and_infinity_are_kept_and_counted(tmp_path: Path) -> None:
    model = checkpoints.mlp()
    tensors = dict(model.state_dict())
    tensors["0.weight"][0, 1] = float("nan")
    tensors["0.bias"][:2] = float("inf")
    checkpoints.write_safetensors(tmp_path / "x.safetensors", tensors)
    graph = load(tmp_path / "x.safetensors")
    table = summary(graph)
    assert (table.nan, table.inf) == (1, 2)
    assert "1" in str(table)
    save(graph, tmp_path / "y.safetensors")
    again = read_tensors(tmp_path / "y.safetensors")
    for key, tensor in tensors.items():
        assert again[key].numpy().tobytes() == tensor.numpy().tobytes()


def test_unsupported_suffix_and_template(tmp_path: Path) -> None:
    write_torch(tmp_path / "x.pt")
    graph = load(tmp_path / "x.pt")
    with pytest.raises(ConversionError, match=r"\.safetensors.*got.*x\.gguf"):
        save(graph, tmp_path / "x.gguf")
    with pytest.raises(ConversionError, match="template"):
        save(graph, tmp_path / "x.onnx")
    with pytest.raises(ConversionError, match="no template"):
        save(graph, tmp_path / "y.pt", template=tmp_path / "x.pt")
    with pytest.raises(FileNotFoundError):
        save(graph, tmp_path / "missing" / "x.pt")
