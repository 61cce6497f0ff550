"""Training many networks at once is equivalent to training each of them alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_data import tiny_images

from nfn_graph.tasks.zoo.classifiers import (
    Architecture,
    TrainingData,
    build_module,
    forward,
    initialise,
)
from nfn_graph.tasks.zoo.cnn import CnnZooOptions, draw_run, padding_of
from nfn_graph.tasks.zoo.seeds import generator_of, random_bytes, seed_of
from nfn_graph.tasks.zoo.training import (
    BLOCK,
    ClassifierRun,
    ImageOrder,
    TrainedCheckpoint,
    train_classifiers,
)

IMAGES = tiny_images()
DATA = TrainingData.of(IMAGES, torch.device("cpu"), torch.float64)
BATCH = 16
OPTIMISERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "rmsprop": torch.optim.RMSprop}


def draw_runs(arch: str, count: int = 9, **options: object) -> list[ClassifierRun]:
    chosen = CnnZooOptions(
        Path("unused"),
        arch=arch,  # type: ignore[arg-type]
        batch_size=BATCH,
        epochs=(2, 8),
        widths=(5,),
        depths=(2,),
        activations=("tanh",),
        checkpoints=(0.0, 0.5, 1.0),
        learning_rate=(1e-3, 1e-2),
        **options,  # type: ignore[arg-type]
    )
    runs = [draw_run(chosen, IMAGES, network) for network in range(count)]
    return sorted(runs, key=lambda run: run.optimiser)


def train_plainly(run: ClassifierRun) -> dict[int, nn.Module]:
    """The reference trains one network with an ordinary module and torch's own optimiser."""
    network = build_module(run.architecture, run.activation).double()
    fresh = initialise(
        run.architecture, run.init, run.init_scale, generator_of(run.seed, "initial")
    )
    network.load_state_dict(fresh)
    optimiser = OPTIMISERS[run.optimiser](network.parameters(), lr=run.learning_rate)
    order = ImageOrder(run.seed, run.num_images, len(DATA.train_images))
    stream = np.random.SFC64(seed_of(run.seed, "dropout"))
    found, factors = {}, []
    for step in range(run.num_steps + 1):
        if step % BLOCK == 0 and run.dropout:
            shapes = [(BLOCK, *units, BATCH) for units in run.architecture.units]
            kept = round(256 * (1 - run.dropout))
            factors = [(random_bytes(stream, s) < kept).double() * (256 / kept) for s in shapes]
        if step in run.checkpoints:
            found[step] = build_module(run.architecture, run.activation).double()
            found[step].load_state_dict(network.state_dict())
        batch = order.take(BATCH)
        now = [f[step % BLOCK] for f in factors]
        outputs = plain_forward(network, DATA.train_images[batch], now)
        loss = F.cross_entropy(outputs, DATA.train_labels[batch])
        squares = sum(p.square().sum() for p in network.parameters() if p.dim() > 1)
        optimiser.zero_grad()
        (loss + run.l2 * squares).backward()
        optimiser.step()
    return found


def plain_forward(network: nn.Module, x: Tensor, factors: list[Tensor]) -> Tensor:
    """The module's layers one by one, with given factors after each activation."""
    layers = list(network.layers)
    for i, layer in enumerate(layers):
        if isinstance(layer, nn.Linear) and x.dim() == 4:
            x = x.mean((2, 3)) if i else x.flatten(1)
        x = layer(x)
        if i < len(layers) - 1:
            x = torch.tanh(x)
            if factors:
                x = x * factors[i].movedim(-1, 0)
    return x


@pytest.mark.parametrize("arch", ["mlp", "cnn"])
@pytest.mark.parametrize("dropout", [False, True])
def test_together_equals_plain_torch(arch: str, dropout: bool) -> None:
    runs = draw_runs(arch, dropout_share=float(dropout))
    assert {run.optimiser for run in runs} == {"sgd", "adam", "rmsprop"}
    assert len({run.num_steps for run in runs}) > 3
    assert all(bool(run.dropout) == dropout for run in runs)
    together = list(train_classifiers(runs, DATA, BATCH))
    assert len(together) == sum(len(run.checkpoints) for run in runs)
    alone = {run.network: train_plainly(run) for run in runs}
    moved = 0.0
    for checkpoint in together:
        expected = alone[checkpoint.run.network][checkpoint.step]
        for key, value in expected.state_dict().items():
            torch.testing.assert_close(checkpoint.parameters[key], value, atol=1e-10, rtol=1e-10)
            start = alone[checkpoint.run.network][0].state_dict()[key]
            moved = max(moved, float((value - start).abs().max()))
        check_metrics(checkpoint, expected)
    assert moved > 0.01


def check_metrics(checkpoint: TrainedCheckpoint, network: nn.Module) -> None:
    run = checkpoint.run
    seen = ImageOrder(run.seed, run.num_images, len(DATA.train_images)).images
    with torch.no_grad():
        train, test = network(DATA.train_images[seen]), network(DATA.test_images)
    labels = DATA.train_labels[seen]
    assert checkpoint.metrics == pytest.approx(
        (
            F.cross_entropy(train, labels).item(),
            (train.argmax(1) == labels).double().mean().item(),
            F.cross_entropy(test, DATA.test_labels).item(),
            (test.argmax(1) == DATA.test_labels).double().mean().item(),
        ),
        abs=1e-9,
    )


def test_groups_do_not_matter() -> None:
    runs = draw_runs("cnn", dropout_share=0.5)
    together = {(c.run.network, c.step): c for c in train_classifiers(runs, DATA, BATCH)}
    for run in runs[::3]:
        for checkpoint in train_classifiers([run], DATA, BATCH):
            other = together[run.network, checkpoint.step]
            for key, value in checkpoint.parameters.items():
                torch.testing.assert_close(value, other.parameters[key], atol=1e-10, rtol=1e-10)


def test_other_seeds_give_other_networks() -> None:
    first, second = draw_runs("mlp", 2, dropout_share=0.0)
    second = replace(first, seed=second.seed)
    a, b = (c for c in train_classifiers([first, second], DATA, BATCH) if c.step == 0)
    assert not torch.equal(a.parameters["layers.0.weight"], b.parameters["layers.0.weight"])
    orders = [ImageOrder(run.seed, run.num_images, 48).take(20).tolist() for run in (first, second)]
    assert orders[0] != orders[1]


def test_order_sees_every_image_once_per_epoch() -> None:
    run = replace(draw_runs("mlp", 1)[0], num_images=10)
    order = ImageOrder(run.seed, run.num_images, 48)
    taken = torch.cat([order.take(7), order.take(13), order.take(10)]).view(3, 10)
    assert len(set(order.images.tolist())) == 10
    for epoch in taken:
        assert sorted(epoch.tolist()) == sorted(order.images.tolist())
    assert taken[0].tolist() != taken[1].tolist()


@pytest.mark.parametrize("pool", ["mean", "flatten"])
@pytest.mark.parametrize("channels", [1, 3])
def test_batched_outputs_are_those_of_modules(pool: str, channels: int) -> None:
    shape = Architecture((channels, 9, 11), (4, 3), (5,), 3, padding=1, pool=pool)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    networks = [initialise(shape, "he_normal", 1.0, generator) for _ in range(3)]
    stacked = {key: torch.stack([n[key] for n in networks]).double() for key in networks[0]}
    own = torch.randn(6, 3, channels, 9, 11, dtype=torch.float64)
    found = forward(shape, stacked, "relu", own)
    shared = forward(shape, stacked, "relu", own[:, :1])
    for i, network in enumerate(networks):
        module = build_module(shape, "relu").double()
        module.load_state_dict(network)
        torch.testing.assert_close(found[i].t(), module(own[:, i]))
        torch.testing.assert_close(shared[i].t(), module(own[:, 0]))


def test_masked_weights_stay_zero() -> None:
    runs = [replace(run, l2=1e-2) for run in draw_runs("mlp", 4, dropout_share=0.0)]
    shapes = runs[0].architecture.shapes
    masks = {k: (torch.rand(4, *s) < 0.5).double() for k, s in shapes.items() if len(s) > 1}
    for checkpoint in train_classifiers(runs, DATA, BATCH, masks=masks):
        for key, mask in masks.items():
            value = checkpoint.parameters[key]
            own = mask[runs.index(checkpoint.run)]
            assert torch.equal(value == 0, own == 0)


def test_initial_weights_can_be_given() -> None:
    runs = draw_runs("mlp", 2, dropout_share=0.0)
    initial = {k: torch.randn(2, *s) for k, s in runs[0].architecture.shapes.items()}
    starts = [c for c in train_classifiers(runs, DATA, BATCH, initial=initial) if c.step == 0]
    for i, checkpoint in enumerate(starts):
        for key, value in checkpoint.parameters.items():
            assert torch.equal(value, initial[key][i].double())


def test_padding_only_where_needed() -> None:
    options = CnnZooOptions(Path("unused"), depths=(2, 3))
    assert padding_of(options, tiny_images(size=8)) == 1
    assert padding_of(options, tiny_images(size=15)) == 0
    assert padding_of(replace(options, depths=(2,)), tiny_images(size=8)) == 0
    with pytest.raises(ValueError, match="large enough for 3 convolutions"):
        draw_run(replace(options, depths=(3,), padding=0), tiny_images(size=8), 0)


def test_mixed_kinds_are_refused() -> None:
    first, second = draw_runs("mlp", 2)
    with pytest.raises(ValueError, match="one architecture and activation"):
        list(train_classifiers([first, replace(second, activation="relu")], DATA, BATCH))


def test_no_dropout_drops_all() -> None:
    runs = draw_runs("mlp", 3, dropout_share=1.0, dropout=(0.999, 0.9999))
    assert all(0.99 < run.dropout < 1 for run in runs)
    assert all(
        x.isfinite().all()
        for checkpoint in train_classifiers(runs, DATA, BATCH)
        for x in checkpoint.parameters.values()
    )


def test_diverged_networks_are_right_about_nothing() -> None:
    run = replace(draw_runs("mlp", 1, dropout_share=0.0)[0], learning_rate=1e200, optimiser="sgd")
    last = list(train_classifiers([run], DATA, BATCH))[-1]
    assert not all(x.isfinite().all() for x in last.parameters.values())
    assert last.metrics.test_accuracy == 0
