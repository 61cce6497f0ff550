"""How the checkpoints of a run are written."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from nfn_graph.converters.files.atomic import replacing


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside the former one, which it then replaces in one step.

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
            left.unlink()  # of a process that was killed
        # Of a full disk, the system says more than torch does.
        content = io.BytesIO()
        torch.save(checkpoint, content)
        with replacing(path) as temporary:
            temporary.write_bytes(content.getbuffer())
