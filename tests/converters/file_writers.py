"""One small network in a file of every format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import torch


def write_torch(path: Path) -> None:
    torch.save(checkpoints.mlp().state_dict(), path)


def write_legacy(path: Path) -> None:
    torch.save(checkpoints.mlp().state_dict(), path, _use_new_zipfile_serialization=False)


def write_safetensors(path: Path) -> None:
    checkpoints.write_safetensors(path, dict(checkpoints.mlp().state_dict()))


def write_npz(path: Path) -> None:
    with open(path, "wb") as file:
        np.savez(file, **{k: x.numpy() for k, x in checkpoints.mlp().state_dict().items()})


def write_keras(path: Path) -> None:
    checkpoints.write_keras(path, checkpoints.keras_mlp(checkpoints.mlp()))


def keras_config() -> dict[str, Any]:
    names = list(checkpoints.keras_mlp(checkpoints.mlp()))
    return checkpoints.sequential(*(("Dense", name, {"activation": "tanh"}) for name in names))


def write_archive(path: Path) -> None:
    layers = checkpoints.keras_mlp(checkpoints.mlp())
    checkpoints.write_keras_archive(path, layers, keras_config())


def write_onnx(path: Path) -> None:
    path.write_bytes(checkpoints.onnx_mlp(checkpoints.mlp()).SerializeToString())


WRITERS = {
    "pt": write_torch,
    "legacy.pt": write_legacy,
    "safetensors": write_safetensors,
    "npz": write_npz,
    "h5": write_keras,
    "keras": write_archive,
    "onnx": write_onnx,
}
