"""Shapes in `.off` and `.ply` files: their points, sampled from the surface if there are faces."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nfn_graph.converters.files.checks import check_regular
from nfn_graph.tasks.sources.images import SourceError

_PLY_TYPES = {
    "char": "i1",
    "int8": "i1",
    "uchar": "u1",
    "uint8": "u1",
    "short": "i2",
    "int16": "i2",
    "ushort": "u2",
    "uint16": "u2",
    "int": "i4",
    "int32": "i4",
    "uint": "u4",
    "uint32": "u4",
    "float": "f4",
    "float32": "f4",
    "double": "f8",
    "float64": "f8",
}
Mesh = tuple[np.ndarray, np.ndarray]


def read_off(path: Path) -> Mesh:
    """Vertices `[n, 3]` and triangles `[m, 3]` of an OFF file; polygons are cut into fans."""
    text = check_regular(path).read_text("latin-1")
    lines = [line.split("#")[0].split() for line in text.splitlines()]
    tokens = [token for line in lines for token in line]
    if not tokens or not tokens[0].upper().startswith("OFF"):
        raise SourceError(f"Expected an OFF file in '{path}' (got no line 'OFF')")
    # ModelNet has files whose first line runs into the counts: "OFF490 518 0".
    tokens = [tokens[0][3:], *tokens[1:]] if len(tokens[0]) > 3 else tokens[1:]
    try:
        counts = [int(token) for token in tokens[:3]]
        values = np.array(tokens[3:], dtype=np.float64)
    except ValueError as error:
        raise SourceError(f"Expected numbers in the OFF file '{path}' (got: {error})") from error
    vertices = counts[0] if len(counts) == 3 else -1
    if vertices < 1 or len(values) < 3 * vertices:
        raise SourceError(
            f"Expected {vertices} vertices in '{path}' (got {len(values)} numbers). The file is "
            f"truncated or damaged."
        )
    return values[: 3 * vertices].reshape(-1, 3), _fans(
        path, values[3 * vertices :].tolist(), counts[1], vertices
    )


def read_ply(path: Path) -> Mesh:
    """Vertices and triangles of a PLY file, ascii or binary little endian."""
    data = check_regular(path).read_bytes()
    head, found, body = data.partition(b"end_header")
    lines = [line.split() for line in head.decode("latin-1").splitlines()]
    if not data.startswith(b"ply") or not found:
        raise SourceError(f"Expected a PLY file in '{path}' (got no header)")
    body = body[body.find(b"\n") + 1 :]
    encoding = next((line[1] for line in lines if line[:1] == ["format"]), "none")
    if encoding not in ("ascii", "binary_little_endian"):
        raise SourceError(
            f"Expected the PLY file '{path}' as ascii or binary_little_endian (got {encoding})"
        )
    try:
        return _ply_elements(path, _ply_header(lines), body, encoding == "ascii")
    except (IndexError, KeyError, ValueError) as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(
            f"Expected a complete PLY file with vertices x, y, z in '{path}' (got: {error})"
        ) from error


def _ply_header(lines: list[list[str]]) -> list[tuple[str, int, list[list[str]]]]:
    """Every element: its name, how many there are, and its properties."""
    elements: list[tuple[str, int, list[list[str]]]] = []
    for line in lines:
        if line[:1] == ["element"]:
            elements.append((line[1], int(line[2]), []))
        elif line[:1] == ["property"]:
            elements[-1][2].append(line[1:])
    return elements


def _ply_elements(
    path: Path, elements: list[tuple[str, int, list[list[str]]]], body: bytes, ascii_: bool
) -> Mesh:
    vertices: np.ndarray | None = None
    faces: list[float] = []
    num_faces, offset = 0, 0
    tokens = body.split() if ascii_ else []
    for name, count, properties in elements:
        plain = all(p[0] != "list" for p in properties)
        if plain:
            names = [p[1] for p in properties]
            if ascii_:
                end = offset + count * len(names)
                rows = np.array(tokens[offset:end], dtype=np.float64).reshape(count, len(names))
                columns = dict(zip(names, rows.T, strict=True))
                offset = end
            else:
                dtype = np.dtype([(p[1], "<" + _PLY_TYPES[p[0]]) for p in properties])
                table = np.frombuffer(body, dtype, count, offset)
                columns = {n: table[n].astype(np.float64) for n in names}
                offset += count * dtype.itemsize
            if name == "vertex":
                vertices = np.stack([columns[axis] for axis in "xyz"], 1)
        elif name == "face" and len(properties) == 1:
            num_faces = count
            if ascii_:
                faces = [float(t) for t in tokens[offset:]]
            else:
                faces = _binary_lists(properties[0], body, offset, count)
        if not plain:
            break
    if vertices is None:
        raise SourceError(f"Expected vertices in the PLY file '{path}' (got none)")
    return vertices, _fans(path, faces, num_faces, len(vertices))


def _binary_lists(property_: list[str], body: bytes, offset: int, count: int) -> list[float]:
    length = np.dtype("<" + _PLY_TYPES[property_[1]])
    item = np.dtype("<" + _PLY_TYPES[property_[2]])
    values: list[float] = []
    for _ in range(count):
        size = int(np.frombuffer(body, length, 1, offset)[0])
        offset += length.itemsize
        values += [size, *np.frombuffer(body, item, size, offset).tolist()]
        offset += size * item.itemsize
    return values


def _fans(path: Path, values: list[float], count: int, vertices: int) -> np.ndarray:
    """Faces as `size, index, index, ...` cut into triangles."""
    triangles: list[tuple[int, int, int]] = []
    at = 0
    for face in range(count):
        size = _whole(values[at]) if at < len(values) else -1
        index = [_whole(v) for v in values[at + 1 : at + 1 + max(size, 0)]]
        if size < 0 or len(index) != size or any(not 0 <= i < vertices for i in index):
            raise SourceError(
                f"Expected {count} faces over {vertices} vertices in '{path}' (got a bad face "
                f"{face}). The file is truncated or damaged."
            )
        triangles += [(index[0], index[k], index[k + 1]) for k in range(1, size - 1)]
        at += 1 + size
    return np.array(triangles, dtype=np.int64).reshape(-1, 3)


def _whole(value: float) -> int:
    """Returns a whole number, or -1 for anything else."""
    return int(value) if float(value).is_integer() else -1
