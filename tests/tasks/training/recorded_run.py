"""A run of the command line that records the parameters and gradients of every step.

It is a separate script because Lightning starts it again for every further process.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from nfn_graph.cli import main
from nfn_graph.tasks.training import run


class Recorder(pl.Callback):
    """Records what the optimiser receives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: list[dict[str, Any]] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, *args: Any) -> None:
        assert trainer.world_size == 2
        named = list(trainer.lightning_module.model.named_parameters())
        self.steps.append(
            {
                "parameters": {name: p.detach().clone() for name, p in named},
                "gradients": {name: p.grad.clone() for name, p in named},
            }
        )

    def on_train_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.is_global_zero:
            torch.save(self.steps, self.path)


def record(arguments: list[str]) -> int:
    """Runs a command with the recorder in addition to the run's own callbacks."""
    out = Path(arguments[arguments.index("--out") + 1])
    trainer_of = run._trainer

    def recorded(*given: Any) -> pl.Trainer:
        trainer = trainer_of(*given)
        trainer.callbacks.append(Recorder(out / "steps.pt"))
        return trainer

    run._trainer = recorded
    try:
        return main(arguments)
    finally:
        run._trainer = trainer_of


if __name__ == "__main__":
    # Several commands, separated by a comma, share the two processes.
    words = " ".join(sys.argv[1:]).split(" , ")
    sys.exit(max(record(command.split()) for command in words))
