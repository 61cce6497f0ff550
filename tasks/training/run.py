"""Training the model of a task, and evaluating it."""

from __future__ import annotations

import datetime
import logging
import os
import platform
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, Timer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn

import nfn_graph
from nfn_graph import NetworkSpec
from nfn_graph.converters import WeightDataset
from nfn_graph.converters.files.graph import spec_to_json
from nfn_graph.converters.store.dataset import choose
from nfn_graph.messages import UserError
from nfn_graph.tasks.models.build import count_parameters
from nfn_graph.tasks.training.callbacks import History, Patience
from nfn_graph.tasks.training.checkpoints import (
    AtomicCheckpointIO,
    model_state,
    read_run_checkpoint,
)
from nfn_graph.tasks.training.checkpoints import load_model as load_model
from nfn_graph.tasks.training.data import (
    PreparedGraphs,
    TaskData,
    fitted,
    load_data,
    open_for,
    split_zoo,
)
from nfn_graph.tasks.training.options import to_plain
from nfn_graph.tasks.training.run_batches import RunBatches, eval_loader
from nfn_graph.tasks.training.run_folder import RunFolder
from nfn_graph.tasks.training.task import Metrics, Options, Predictions, Task
from nfn_graph.tasks.training.task_module import TaskModule
from nfn_graph.tasks.zoo.builder import Split
from nfn_graph.tasks.zoo.seeds import seed_of


def train(task: Task[Options], *, progress: bool = False) -> Metrics:
    """Trains the model of a task, or resumes a run that was interrupted.

    The best epoch by the validation metric is then evaluated on the validation and the test
    networks. The same options give the same numbers, interrupted or not. Training that diverges
    raises a `FloatingPointError`, and the checkpoints of earlier epochs remain.

    Args:
        task: The task with its options.
        progress: Whether to show a progress bar.

    Returns:
        The content of `metrics.json`; an empty dict in all processes but the first.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from torch import nn
        >>> from nfn_graph.converters import build_store, from_module
        >>> from nfn_graph.tasks.regress import Regress, RegressOptions
        >>> from nfn_graph.tasks.training import train
        >>> networks = [nn.Linear(3, 2) for _ in range(30)]
        >>> graphs = [(from_module(n), {"size": float(n.weight.detach().norm())}) for n in networks]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     zoo, run = Path(folder, "store"), Path(folder, "run")
        ...     report = build_store(graphs, zoo)
        ...     options = RegressOptions(zoo, run, label="size", preset="tiny", accelerator="cpu")
        ...     metrics = train(Regress(options))
        >>> metrics["test"]["networks"], metrics["epochs"]
        (3, 2)
    """
    options = task.options
    folder = RunFolder(options.out)
    data = load_data(task)
    batches = RunBatches(options, data.graphs)
    torch.manual_seed(seed_of(options.seed, "model"))
    model, spec, sizes = fitted(task, data)
    folder.begin(_config(task, data, spec, sizes))
    if folder.is_finished:
        return folder.read("metrics.json")
    is_begun = folder.last.is_file()
    if is_begun:
        read_run_checkpoint(folder.last)  # Damaged files get a clearer error than Lightning's.
    if progress and os.environ.get("LOCAL_RANK", "0") == "0":
        print(_where_networks_are(data))
    limit = datetime.timedelta(minutes=options.minutes) if options.minutes else None
    timer = Timer(limit, verbose=False)
    with quiet():
        trainer = _trainer(task, folder, timer, progress)
        trainer.fit(
            TaskModule(task, model, dict(data.facts), batches),
            datamodule=batches,
            ckpt_path=folder.last if is_begun else None,
            weights_only=True,
        )
    if not trainer.is_global_zero:
        return {}
    best = read_run_checkpoint(folder.best)
    model.load_state_dict(model_state(folder.best, best))
    measured = _test(task, model, data, folder)
    measured |= {
        "evaluations": {},
        "epochs": trainer.current_epoch,
        "best_epoch": int(best["epoch"]),
        "seconds": round(timer.time_elapsed(), 1),
        "parameters": count_parameters(model),
    }
    if options.overfit:
        measured["overfit"] = {
            "networks": measured["test"]["networks"],
            "steps": trainer.global_step,
            "has_learnt": task.has_learnt(measured["test"]),
        }
    _draw_curves(task, folder)
    folder.write("metrics.json", measured)
    _report(folder)
    return folder.read("metrics.json")


def _where_networks_are(data: TaskData) -> str:
    """Returns a line that says whether networks are kept in memory, and how to change that."""
    count = sum(map(len, data.zoos.values()))
    if data.in_memory:
        return f"{count} networks are kept in memory (--in-memory no reads batches from the store)"
    store = data.zoos["train"].folder
    return f"Batches of {count} networks are read from '{store}' (--in-memory yes keeps them)"


def _config(
    task: Task[Options], data: TaskData, spec: NetworkSpec, sizes: dict[str, int]
) -> dict[str, Any]:
    """Everything that determines a run and is needed to rebuild its model."""
    return {
        "task": task.name,
        "options": to_plain(task.options),
        "zoo": {
            "fingerprint": data.zoos["train"].fingerprint,
            "networks": {split: len(zoo) for split, zoo in data.zoos.items()},
        },
        "made_for": {"spec": spec_to_json(spec), "sizes": sizes, "facts": dict(data.facts)},
        "versions": {
            "nfn-graph": nfn_graph.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def _test(task: Task[Options], model: nn.Module, data: TaskData, folder: RunFolder) -> Metrics:
    """The metrics of the test and the validation networks; writes predictions and figures."""
    metrics: Metrics = {}
    rows: list[dict[str, Any]] = []
    for split in ("test", "validation"):
        predictions = predict(task, model, data.graphs[split])
        metrics[split] = _measured(task, predictions, data.facts)
        rows += _rows(split, data.zoos[split], task.written(predictions, data.facts))
        task.draw(folder.figures, split, predictions, data.zoos[split], data.facts)
        task.show(folder.figures, split, model, data.graphs[split])
    folder.write_predictions(rows)
    return metrics


def evaluate(
    run: Path,
    zoo: Path,
    *,
    name: str | None = None,
    split: Split | None = None,
    where: Sequence[str] = (),
) -> Metrics:
    """Computes the metrics of a trained model on other networks.

    The metrics are added to the run's `metrics.json`, figures and report.

    Args:
        run: The folder of a finished run.
        zoo: The store or published zoo with the networks, of any widths.
        name: The name of this evaluation; by default the name of the zoo's folder.
        split: The split to evaluate on; by default all networks.
        where: Further conditions, such as `width=16`.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from torch import nn
        >>> from nfn_graph.converters import build_store, from_module
        >>> from nfn_graph.tasks.regress import Regress, RegressOptions
        >>> from nfn_graph.tasks.training import evaluate, train
        >>> networks = [nn.Linear(3, 2) for _ in range(30)]
        >>> graphs = [(from_module(n), {"size": float(n.weight.detach().norm())}) for n in networks]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     zoo, run = Path(folder, "store"), Path(folder, "run")
        ...     report = build_store(graphs, zoo)
        ...     options = RegressOptions(zoo, run, label="size", preset="tiny", accelerator="cpu")
        ...     metrics = train(Regress(options))
        ...     print(evaluate(run, zoo, split="train")["networks"])
        24
    """
    folder = RunFolder(run)
    name = _evaluation_name(name or Path(os.path.abspath(zoo)).name)
    task, model, facts = load_model(run)
    metrics = folder.read("metrics.json")
    with tempfile.TemporaryDirectory() as imported:
        whole = open_for(task, Path(zoo), Path(imported, "zoo"))
        part = split_zoo(whole, task.options)[split] if split else whole
        chosen = task.usable(choose(part, where))
        task.check_facts(chosen, facts)
        graphs = PreparedGraphs(task, chosen, facts)
        predictions = predict(task, model, graphs)
        found = _measured(task, predictions, facts)
        task.draw(folder.figures, name, predictions, chosen, facts)
        task.show(folder.figures, name, model, graphs)
    metrics["evaluations"][name] = found
    folder.write("metrics.json", metrics)
    _report(folder)
    written: Metrics = folder.read("metrics.json")["evaluations"][name]
    return written


def _evaluation_name(name: str) -> str:
    """Returns a name by which files, reports and comparisons distinguish the evaluation."""
    is_plain = name.isprintable() and len(name) <= 100 and not any(c in name for c in "/\\")
    if name in ("test", "validation", "run", "") or not is_plain:
        raise UserError(
            f"Expected a --name for this evaluation of at most 100 letters without slashes, and "
            f"none of test, validation and run (got {name!r})"
        )
    return name


@torch.no_grad()
def predict(
    task: Task[Options], model: nn.Module, graphs: PreparedGraphs, *, labelled: bool = True
) -> Predictions:
    """The predictions for all networks, with or without labels."""
    if not len(graphs):
        raise UserError("Expected at least one network to predict (got none)")
    model.eval()
    like = next(model.parameters())
    found: list[Predictions] = []
    for batch in eval_loader(graphs, task.options):
        batch = batch.to(like.device, like.dtype)
        outputs = model(batch)
        found.append(task.predict(outputs, batch) if labelled else task.answer(outputs))
    return {name: torch.cat([part[name] for part in found]).cpu() for name in found[0]}


def _trainer(task: Task[Options], folder: RunFolder, timer: Timer, progress: bool) -> pl.Trainer:
    options = task.options
    monitor = f"validation/{task.monitor}"
    every_epoch: dict[str, Any] = {
        "dirpath": folder.best.parent,
        "save_on_train_epoch_end": True,
        "enable_version_counter": False,
    }
    checkpoints = [
        ModelCheckpoint(filename=folder.best.stem, monitor=monitor, mode=task.best, **every_epoch),
        ModelCheckpoint(filename=folder.last.stem, **every_epoch),
    ]
    # The history comes first, so that a checkpoint includes the row of its own epoch.
    callbacks: list[pl.Callback] = [timer, History(folder.path / "logs" / "metrics.csv")]
    if options.patience:
        callbacks.append(Patience(monitor, task.best, options.patience))
    if progress:
        callbacks.append(RichProgressBar(leave=False))
    try:
        return pl.Trainer(
            accelerator=options.accelerator,
            devices=options.devices,
            num_nodes=options.nodes,
            # Lightning's own would repeat networks; the batches are shared already.
            use_distributed_sampler=False,
            precision=options.precision,
            max_epochs=options.epochs,
            callbacks=[*callbacks, *checkpoints],
            plugins=[AtomicCheckpointIO()],
            logger=TensorBoardLogger(folder.path, "logs", version=""),
            default_root_dir=folder.path,
            enable_progress_bar=progress,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            log_every_n_steps=1,
        )
    except MisconfigurationException as error:
        raise UserError(
            f"Expected --accelerator, --devices and --precision that this machine has (got "
            f"{options.accelerator}, {options.devices} and {options.precision}: {error})"
        ) from error


def _measured(task: Task[Options], predictions: Predictions, facts: Any) -> Metrics:
    count = len(next(iter(predictions.values())))
    return {**task.metrics(predictions, facts), "networks": count}


def _rows(
    split: str, zoo: WeightDataset, columns: Mapping[str, Sequence[Any]]
) -> Iterator[dict[str, Any]]:
    name, names = network_names(zoo)
    for network, *values in zip(names, *columns.values(), strict=True):
        yield {"split": split, name: network, **dict(zip(columns, values, strict=True))}


def network_names(zoo: WeightDataset) -> tuple[str, list[Any]]:
    """Returns the names of the networks of a zoo: a column of its table, or their positions."""
    for name in ("network", "file", "path"):
        if name in zoo.store.table.column_names:
            return name, zoo.column(name).to_pylist()
    return "network", list(map(int, zoo.indices()))


def _draw_curves(task: Task[Options], folder: RunFolder) -> None:
    from nfn_graph.tasks.reports.figures import curves, read_curves

    columns = read_curves(folder.path / "logs" / "metrics.csv")
    shown = {k: v for k, v in columns.items() if k.endswith(("/loss", f"/{task.monitor}"))}
    curves(folder.figures / "curves.png", shown, title=f"{task.options.model}, learning curves")


def _report(folder: RunFolder) -> None:
    from nfn_graph.tasks.reports.run_page import run_report

    run_report(folder.path)


@contextmanager
def quiet() -> Iterator[None]:
    """Silences Lightning's advice, which does not apply to such small data."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for message in (
                ".*does not have many workers.*",
                ".*Checkpoint directory .* exists and is not empty.*",
                ".*GPU available but not used.*",
                ".*LeafSpec.*is deprecated.*",
                # The metrics of a split are computed from all predictions, so equal everywhere.
                ".*sync_dist=True.*",
            ):
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        logger.setLevel(level)
