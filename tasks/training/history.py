"""The learning curve of a run and the time that it took, which survive an interruption."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from nfn_graph.converters.files.atomic import replacing


class History(pl.Callback):
    """Writes a row per epoch to a CSV file, and keeps the rows in the checkpoint.

    A run that goes on from its last checkpoint so has the table of an uninterrupted one.

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
            self.write()

    def write(self) -> None:
        """Writes the table."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        with replacing(self.path) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(self.rows)

    def state_dict(self) -> dict[str, Any]:
        """Saved with every checkpoint."""
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Called when a run goes on."""
        self.rows = list(state_dict["rows"])


class Stopwatch(pl.Callback):
    """Measures the time that training takes, and keeps it in the checkpoint.

    Of a run that goes on, it is the time up to its last checkpoint and since it went on.
    """

    def __init__(self) -> None:
        self._before = 0.0
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """The time until now."""
        return self._before + time.perf_counter() - self._started

    def state_dict(self) -> dict[str, Any]:
        """Saved with every checkpoint."""
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Called when a run goes on."""
        self._before = float(state_dict["seconds"])
