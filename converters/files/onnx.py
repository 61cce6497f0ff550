"""Reads ONNX files: the model, and its initialisers and constants as tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from nfn_graph.converters.errors import ConversionError, require
from nfn_graph.converters.files.atomic import replacing
from nfn_graph.converters.files.checks import (
    OpenedFile,
    check_declared,
    check_tensors,
    check_unique,
    complete,
)
from nfn_graph.converters.files.npz import from_array


def recognise(opened: OpenedFile) -> bool:
    """Whether a file is a protocol buffer with the fields of an ONNX model.

    ONNX has no magic bytes, so all fields are scanned: field 1 is the version of the format, a
    small number, and field 7 is the graph. No field number is above 25.
    """
    fields = set()
    with open(opened.path, "rb") as file:
        while file.tell() < opened.size:
            tag = _varint(file)
            field, wire = (0, 0) if tag is None else divmod(tag, 8)
            if not 1 <= field <= 25 or wire not in (0, 2):
                return False
            value = _varint(file)
            if value is None or (field == 1 and (wire != 0 or value > 1000)):
                return False
            if wire == 2:
                if file.tell() + value > opened.size:
                    return False
                file.seek(value, 1)
            fields.add((field, wire))
    return {(1, 0), (7, 2)} <= fields


def _varint(file: BinaryIO) -> int | None:
    value = 0
    for shift in range(0, 70, 7):
        byte = file.read(1)
        if not byte:
            return None
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    return None


def read(path: Path) -> tuple[Any, dict[str, Tensor]]:
    """Reads the model, and its tensors in the order of the file.

    Large tensors are removed from the model, so that they are not in memory twice.
    """
    onnx = require("onnx", "to read .onnx files")
    model = _load(onnx, path)
    with complete(path, "ONNX model"):
        if model.functions:
            model = require("onnx.inliner", "to read .onnx files").inline_local_functions(model)
        check_unique(path, [name for name, _ in _tensors(model)])
        tensors = {name: _read_tensor(onnx, path, name, x) for name, x in _tensors(model)}
    if model.graph.sparse_initializer:
        raise ConversionError(
            f"Expected dense tensors in '{path}' (got the sparse initialiser "
            f"'{model.graph.sparse_initializer[0].values.name}')"
        )
    check_tensors(path, {key: x for key, x in tensors.items() if x.is_complex()})
    return model, tensors


def write(path: Path, tensors: Mapping[str, Tensor], template: Path | None) -> None:
    """Writes a copy of a model with other values for its initialisers and constants."""
    if template is None:
        raise ConversionError(
            f"Expected the ONNX file that the graph was loaded from, as template=..., to write "
            f"'{path}' (got none; a graph does not hold the model's operations)"
        )
    onnx = require("onnx", "to write .onnx files")
    model = _load(onnx, template)
    known = dict(_tensors(model))
    for key, tensor in tensors.items():
        if key not in known:
            raise ConversionError(f"Expected a tensor '{key}' in '{template}' (got none)")
        with complete(template, "ONNX model"):
            _overwrite(onnx, template, key, known[key], tensor)
    with replacing(path) as temporary:
        temporary.write_bytes(model.SerializeToString())


def _load(onnx: Any, path: Path) -> Any:
    with complete(path, "ONNX model"):
        return onnx.load_model(path, format="protobuf", load_external_data=False)


def _tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """Yields initialisers and the tensors of Constant nodes by name."""
    for tensor in model.graph.initializer:
        yield tensor.name, tensor
    for node in model.graph.node:
        if node.op_type == "Constant" and node.output:
            for attribute in node.attribute:
                if attribute.name == "value":
                    yield node.output[0], attribute.t


def _read_tensor(onnx: Any, path: Path, name: str, proto: Any) -> Tensor:
    if proto.data_location == onnx.TensorProto.EXTERNAL:
        raise ConversionError(
            f"Expected the data of '{name}' inside '{path}' (got data in another file, which is "
            f"not followed). Load the model with onnx.load and save it again in one file."
        )
    shape = tuple(proto.dims)
    if proto.data_type == onnx.TensorProto.STRING or proto.data_type not in list(
        onnx.TensorProto.DataType.values()
    ):
        raise ConversionError(f"Expected numbers in '{name}' of '{path}' (got text or no type)")
    check_declared(path, name, shape, 1, 8 * path.stat().st_size)  # An entry has at least one bit.
    if proto.data_type == onnx.TensorProto.BFLOAT16 and proto.raw_data:
        itemsize, dtype = 2, torch.bfloat16
        check_declared(path, name, shape, itemsize, len(proto.raw_data))
        tensor = torch.frombuffer(bytearray(proto.raw_data), dtype=dtype).reshape(shape)
    else:
        array = require("onnx.numpy_helper", "to read .onnx files").to_array(proto)
        tensor = from_array(f"tensor '{name}' of '{path}'", array)
    if proto.raw_data and math.prod(shape) > 1024:
        proto.ClearField("raw_data")
    return tensor


def _overwrite(onnx: Any, template: Path, key: str, proto: Any, tensor: Tensor) -> None:
    old = _read_tensor(onnx, template, key, proto)
    if old.shape != tensor.shape or old.dtype != tensor.dtype:
        raise ConversionError(
            f"Expected '{key}' with shape {list(old.shape)} and type {old.dtype} as in "
            f"'{template}' (got {list(tensor.shape)} and {tensor.dtype})"
        )
    for field, _ in proto.ListFields():
        if field.name.endswith("_data"):
            proto.ClearField(field.name)
    dense = tensor.detach().cpu().contiguous().reshape(-1)
    proto.raw_data = dense.view(torch.uint8).numpy().tobytes() if dense.numel() else b""
