"""The program that opens HDF5 files in a separate process.

A damaged file can crash the HDF5 library or hang it, out of reach of Python. Therefore this program
is started by its path and imports neither torch nor this package; the other end is
`nfn_graph.converters.files.hdf5`. Every request is one line of JSON. A request to open a file is
answered with its contents: those of a Keras model, or arrays requested by name. A request to read
its arrays is answered with each of them, and closes the file. An answer consists of the length of
its JSON in 8 bytes, the JSON, and the bytes of an array.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from contextlib import suppress
from typing import Any, BinaryIO

# The greatest depth of nested layers in a file.
_DEEPEST = 32


class Refused(ValueError):
    """Raised for a file that can be read but has the wrong contents."""


class OpenFile:
    """An open file, which describes and reads its arrays and, for a Keras file, its layers."""

    def __init__(self, path: str, name: str) -> None:
        # Imported here, so that a missing package is reported in a reply.
        self.h5py: Any = importlib.import_module("h5py")
        self.name = name
        self.file: Any = self.h5py.File(path, "r")
        inside = "model_weights" in self.file
        self.root = self.child(self.file, "model_weights") if inside else self.file

    def close(self) -> None:
        """Closes the file; a damaged one may raise errors, which are ignored."""
        with suppress(Exception):
            self.file.close()

    def contents(self, keys: list[str] | None) -> dict[str, Any]:
        """Describes the arrays with these keys.

        Without keys, it describes a Keras model: its layers with the keys of their weights, the
        arrays, and the configuration as text.
        """
        if keys is not None:
            self.root = self.file
            return {"arrays": {key: self._describe(key) for key in keys}}
        is_ordered = "layer_names" in self.root.attrs or "layer_names0" in self.root.attrs
        layers = self._named_layers() if is_ordered else self._numbered_layers()
        config = self.file.attrs.get("model_config")
        return {
            "is_ordered": is_ordered,
            "layers": list(layers.items()),
            "arrays": {key: self._describe(key) for keys in layers.values() for key in keys},
            "config": config.decode() if isinstance(config, bytes) else config,
        }

    def array(self, key: str) -> Any:
        """Reads the numbers of one array."""
        numpy: Any = importlib.import_module("numpy")
        return numpy.ascontiguousarray(self.child(self.root, key)[()])

    def child(self, group: Any, key: str) -> Any:
        """Returns a member of a group, which must be in this file and not behind a link."""
        for name in key.split("/"):
            link = group.get(name, getlink=True)
            if not isinstance(link, self.h5py.HardLink):
                got = "nothing" if link is None else "a link"
                raise Refused(f"Expected '{key}' in '{self.name}' (got {got})")
            group = group[name]
        return group

    def _named_layers(self) -> dict[str, list[str]]:
        """Returns all layers in order, including those without weights."""
        layers = {}
        for layer in _names(self.root.attrs, "layer_names"):
            group = self.child(self.root, layer)
            layers[layer] = [f"{layer}/{weight}" for weight in _names(group.attrs, "weight_names")]
        # Weights of the model itself, which belong to no layer.
        own = "top_level_model_weights"
        if own in self.root:
            names = _names(self.child(self.root, own).attrs, "weight_names")
            if names:
                layers[own] = [f"{own}/{weight}" for weight in names]
        return layers

    def _numbered_layers(self) -> dict[str, list[str]]:
        """Returns the layers in Keras 3's format: `layers/<layer>/vars/<number>`, also nested."""
        layers: dict[str, list[str]] = {}
        self._find_variables(self.root, "", layers)
        return layers

    def _find_variables(self, group: Any, path: str, layers: dict[str, list[str]]) -> None:
        if path.count("/") > _DEEPEST:
            raise Refused(f"Expected groups at most {_DEEPEST} deep in '{self.name}' (got more)")
        for name in group:
            inner = f"{path}/{name}" if path else name
            if path or not name.startswith("optimizer"):
                child = self.child(group, name)
                if name == "vars":
                    numbers = sorted(child, key=lambda key: (len(key), key))
                    if numbers or path:
                        layers[path] = [f"{inner}/{number}" for number in numbers]
                elif isinstance(child, self.h5py.Group):
                    self._find_variables(child, inner, layers)

    def _describe(self, key: str) -> dict[str, Any]:
        dataset = self.child(self.root, key)
        if not isinstance(dataset, self.h5py.Dataset) or dataset.shape is None:
            raise Refused(f"Expected an array '{key}' in '{self.name}' (got {dataset})")
        if dataset.external or dataset.is_virtual:
            raise Refused(
                f"Expected the data of '{key}' inside '{self.name}' (got data in another file, "
                f"which is not followed)"
            )
        if dataset.dtype.kind not in "biufcV":
            raise Refused(
                f"Expected numbers in array '{key}' of '{self.name}' (got the type {dataset.dtype})"
            )
        return {
            "shape": list(dataset.shape),
            "dtype": dataset.dtype.str,
            "stored": dataset.id.get_storage_size(),
            "is_packed": dataset.chunks is not None,
        }


def _names(attributes: Any, name: str) -> list[str]:
    """Reads a list of names; long lists are spread over several attributes."""
    found: list[Any] = list(attributes.get(name, []))
    number = 0
    while f"{name}{number}" in attributes:
        found += list(attributes[f"{name}{number}"])
        number += 1
    return [x.decode() if isinstance(x, bytes) else str(x) for x in found]


def answer(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answers requests until the input is closed."""
    open_file: OpenFile | None = None
    for line in requests:
        request = json.loads(line)
        _limit(request["seconds"], request["memory"])
        try:
            if "path" in request:
                open_file = OpenFile(request["path"], request["name"])
                _send(replies, open_file.contents(request.get("arrays")))
            for key in request.get("keys", ()):
                data = open_file.array(key).reshape(-1).view("u1").data if open_file else b""
                _send(replies, {"size": len(data)}, data)
            is_done = "keys" in request
        except Exception as error:  # h5py raises many kinds of errors on damaged files.
            refused = str(error) if isinstance(error, Refused) else None
            kind = type(error).__name__
            _send(replies, {"refused": refused, "error": f"{kind}: {error}"})
            is_done = True
        if is_done and open_file is not None:
            open_file.close()
            open_file = None
        replies.flush()
        _limit(0, None)


def _send(replies: BinaryIO, reply: dict[str, Any], data: Any = b"") -> None:
    text = json.dumps(reply).encode()
    replies.write(len(text).to_bytes(8, "little") + text)
    replies.write(data)


def _limit(seconds: float, memory: int | None) -> None:
    """Limits the time and memory of this process; 0 and None remove the limits."""
    if hasattr(signal, "setitimer"):
        # The default action of the signal ends the process even if the library never returns to
        # Python.
        signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        import resource
    except ImportError:
        return
    if memory is not None:
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        wanted = memory if most == resource.RLIM_INFINITY else min(memory, most)
        resource.setrlimit(resource.RLIMIT_AS, (wanted, most))


def main() -> None:
    """Serves the parent process until it closes its end of the pipe."""
    # Use the import path of the parent process, without the folder of this file.
    sys.path[:] = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # Output printed by libraries must not mix with replies.
    answer(sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()
