"""Networks from other packages, read without running or importing the packages."""

from __future__ import annotations

import bz2
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(sys.prefix) / "foreign"


def path_of(name: str) -> Path:
    """A file of one of the packages in `tests/foreign.txt`."""
    path = FOLDER / name
    if not path.exists():
        raise FileNotFoundError(
            f"Expected '{path}'. Run `make setup`, or `pip install --no-deps --target {FOLDER} "
            f"-r tests/foreign.txt`"
        )
    return path


def source(name: str, **stubs: dict[str, Any]) -> ModuleType:
    """One source file of a package, run with stand-ins for the modules that it imports."""
    replaced = {stub.replace("__", "."): values for stub, values in stubs.items()}
    known = {stub: sys.modules.get(stub) for stub in replaced}
    for stub, values in replaced.items():
        module = ModuleType(stub)
        module.__path__ = []
        vars(module).update(values)
        sys.modules[stub] = module
    dotted = name.removesuffix(".py").replace("/", ".")
    try:
        spec = importlib.util.spec_from_file_location(dotted, path_of(name))
        assert spec is not None and spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    finally:
        for stub, module_before in known.items():
            if module_before is None:
                del sys.modules[stub]
            else:
                sys.modules[stub] = module_before
    return found


def mtcnn() -> ModuleType:
    """The three networks of facenet-pytorch's face detector."""
    return source(
        "facenet_pytorch/models/mtcnn.py",
        facenet_pytorch={},
        facenet_pytorch__models={},
        facenet_pytorch__models__utils={},
        facenet_pytorch__models__utils__detect_face={"detect_face": None, "extract_face": None},
    )


def crepe() -> ModuleType:
    """The networks of torchcrepe's pitch tracker."""
    return source("torchcrepe/model.py", torchcrepe={"PITCH_BINS": 360})


def ani(atom: str, ensemble: int = 0) -> dict[str, Tensor]:
    """The state dict of one of torchani's atomic networks, from NeuroChem's files."""
    folder = f"torchani/resources/ani-1x_8x/train{ensemble}/networks"
    packed = path_of(f"{folder}/ANN-{atom}.nnf").read_bytes()
    text = bz2.decompress(packed[packed.index(b"=") + 2 :]).decode("ascii", "ignore")
    tensors = {}
    for i, layer in enumerate(re.findall(r"layer\s*\[(.*?)\n\s*\]", text, re.DOTALL)):
        inputs, outputs = (
            int(re.search(rf"{word}=(\d+)", layer).group(1))  # type: ignore[union-attr]
            for word in ("blocksize", "nodes")
        )
        for kind, shape in (("weights", (outputs, inputs)), ("biases", (outputs,))):
            file = re.search(rf"{kind}=FILE:([^\[]+)", layer).group(1)  # type: ignore[union-attr]
            values = bytearray(path_of(f"{folder}/{file}").read_bytes())
            key = f"{i}.{'weight' if kind == 'weights' else 'bias'}"
            tensors[key] = torch.frombuffer(values, dtype=torch.float32).reshape(shape)
    return tensors
