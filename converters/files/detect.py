"""Which format a file has, by its content."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Literal

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files.checks import check_path
from nfn_graph.converters.files.zip_directory import ZipEntry, read_entries

Format = Literal["pytorch", "pytorch_legacy", "safetensors", "npz", "keras", "onnx"]

_SUPPORTED = ".pt/.pth/.ckpt (torch.save), .safetensors, .npz, .onnx, Keras .h5 and .keras"
_LEGACY_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_KNOWN_FOREIGN = (
    (b"\x93NUMPY", "a single array without a name; save named arrays with numpy.savez"),
    (b"GGUF", "a GGUF file, whose weights are quantised"),
    (b"\x80", "a pickle that torch.save did not write; it is not opened, since it may run code"),
    (b"\x1f\x8b", "a gzip archive; unpack it first"),
    (b"BZh", "a bzip2 archive; unpack it first"),
)


def detect(path: str | Path) -> tuple[Format, list[ZipEntry]]:
    """The format of a checkpoint file and, if it is a zip archive, what is in it.

    The format is told by the content and not by the name.

    Raises:
        FileNotFoundError: There is no such file.
        ConversionError: It is a directory, empty, or in no format that is supported.
    """
    path = check_path(path)
    with open(path, "rb") as file:
        head = file.read(512)
        if not head.startswith(b"PK\x03\x04"):
            return _detect_by_magic(path, file, head), []
    entries = read_entries(path)
    return _detect_zip(path, [entry.filename for entry in entries]), entries


def _detect_by_magic(path: Path, file: BinaryIO, head: bytes) -> Format:
    size = os.fstat(file.fileno()).st_size
    if head.startswith(b"\x89HDF\r\n\x1a\n"):
        return "keras"
    if head[:1] == b"\x80" and _LEGACY_MAGIC in head[:32]:
        return "pytorch_legacy"
    if head[8:9] == b"{":
        length = int.from_bytes(head[:8], "little")
        if 2 <= length <= size - 8:
            return "safetensors"
        if head[:1] != b"\x08" and length < 2**32:
            raise ConversionError(
                f"Expected a safetensors header of {length} bytes in '{path}' (got a file of "
                f"{size} bytes, which is truncated)"
            )
    if _is_onnx(file, size):
        return "onnx"
    if head[257:262] == b"ustar":
        raise ConversionError(
            f"Expected one of {_SUPPORTED} in '{path}' (got a tar archive, perhaps of "
            f"torch before 0.2; load it with the program that wrote it and save it again)"
        )
    for magic, what in _KNOWN_FOREIGN:
        if head.startswith(magic):
            raise ConversionError(f"Expected one of {_SUPPORTED} in '{path}' (got {what})")
    raise ConversionError(
        f"Expected one of {_SUPPORTED} in '{path}' (got a file of {size} bytes that begins "
        f"with {head[:8]!r}; it is in another format, truncated or damaged)"
    )


def _detect_zip(path: Path, names: list[str]) -> Format:
    parts = {name.split("/", 1)[-1] for name in names}
    if "constants.pkl" in parts:
        raise ConversionError(
            f"Expected tensors in '{path}' (got a TorchScript archive, which is a program). Open "
            f"it with torch.jit.load if you trust it, and convert its state_dict()."
        )
    if "data.pkl" in parts:
        return "pytorch"
    if "model.weights.h5" in names:
        return "keras"
    if names and all(name.endswith(".npy") for name in names):
        return "npz"
    raise ConversionError(
        f"Expected one of {_SUPPORTED} in '{path}' (got a zip archive of {names[:3]}...)"
    )


def _is_onnx(file: BinaryIO, size: int) -> bool:
    """Whether the file is a protocol buffer with the fields of an ONNX model.

    ONNX has no magic bytes, so its fields are walked from the first to the last: 1 is the
    version of the format, a small number; 7 is the graph; none is above 25.
    """
    file.seek(0)
    fields = set()
    while file.tell() < size:
        tag = _varint(file)
        field, wire = (0, 0) if tag is None else divmod(tag, 8)
        if not 1 <= field <= 25 or wire not in (0, 2):
            return False
        value = _varint(file)
        if value is None or (field == 1 and (wire != 0 or value > 1000)):
            return False
        if wire == 2:
            if file.tell() + value > size:
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
