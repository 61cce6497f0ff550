"""The table of file formats: how each one is recognised, read and written.

To add a format, add a file in `files/` and an entry here. Commands, messages and `save` take the
suffixes from this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from nfn_graph import WeightGraph
from nfn_graph.converters.chain import FlattenOrder
from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files import keras, npz, onnx, pytorch, safetensors
from nfn_graph.converters.files.checks import OpenedFile, open_file
from nfn_graph.converters.files.graph import read_graph_or_tensors
from nfn_graph.converters.keras.converter import from_keras, save_keras
from nfn_graph.converters.onnx import from_onnx

Tensors = Mapping[str, Any]


@dataclass(frozen=True)
class ReadingHints:
    """The options of :func:`nfn_graph.converters.load` that readers use."""

    arch: nn.Module | None = None
    flatten: FlattenOrder | None = None
    example_input: Any = None
    safe_globals: Sequence[str] = ()


@dataclass(frozen=True)
class FileFormat:
    """A file format.

    Attributes:
        name: The name of the format, for messages.
        suffixes: The suffixes of its files. The content, not the suffix, determines the format of a
            file.
        recognise: Returns whether a file is in this format.
        read: Returns the named tensors of a file.
        write: Writes the tensors of a graph, into a copy of the template if there is one.
        load: Returns the graph of a file that contains its topology, and otherwise its tensors;
            `read` if None.
        has_template: Whether a file can be written into a copy of another file.
        holds_objects: Whether files may hold values other than tensors.
    """

    name: str
    suffixes: tuple[str, ...]
    recognise: Callable[[OpenedFile], bool]
    read: Callable[[OpenedFile, ReadingHints], Tensors]
    write: Callable[[WeightGraph, Path, Mapping[str, Tensor], Path | None], None]
    load: Callable[[OpenedFile, ReadingHints], WeightGraph | Tensors] | None = None
    has_template: bool = False
    holds_objects: bool = False


PYTORCH = FileFormat(
    "torch.save",
    (".pt", ".pth", ".ckpt", ".bin"),
    pytorch.recognise,
    lambda opened, hints: pytorch.read_opened(opened, hints.safe_globals),
    lambda graph, path, tensors, template: pytorch.write(path, tensors),
    holds_objects=True,
)
SAFETENSORS = FileFormat(
    "safetensors",
    (".safetensors",),
    safetensors.recognise,
    lambda opened, hints: safetensors.read(opened.path),
    lambda graph, path, tensors, template: safetensors.write(path, tensors),
    load=lambda opened, hints: read_graph_or_tensors(opened.path),
)
NPZ = FileFormat(
    "NumPy",
    (".npz",),
    npz.recognise,
    lambda opened, hints: npz.read(opened.path),
    lambda graph, path, tensors, template: npz.write(path, tensors),
)
KERAS = FileFormat(
    "Keras",
    (".h5", ".keras", ".hdf5"),
    keras.recognise,
    lambda opened, hints: keras.read(opened.path).tensors,
    save_keras,
    load=lambda opened, hints: from_keras(
        keras.read(opened.path),
        arch=hints.arch,
        flatten=hints.flatten,
        example_input=hints.example_input,
    ),
    has_template=True,
)
ONNX = FileFormat(
    "ONNX",
    (".onnx",),
    onnx.recognise,
    lambda opened, hints: onnx.read(opened.path)[1],
    lambda graph, path, tensors, template: onnx.write(path, tensors, template),
    load=lambda opened, hints: from_onnx(opened.path, example_input=hints.example_input),
    has_template=True,
)

# The formats in the order in which they are tried. ONNX has no magic bytes and comes last.
FORMATS = (PYTORCH, NPZ, KERAS, SAFETENSORS, ONNX)
SUFFIXES = tuple(suffix for format_ in FORMATS for suffix in format_.suffixes)
_SUPPORTED = ", ".join(f"{'/'.join(f.suffixes)} ({f.name})" for f in FORMATS)
_FOREIGN = (
    (b"\x93NUMPY", "a single array without a name; save named arrays with numpy.savez"),
    (b"GGUF", "a GGUF file, whose weights are quantised"),
    (b"\x80", "a pickle not written by torch.save; it is not opened, because it may run code"),
    (b"\x1f\x8b", "a gzip archive; unpack it first"),
    (b"BZh", "a bzip2 archive; unpack it first"),
)


def detect(path: str | Path) -> tuple[FileFormat, OpenedFile]:
    """Detects the format of a checkpoint file from its content, not from its name.

    Raises:
        FileNotFoundError: If the file does not exist.
        ConversionError: If it is a directory, empty, or in an unsupported format.
    """
    opened = open_file(path)
    for format_ in FORMATS:
        if format_.recognise(opened):
            return format_, opened
    raise ConversionError(f"Expected one of {_SUPPORTED} in '{path}' (got {_described(opened)})")


def format_of(path: Path) -> FileFormat:
    """Returns the format for a path's suffix, for a file to be written."""
    for format_ in FORMATS:
        if path.suffix.lower() in format_.suffixes:
            return format_
    raise ConversionError(
        f"Expected a path that ends in one of {', '.join(SUFFIXES)} (got '{path}')"
    )


def _described(opened: OpenedFile) -> str:
    """Describes a file in an unsupported format."""
    if opened.is_archive:
        return f"a zip archive of {opened.names[:3]}..."
    if opened.head[257:262] == b"ustar":
        return (
            "a tar archive, perhaps from torch before 0.2; load it with the program that wrote it "
            "and save it again"
        )
    for magic, what in _FOREIGN:
        if opened.head.startswith(magic):
            return what
    return (
        f"a file of {opened.size} bytes that begins with {opened.head[:8]!r}; it is truncated, "
        f"damaged or in another format"
    )
