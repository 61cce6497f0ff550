"""Zoos of small classifiers: `build_cnn_zoo`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from nfn_graph.tasks.sources import Images, open_images
from nfn_graph.tasks.zoo.build import (
    BuiltNetwork,
    OnSteps,
    build_shards,
    device_of,
    dtype_of,
    grouped,
    networks_together,
    plain_options,
)
from nfn_graph.tasks.zoo.metrics import TrainingData
from nfn_graph.tasks.zoo.options import CnnZooOptions
from nfn_graph.tasks.zoo.runs import ClassifierRun, draw_run, largest_activation
from nfn_graph.tasks.zoo.store import Row, ZooWriter
from nfn_graph.tasks.zoo.training import TrainedCheckpoint, train_classifiers

_NOT_IN_ROWS = ("architecture", "checkpoints")


def build_cnn_zoo(
    options: CnnZooOptions, *, images: Images | None = None, progress: bool = False
) -> Path:
    """Trains a zoo of classifiers, or what is missing of it.

    Args:
        options: What to build, and where.
        images: The data, if not to be read from `options.data`.
        progress: Whether to show a progress bar.

    Returns:
        The zoo's folder, for `open_zoo_folder`.
    """
    options.check()
    device, dtype = device_of(options), dtype_of(options)
    images = open_images(options.data) if images is None else images
    images.check_both_splits()
    runs = [draw_run(options, images, network) for network in range(options.networks)]
    writer = ZooWriter(
        Path(options.out),
        "cnn",
        plain_options(options),
        TrainingData.facts(images),
    )
    data: list[TrainingData] = []

    def train(chosen: Sequence[ClassifierRun], on_steps: OnSteps) -> list[BuiltNetwork]:
        if not data:
            data.append(TrainingData.of(images, device, dtype))
        found: list[TrainedCheckpoint] = []
        for group in grouped(
            chosen,
            key=lambda run: (run.architecture, run.activation, run.dropout > 0),
            # Networks that are trained for about as long finish together.
            order=lambda run: run.num_steps,
            together=lambda run: networks_together(
                options, largest_activation(run, options.batch_size)
            ),
        ):
            group.sort(key=lambda run: run.optimiser)
            found += train_classifiers(group, data[0], options.batch_size, on_steps=on_steps)
        found.sort(key=lambda c: (c.run.network, c.step))
        return [(_row(c, options), c.run.architecture.name, c.parameters) for c in found]

    build = partial(build_cnn_zoo, images=images)
    return build_shards(
        options, writer, runs, lambda run: run.num_steps, train, build, progress=progress
    )


def _row(checkpoint: TrainedCheckpoint, options: CnnZooOptions) -> Row:
    run = checkpoint.run
    values: dict[str, Any] = {
        f.name: getattr(run, f.name) for f in fields(run) if f.name not in _NOT_IN_ROWS
    }
    hidden = run.architecture.convolutions or run.architecture.hidden
    return {
        **values,
        "arch": options.arch,
        "width": hidden[0] if hidden else 0,
        "depth": len(hidden),
        "padding": run.architecture.padding,
        "batch_size": options.batch_size,
        "step": checkpoint.step,
        "epoch": checkpoint.step * options.batch_size / run.num_images,
        "is_last": checkpoint.step == run.num_steps,
        "is_finite": all(bool(x.isfinite().all()) for x in checkpoint.parameters.values()),
        **checkpoint.metrics._asdict(),
    }
