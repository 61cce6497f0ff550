"""When training ends before its last epoch."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping


class Patience(EarlyStopping):
    """Ends training after some epochs without a better validation metric.

    A metric that is NaN, such as the rank correlation of equal predictions, is no better one; it
    does not end training by itself. A run that was stopped after training had ended, before its
    results were written, does not begin another epoch.

    Args:
        monitor: The metric.
        mode: Whether its largest or its smallest value is best, `"max"` or `"min"`.
        patience: The number of epochs.
    """

    def __init__(self, monitor: str, mode: str, patience: int) -> None:
        super().__init__(monitor, mode=mode, patience=patience, check_finite=False)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Called when a run begins, and when it goes on."""
        if self.wait_count >= self.patience:
            trainer.should_stop = True
