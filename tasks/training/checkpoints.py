"""The checkpoints of a run: how they are written, and the trained model from them; nothing in the
files is run.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files.atomic import replacing
from nfn_graph.converters.files.graph import spec_from_json
from nfn_graph.converters.zoos.files import read_checkpoint
from nfn_graph.tasks.training.options import from_plain
from nfn_graph.tasks.training.run_folder import RunFolder
from nfn_graph.tasks.training.task import Metrics, Task


def load_model(run: Path) -> tuple[Task[Any], nn.Module, Metrics]:
    """The task of a run, its best model, and the facts about the zoo that it was trained on."""
    folder = RunFolder(run)
    config = folder.read("config.json")
    state = model_state(folder.best, read_run_checkpoint(folder.best))
    try:
        task = _task(config)
        with torch.device("meta"):
            shapes = _build(task, config["made_for"]).state_dict()
        # Check before allocating memory: a damaged file may ask for a model of any size.
        _check_shapes(folder.best, shapes, state)
        model = _build(task, config["made_for"])
        model.load_state_dict(state)
    except ConversionError:
        raise
    except Exception as error:  # A damaged configuration may stop the model's code anywhere.
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ConversionError(
            f"Expected the options and types of a model in '{run}/config.json', as nfn-graph "
            f"wrote them (got: {reason}). It is damaged, or of another version."
        ) from error
    return task, model.eval(), dict(config["made_for"]["facts"])


def read_run_checkpoint(path: Path) -> Mapping[str, Any]:
    """Reads a checkpoint that Lightning saved."""
    if not path.is_file():
        raise FileNotFoundError(f"Expected a checkpoint of a run (got no '{path}')")
    return read_checkpoint(path)


def model_state(path: Path, checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """The parameters of the model in a checkpoint."""
    state = checkpoint.get("state_dict")
    if not isinstance(state, Mapping):
        raise ConversionError(f"Expected the 'state_dict' of a model in '{path}' (got none)")
    return {
        str(key).removeprefix("model."): x
        for key, x in state.items()
        if str(key).startswith("model.")
    }


def _task(config: Mapping[str, Any]) -> Task[Any]:
    from nfn_graph.tasks.train import TASKS

    if config["task"] not in TASKS:
        raise ConversionError(
            f"Expected a run of {', '.join(TASKS)} (got '{config['task']}' in its config.json)"
        )
    kind = TASKS[config["task"]]
    return kind(from_plain(kind.OPTIONS, config["options"]))


def _build(task: Task[Any], made_for: Mapping[str, Any]) -> nn.Module:
    return task.build(
        spec_from_json(made_for["spec"]), dict(made_for["sizes"]), dict(made_for["facts"])
    )


def _check_shapes(path: Path, shapes: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    for key in {**shapes, **state}:
        wanted = list(shapes[key].shape) if key in shapes else "no such tensor"
        found = list(state[key].shape) if isinstance(state.get(key), Tensor) else "none"
        if wanted != found:
            raise ConversionError(
                f"Expected '{key}' of '{path}' with the shape of the run's model, {wanted} (got "
                f"{found})"
            )


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint to a temporary file, which then replaces the former one in one step.

    Lightning writes to the folder for temporary files, and copies from there if that is on another
    file system. A process that is killed meanwhile, or a full disk, leaves half a checkpoint in
    the place of a whole one.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Writes a checkpoint; until all of it is on the disk, the former one stays."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f".{path.stem}.*"):
            left.unlink()  # A process that was killed left this file.
        # If the disk is full, the error of the system is clearer than that of torch.
        content = io.BytesIO()
        torch.save(checkpoint, content)
        with replacing(path) as temporary:
            temporary.write_bytes(content.getbuffer())
