"""A task and its model as a Lightning module."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from nfn_graph import Batch, EquivariantNFN, InvariantNFN
from nfn_graph.tasks.training.run_batches import RunBatches
from nfn_graph.tasks.training.task import Options, Predictions, Task
from nfn_graph.tasks.zoo.seeds import seed_of

# The share of all steps in which the learning rate rises.
_RISE = 0.1


def cosine(step: int, steps: int) -> float:
    """The factor of the learning rate in a step: a linear rise, then half a cosine wave."""
    rising = (step + 1) / max(1, round(_RISE * steps))
    return min(1.0, rising) * (1 + math.cos(math.pi * step / steps)) / 2


class TaskModule(pl.LightningModule):
    """Trains the model of a task.

    Args:
        task: The task.
        model: The model of the task.
        facts: The facts of the task about its data.
        batches: The batches of the run.
    """

    def __init__(
        self, task: Task[Options], model: nn.Module, facts: dict[str, Any], batches: RunBatches
    ) -> None:
        super().__init__()
        self.batches = batches
        self.task = task
        self.model = model
        self.facts = facts
        compiled = task.options.compile
        # Kept out of the parameters: checkpoints hold the model alone.
        self._compiled = [torch.compile(model, dynamic=True) if compiled else model]
        self._seen: list[Predictions] = []

    def forward(self, batch: Batch) -> Any:
        """The outputs of the model."""
        if self.task.options.compile and isinstance(self.model, InvariantNFN | EquivariantNFN):
            # The layout of a batch is computed before the compiler begins.
            return self._compiled[0](batch.features(spec=self.model.spec))
        return self._compiled[0](batch)

    def configure_optimizers(self) -> Any:
        """Adam, or AdamW if weights decay, and the schedule of its learning rate."""
        options = self.task.options
        rate = options.learning_rate or 1e-3
        # AdamW without decay is Adam.
        groups = self.task.parameter_groups(self.model, rate)
        optimizer = torch.optim.AdamW(groups, rate, weight_decay=options.weight_decay)
        if options.schedule != "cosine":
            return optimizer
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, steps))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """The loss of a batch. All random numbers depend only on the seed and the step, so that
        a resumed run gets the same ones."""
        place = (self.current_epoch, index, self.global_rank)
        torch.manual_seed(seed_of(self.task.options.seed, *place, "step"))
        batch = self.task.augment(batch)
        loss = self.task.loss(self(batch), batch)
        terms = 0 if self.batches.is_idle(index) else self.task.loss_terms(batch)
        mean, total = self._over_processes(loss, terms)
        # In half precision, Lightning skips such a step and scales the loss down.
        if self.task.options.precision != "16-mixed":
            self._check_finite(f"a loss of {mean.item()} in step {index}", mean)
        self.log("train/loss", mean, on_epoch=True, on_step=False, batch_size=total)
        # The average of the gradients over processes becomes that of the mean over all terms.
        return loss * (terms * self.trainer.world_size / total)

    def _check_finite(self, got: str, *values: Tensor) -> None:
        """Stops training that has diverged, in all processes at once, before it is saved."""
        if all(bool(x.isfinite().all()) for x in values):
            return
        options = self.task.options
        kept = f"The checkpoints of earlier epochs are kept in '{options.out / 'checkpoints'}'."
        raise FloatingPointError(
            f"Expected training to stay finite (got {got} of epoch {self.current_epoch}). "
            f"{kept if self.current_epoch else 'No epoch was finished.'} Train with a "
            f"--learning-rate below {options.learning_rate:g}, in another --out."
        )

    def on_validation_start(self) -> None:
        """Called at the end of every epoch, before its checkpoint is written."""
        self._check_finite("parameters without a value at the end", *self.model.parameters())

    def _over_processes(self, loss: Tensor, terms: int) -> tuple[Tensor, int]:
        """The mean loss of a step and the number of its terms, over all processes."""
        if self.trainer.world_size == 1:
            return loss, terms
        sums = torch.stack(
            [
                loss.detach().double() * terms,
                torch.tensor(terms, device=loss.device, dtype=torch.float64),
            ]
        )
        torch.distributed.all_reduce(sums)
        return sums[0] / sums[1], int(sums[1])

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
            found = self._gather(found)
        return {name: x.cpu() for name, x in found.items()}

    def _gather(self, found: Predictions) -> Predictions:
        """Returns the predictions of all processes, which may have different numbers of
        networks."""
        count = len(next(iter(found.values())))
        counts = [int(n) for n in _from_all(torch.tensor(count, device=self.device))]
        # Only tensors of one shape can be gathered, so they are padded and then cut.
        return {
            name: torch.cat(
                [
                    part[:n]
                    for part, n in zip(_from_all(_filled(x, max(counts))), counts, strict=True)
                ]
            )
            for name, x in found.items()
        }


def _filled(x: Tensor, rows: int) -> Tensor:
    return torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


def _from_all(x: Tensor) -> list[Tensor]:
    """A tensor of every process."""
    parts = [torch.empty_like(x) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, x)
    return parts
