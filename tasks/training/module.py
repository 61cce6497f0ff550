"""A task and its model as Lightning wants them."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from nfn_graph import NFN, Batch
from nfn_graph.tasks.training.task import Options, Predictions, Task
from nfn_graph.tasks.zoo.seeds import seed_of


class TaskModule(pl.LightningModule):
    """Trains the model of a task.

    Args:
        task: The task.
        model: Its model.
        facts: What the task knows about its data.
    """

    def __init__(self, task: Task[Options], model: nn.Module, facts: dict[str, Any]) -> None:
        super().__init__()
        self.task = task
        self.model = model
        self.facts = facts
        compiled = task.options.compile
        # Kept out of the parameters: checkpoints hold the model alone.
        self._compiled = [torch.compile(model, dynamic=True) if compiled else model]
        self._seen: list[Predictions] = []

    def forward(self, batch: Batch) -> Any:
        """The outputs of the model."""
        if self.task.options.compile and isinstance(self.model, NFN):
            # What belongs together in a batch is settled before the compiler begins.
            return self._compiled[0](batch.features(spec=self.model.spec))
        return self._compiled[0](batch)

    def configure_optimizers(self) -> Any:
        """Adam, or AdamW if weights decay; at a rate that is constant or falls to 0."""
        options = self.task.options
        rate, parameters = options.learning_rate or 1e-3, self.model.parameters()
        optimizer: torch.optim.Optimizer
        if options.weight_decay:
            optimizer = torch.optim.AdamW(parameters, rate, weight_decay=options.weight_decay)
        else:
            optimizer = torch.optim.Adam(parameters, rate)
        if not options.decay:
            return optimizer
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """The loss of a batch. All that is drawn depends on the seed and the step alone, so that
        a resumed run draws the same."""
        place = (self.current_epoch, index, self.global_rank)
        torch.manual_seed(seed_of(self.task.options.seed, *place, "step"))
        batch = self.task.augment(batch)
        loss = self.task.loss(self(batch), batch)
        self.log("train/loss", loss, on_epoch=True, on_step=False, batch_size=batch.num_graphs)
        return loss

    def validation_step(self, batch: Batch, index: int) -> None:
        """Remembers the predictions for a batch."""
        self._seen.append(self.task.predict(self(batch), batch))

    def on_validation_epoch_end(self) -> None:
        """Computes the metrics of the whole split."""
        found = self.task.metrics(self._collect(), self.facts)
        for name, value in found.items():
            if isinstance(value, float):
                self.log(f"validation/{name}", value, prog_bar=name == self.task.monitor)

    def _collect(self) -> Predictions:
        """The predictions for all networks that were seen since the last call."""
        names = self._seen[0]
        found = {name: torch.cat([seen[name] for seen in self._seen]) for name in names}
        self._seen = []
        if self.trainer.world_size > 1:
            gathered: Any = self.all_gather(found)
            found = {name: x.flatten(0, 1) for name, x in gathered.items()}
        return {name: x.cpu() for name, x in found.items()}
