"""Every reader against damaged and hostile files, with limited time and memory; see `fuzz.py`."""

from __future__ import annotations

import io
import json
import mmap
import os
import struct
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fuzz
from corpus import Kind, corpus

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
# Formats of checkpoints have many more cases in test_fuzz_files.py.
CASES = 12
PLAIN = ("pt", "legacy.pt", "safetensors", "npz", "h5", "onnx", "graph")
NAMES = sorted(corpus(Path()))


@pytest.fixture(scope="module")
def prepared(world: Path) -> Iterator[tuple[Mapping[str, Kind], Path]]:
    with fuzz.prepared(world) as found:
        yield found


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("name", [name for name in NAMES if name not in PLAIN])
def test_damaged_input_is_read_or_refused(
    name: str, prepared: tuple[Mapping[str, Kind], Path]
) -> None:
    kinds, folder = prepared
    found: Counter[str] = Counter()
    for number, outcome in fuzz.run_cases(kinds, name, range(CASES), folder):
        assert outcome.verdict in ("read", "refused"), (name, number, outcome)
        found[outcome.verdict] += 1
    assert sum(found.values()) == CASES
    assert found["refused"] > 0


@pytest.mark.parametrize("name", NAMES)
def test_good_input_is_read(name: str, prepared: tuple[Mapping[str, Kind], Path]) -> None:
    kinds, folder = prepared
    path = folder / f"whole{fuzz.suffix_of(name)}"
    fuzz._remove(path)
    kinds[name].build(path)
    assert fuzz.judge(kinds[name], path) == ("read", "")


@pytest.mark.parametrize("name", NAMES)
def test_nobody_waits_for_a_pipe(name: str, prepared: tuple[Mapping[str, Kind], Path]) -> None:
    """Any one file is replaced by a pipe to which nobody writes."""
    kinds, folder = prepared
    path = folder / f"pipes{fuzz.suffix_of(name)}"
    fuzz._remove(path)
    kinds[name].build(path)
    files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
    # If there are many files of one kind, one of them is enough.
    for file in {(p.parent.name[:5], p.suffix): p for p in sorted(files)}.values():
        content = file.read_bytes()
        file.unlink()
        os.mkfifo(file)
        verdict, detail = fuzz.judge(kinds[name], path)
        assert verdict in ("read", "refused"), (file, verdict, detail)
        file.unlink()
        file.write_bytes(content)


def deflated(path: Path, name: str, head: bytes, zeros: int) -> None:
    """An archive with one entry that unpacks to many zeros."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        archive.writestr(name, head + bytes(zeros))


def npy_head(shape: tuple[int, ...], dtype: str = "<f4") -> bytes:
    buffer = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, header)
    return buffer.getvalue()


def lying_zip(path: Path) -> None:
    """The directory of an archive claims that an entry unpacks to 4 GB."""
    deflated(path, "w.npy", npy_head((2**30 - 1,)), 64)
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\x01\x02")
    data[at + 24 : at + 28] = struct.pack("<L", 2**32 - 2)
    path.write_bytes(data)


def nested_zip(path: Path) -> None:
    inner = b"x" * 100
    for _ in range(20):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in "ab":
                archive.writestr(name, inner)
        inner = buffer.getvalue()
    path.write_bytes(inner)


def leaving_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../../escaped.npy", npy_head((2,)) + bytes(8))


def nested_pickle(path: Path) -> None:
    value: Any = torch.zeros(1)
    for _ in range(400):
        value = {"a": value}
    torch.save(value, path)


def nested_header(path: Path) -> None:
    text = b'{"a":' * 100_000
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def huge_number(path: Path) -> None:
    entry = {"dtype": "F32", "shape": [10**300, 0], "data_offsets": [0, 0]}
    text = json.dumps({"w": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def crowded_metadata(path: Path) -> None:
    """90 MB of metadata, which would take 1.6 GB when parsed."""
    notes = b",".join(b'"%x":{}' % i for i in range(8_000_000))
    text = b'{"__metadata__":{' + notes + b"}}"
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def crowded_tensors(path: Path) -> None:
    """200,000 layers of one neuron."""
    shapes = {"weight": [1, 1], "bias": [1]}
    names = ((f"{i}.{name}", shape) for i in range(100_000) for name, shape in shapes.items())
    header = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [4 * i, 4 * i + 4]}
        for i, (name, shape) in enumerate(names)
    }
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4 * len(header)))


HOSTILE: dict[str, Callable[[Path], Any]] = {
    "zip that lies": lying_zip,
    "zips in zips": nested_zip,
    "zip that leaves": leaving_zip,
    "array of nothing": lambda p: deflated(p, "w.npy", npy_head((10**12,)), 16),
    "dictionaries in dictionaries": nested_pickle,
    "nested header": nested_header,
    "huge number": huge_number,
    "crowded metadata": crowded_metadata,
    "crowded with tensors": crowded_tensors,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(
    name: str, prepared: tuple[Mapping[str, Kind], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read as a checkpoint and as images, in the process with limited memory."""
    kinds, folder = prepared
    monkeypatch.setattr(fuzz, "damage_path", lambda *_: None)
    for reader in ("npz", "images, npz"):
        hostile = Kind(HOSTILE[name], kinds[reader].read)
        named = {reader: hostile}
        ((_, outcome),) = fuzz.run_cases(named, reader, range(1), folder)
        is_small_network = name in ("zip that leaves", "dictionaries in dictionaries")
        allowed = ("refused", "read") if is_small_network else ("refused",)
        assert outcome.verdict in allowed, outcome
    assert not list(folder.parent.glob("escaped*"))


def _touch_memory(size: int) -> None:
    """Takes new pages from the system; an allocator may still hold freed ones."""
    with mmap.mmap(-1, size) as pages:
        for start in range(0, size, mmap.PAGESIZE):
            pages[start] = 1


@pytest.mark.parametrize(
    ("read", "verdict"),
    [
        (lambda p: bytearray(2**33), "memory"),
        (lambda p: _touch_memory(400 * 2**20), "memory"),
        (lambda p: {}[1], "type"),
        (lambda p: int("x"), "unclear"),
        (lambda p: os.abort(), "crash"),
        (lambda p: os.stat(p / "nothing"), "refused"),
    ],
    ids=["declared", "resident", "type", "unclear", "crash", "refused"],
)
def test_failures_are_found(
    read: Callable[[Path], Any], verdict: str, prepared: tuple[Mapping[str, Kind], Path]
) -> None:
    """The harness must find readers that misbehave."""
    kinds, folder = prepared
    wrong = {"images, idx": Kind(kinds["images, idx"].build, read)}
    (_, outcome), (_, again) = fuzz.run_cases(wrong, "images, idx", range(2), folder)
    assert outcome.verdict == verdict, outcome
    assert verdict == "memory" or again.verdict == verdict
