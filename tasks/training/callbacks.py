"""The learning curve of a run, and when it ends early; both survive an interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping

from nfn_graph.tasks.training.run_folder import write_csv


class History(pl.Callback):
    """Writes a row per epoch to a CSV file, and keeps the rows in the checkpoint.

    A run that resumes from its last checkpoint therefore has the table of an uninterrupted run.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Adds the metrics of the epoch."""
        row: dict[str, Any] = {"epoch": trainer.current_epoch}
        row.update({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.rows.append(row)
        if trainer.is_global_zero:
            write_csv(self.path, self.rows)

    def state_dict(self) -> dict[str, Any]:
        """Saved with every checkpoint."""
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Called when a run resumes."""
        self.rows = list(state_dict["rows"])


class Patience(EarlyStopping):
    """Ends training after some epochs without a better validation metric.

    A metric that is NaN, such as the rank correlation of equal predictions, neither counts as
    better nor ends training by itself. A run that was stopped after training had ended, before its
    results were written, does not begin another epoch.

    Args:
        monitor: The metric.
        mode: Whether its largest or its smallest value is best, `"max"` or `"min"`.
        patience: The number of epochs.
    """

    def __init__(self, monitor: str, mode: str, patience: int) -> None:
        super().__init__(monitor, mode=mode, patience=patience, check_finite=False)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Called when a run begins, and when it resumes."""
        if self.wait_count >= self.patience:
            trainer.should_stop = True
