"""Recipes of published zoos: valid options, which explicit options override."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from siren_data import blobs
from torch import Tensor
from zoo_data import tiny_images

from nfn_graph import Batch, InvariantNFN
from nfn_graph.cli import main
from nfn_graph.converters import WeightDataset
from nfn_graph.tasks.supervised import largest_parts, unifying, without_refused
from nfn_graph.tasks.zoo import CnnZooOptions, InrZooOptions, build_zoo, open_zoo_folder
from nfn_graph.tasks.zoo.classifiers import Architecture, build_module, forward, initialise
from nfn_graph.tasks.zoo.cnn import draw_run
from nfn_graph.tasks.zoo.recipes import RECIPES, expanded
from nfn_graph.tasks.zoo.siren import (
    FitSettings,
    FitTargets,
    SirenShape,
    fit_sirens,
    initialise_siren,
    pixel_grid,
)
from nfn_graph.tasks.zoo.zoo_commands import COMMANDS

ALL = [(command, name) for command, found in RECIPES.items() for name in found]
SHAPE = SirenShape(2, (6, 5), 1)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Coloured images of two classes."""
    draw = np.random.default_rng(0)
    path = tmp_path / "images.npz"
    pixels = draw.integers(0, 255, (40, 16, 16, 3), dtype=np.uint8)
    np.savez(path, x_train=pixels, y_train=np.arange(40) % 2, x_test=pixels[:10], y_test=[0, 1] * 5)
    return path


@pytest.mark.parametrize(("command", "name"), ALL)
def test_every_value_is_an_option_with_a_source(command: str, name: str, tmp_path: Path) -> None:
    recipe = RECIPES[command][name]
    options = COMMANDS[command][0]
    assert set(recipe.options) <= {field.name for field in fields(options)}
    options(tmp_path, recipe=name, **recipe.options).check()
    with pytest.raises(ValueError, match="with the values of the recipe"):
        options(tmp_path, recipe=name).check()
    assert all(source for _, source in recipe.values.values()) and recipe.about


@pytest.mark.parametrize(
    "words", [["--recipe", "dws", "--steps", "3"], ["--steps", "3", "--recipe=dws"]]
)
def test_given_options_count_instead(words: list[str], images: Path, tmp_path: Path) -> None:
    """This also holds if the given value is the default."""
    command = ["zoo", "inr", "--out", str(tmp_path / "zoo"), "--data", str(images)]
    assert main([*command, *words, "--init", "sitzmann"]) == 0
    found = json.loads((tmp_path / "zoo" / "store.json").read_text())["options"]
    assert (found["steps"], found["init"]) == (3, "sitzmann")
    assert found["recipe"] == "dws"
    assert (found["learning_rate"], found["stop_psnr"]) == (5e-4, 40.0)
    rows = open_zoo_folder(tmp_path / "zoo").rows
    assert {(row["shape"], row["output_offset"]) for row in rows} == {("2-32-32-3", 0.5)}


def test_the_small_cnn_zoo(images: Path, tmp_path: Path) -> None:
    command = ["zoo", "cnn", "--recipe", "small-cnn-zoo", "--out", str(tmp_path / "zoo")]
    assert main([*command, "--data", str(images), "--networks", "12", "--epochs", "1", "1"]) == 0
    zoo = open_zoo_folder(tmp_path / "zoo")
    sizes = {sum(x.numel() for x in graph.to_tensors().values()) for graph in zoo}
    # 4,970 with ten classes; these images have two.
    assert sizes == {4970 - 8 * 17}
    assert zoo.description["image_shape"] == [1, 16, 16]
    stds = [r["init_scale"] / 10 for r in zoo.rows if r["init"] in ("normal", "truncated_normal")]
    assert stds and min(stds) >= 1e-3 and max(stds) <= 0.5
    assert {r["init_scale"] for r in zoo.rows if r["init"] == "orthogonal"} <= {1.0}


WILD = RECIPES["cnn"]["wild-park"].options


def test_hyperparameters_of_the_wild_park(tmp_path: Path) -> None:
    """Exactly the published values occur."""
    options = CnnZooOptions(tmp_path, recipe="wild-park", **WILD)
    images = tiny_images(size=8, channels=3)
    runs = [draw_run(options, images, network) for network in range(400)]
    shapes = [run.architecture for run in runs]
    assert {len(a.convolutions) for a in shapes} == {2, 3, 4, 5}
    assert {n for a in shapes for n in a.convolutions} == {4, 8, 16, 32}
    assert {n for a in shapes for n in a.kernels} == {3, 5, 7}
    signals = {"relu", "gelu", "tanh", "sigmoid", "leaky_relu", "none"}
    assert {name for a in shapes for name in a.activations} == signals
    for at in range(5):
        found = {a.skips[at] for a in shapes if len(a.skips) > at}
        assert found == {-1, *range(at - 1)}, f"convolution {at} adds {found}"
    for a in shapes:
        assert len({len(x) for x in (a.convolutions, a.kernels, a.skips, a.activations)}) == 1
        # All maps have the size of the image.
        assert set(a.maps) == {(8, 8)} and not a.hidden
    # The layers of one network differ.
    assert any(len(set(a.convolutions)) > 2 and len(set(a.kernels)) > 1 for a in shapes)
    assert {(r.optimiser, r.learning_rate, r.l2, r.dropout) for r in runs} == {("adam", 1e-3, 0, 0)}
    assert {(r.init, r.init_scale, r.train_fraction) for r in runs} == {("pytorch", 1.0, 1.0)}
    epochs = [run.epochs for run in runs]
    assert 200 <= min(epochs) < 300 and 900 < max(epochs) <= 1000
    for run in runs:
        # There is one step per epoch, because a batch contains all images.
        assert run.num_images == len(images.train_index) < options.batch_size == 512
        stored = {math.ceil(e * run.num_images / 512) for e in range(10, run.epochs + 1, 10)}
        assert set(run.checkpoints) == {*stored, run.num_steps}


def test_the_wild_park_from_the_command_line(images: Path, tmp_path: Path) -> None:
    command = ["zoo", "cnn", "--recipe", "wild-park", "--out", str(tmp_path / "zoo")]
    assert main([*command, "--data", str(images), "--networks", "2", "--epochs", "1", "1"]) == 0
    found = json.loads((tmp_path / "zoo" / "store.json").read_text())["options"]
    plain = {name: list(v) if isinstance(v, tuple) else v for name, v in WILD.items()}
    assert {name: found[name] for name in WILD} == {**plain, "epochs": [1, 1]}
    assert len(open_zoo_folder(tmp_path / "zoo")) == 2


@pytest.fixture(scope="module")
def park(tmp_path_factory: pytest.TempPathFactory) -> WeightDataset:
    """Networks of the recipe, each after a step of training and after two."""
    options = CnnZooOptions(
        tmp_path_factory.mktemp("zoos") / "park",
        recipe="wild-park",
        networks=24,
        **{**WILD, "epochs": (2, 2), "checkpoint_epochs": 1, "batch_size": 48},
    )
    return open_zoo_folder(build_zoo(options, source=tiny_images(size=8, channels=3)))


def park_outputs(row: Mapping[str, Any], tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Computes the logits of a network in the published form of the Wild Park."""
    functions = {
        "relu": F.relu,
        "gelu": F.gelu,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        "leaky_relu": F.leaky_relu,
        "none": torch.clone,
    }
    names, skips = row["activation"].split(), [int(n) for n in row["skips"].split()]
    kept: list[Tensor] = []
    for i, (name, source) in enumerate(zip(names, skips, strict=True)):
        weight = tensors[f"layers.{i}.weight"]
        x = F.conv2d(x, weight, tensors[f"layers.{i}.bias"], 1, weight.shape[-1] // 2)
        if source >= 0:
            shared = min(x.shape[1], kept[source].shape[1])
            x[:, :shared] += kept[source][:, :shared]
        x = functions[name](x)
        kept.append(x)
    last = f"layers.{len(names)}"
    return F.linear(x.mean((2, 3)), tensors[f"{last}.weight"], tensors[f"{last}.bias"])


def test_networks_of_the_wild_park_run(park: WeightDataset) -> None:
    assert len(park) == 48 and all(row["is_finite"] for row in park.rows)
    for network in range(24):
        rows = [row for row in park.rows if row["network"] == network]
        assert len({row["split"] for row in rows}) == 1, "Checkpoints of a network are apart"
    images = torch.randn(3, 3, 8, 8)
    for i, row in enumerate(park.rows):
        tensors = park.state_dict(i)
        shapes = [tuple(x.shape) for key, x in tensors.items() if key.endswith("weight")]
        assert " ".join(str(shape[0]) for shape in shapes[:-1]) == row["widths"]
        assert " ".join(str(shape[2]) for shape in shapes[:-1]) == row["kernels"]
        wanted = park_outputs(row, tensors, images)
        torch.testing.assert_close(park[i].run(images), wanted, atol=1e-5, rtol=1e-4)
    assert any(row["skips"].count("-1") < row["depth"] for row in park.rows)


def test_networks_of_the_wild_park_train_together(park: WeightDataset) -> None:
    """One batch of many depths, kernels and skips in which every network has a gradient."""
    kept = without_refused(park)
    # In some networks, consecutive layers are tied to each other.
    assert len(kept) > len(park) / 2
    unify = unifying(largest_parts(kept.examples(), "roles"))
    graphs = [unify(graph) for graph in kept]
    assert len({(row["widths"], row["kernels"], row["skips"]) for row in kept.rows}) > 12
    batch = Batch.from_data_list(graphs)
    model = InvariantNFN(batch.spec, (4, 4), out_features=1, head=(8,))
    out = model(batch)
    assert out.shape == (len(kept), 1) and out.isfinite().all()
    out.square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert any(p.grad is not None and p.grad.any() for p in model.parameters())


def test_many_networks_with_skips_at_once() -> None:
    shape = Architecture(
        (3, 7, 9),
        (4, 6, 3, 5),
        (),
        3,
        "same",
        stride=1,
        kernels=(3, 5, 1, 7),
        skips=(-1, -1, 0, 1),
        activations=("gelu", "none", "leaky_relu", "sigmoid"),
    )
    generator = torch.Generator().manual_seed(0)
    networks = [initialise(shape, "pytorch", 1.0, generator) for _ in range(3)]
    stacked = {key: torch.stack([n[key] for n in networks]).double() for key in networks[0]}
    own = torch.randn(6, 3, 3, 7, 9, dtype=torch.float64, generator=generator)
    found = forward(shape, stacked, "relu", own)
    shared = forward(shape, stacked, "relu", own[:, :1])
    row = {"activation": " ".join(shape.activations), "skips": " ".join(map(str, shape.skips))}
    for i, network in enumerate(networks):
        module = build_module(shape, "relu").double()
        module.load_state_dict(network)
        doubles = {key: x.double() for key, x in network.items()}
        torch.testing.assert_close(module(own[:, i]), park_outputs(row, doubles, own[:, i]))
        torch.testing.assert_close(found[i].t(), module(own[:, i]))
        torch.testing.assert_close(shared[i].t(), module(own[:, 0]))
    # There is one name for one architecture.
    others = [
        replace(shape, kernels=(3, 5, 3, 7)),
        replace(shape, skips=(-1, -1, -1, 1)),
        replace(shape, activations=("gelu", "none", "leaky_relu", "relu")),
        replace(shape, stride=2),
    ]
    assert len({shape.name, *(other.name for other in others)}) == 5


def test_kernels_and_skips_without_other_differences(tmp_path: Path) -> None:
    """The table has a column for every sampled value, and no others."""
    options = CnnZooOptions(
        tmp_path,
        networks=6,
        depths=(3,),
        kernels=(3, 5),
        stride=1,
        padding="same",
        skips=True,
        epochs=(1, 1),
    )
    zoo = open_zoo_folder(build_zoo(options, source=tiny_images(30)))
    assert {row["kernels"] for row in zoo.rows} == {"3 3 3", "5 5 5"}
    assert {row["skips"] for row in zoo.rows} == {"-1 -1 -1", "-1 -1 0"}
    assert {row["activation"] for row in zoo.rows} == {"relu", "tanh"}
    assert "widths" not in zoo.rows[0] and {row["width"] for row in zoo.rows} == {16}
    images = torch.randn(2, 1, 8, 8)
    for i, row in enumerate(zoo.rows):
        wanted = park_outputs(
            {**row, "activation": " ".join([row["activation"]] * 3)}, zoo.state_dict(i), images
        )
        torch.testing.assert_close(zoo[i].run(images), wanted, atol=1e-5, rtol=1e-4)


def test_weights_of_pytorch() -> None:
    """Uniform within the root of the fan-in, also for biases, as in a new module."""
    shape = Architecture((3, 8, 8), (64,), (), 40, "same", stride=1, kernels=(5,))
    found = initialise(shape, "pytorch", 1.0, torch.Generator().manual_seed(0))
    fresh = build_module(shape, "relu").state_dict()
    for layer, inputs in ((0, 75), (1, 64)):
        for key in (f"layers.{layer}.weight", f"layers.{layer}.bias"):
            for tensors in (found, fresh):
                largest = tensors[key].abs().max()
                assert 0.8 / math.sqrt(inputs) < largest <= 1 / math.sqrt(inputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skips": True}, "--stride 1 and --padding same with --skips"),
        ({"skips": True, "stride": 1}, "--stride 1 and --padding same with --skips"),
        ({"kernels": (3, 4), "padding": "same"}, "odd --kernels with --padding same .got 3 4"),
        ({"kernels": ()}, "--kernels of at least 1 each .got none"),
        ({"arch": "mlp", "kernels": (5,)}, "no --kernels with --arch mlp .got 5"),
        ({"arch": "mlp", "per_layer": True}, "no --per-layer with --arch mlp"),
        ({"l2": (0.0, 1e-3)}, "--l2 as two numbers above 0"),
        ({"checkpoint_epochs": -1}, "--checkpoint-epochs of at least 0"),
    ],
)
def test_convolutions_that_make_no_sense(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        CnnZooOptions(tmp_path, **options).check()


def test_wrong_recipes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words in (["--recipe", "none"], ["--recipe"]):
        assert main(["zoo", "inr", "--out", str(tmp_path / "zoo"), *words]) == 2
        assert "--recipe" in capsys.readouterr().err
    assert main(["zoo", "tickets", "--out", str(tmp_path / "zoo"), "--recipe", "dws"]) == 2
    assert expanded([]) == [] and expanded(["info", "x"]) == ["info", "x"]


def test_weights_of_dwsnets() -> None:
    found = initialise_siren(SirenShape(2, (400, 300), 1), 30.0, torch.Generator(), "dws")
    for layer, inputs in ((0, 2), (1, 400)):
        bound = math.sqrt(6 / inputs) / 30
        assert found[f"layers.{layer}.weight"].abs().max() == pytest.approx(bound, rel=0.02)
        assert not found[f"layers.{layer}.bias"].any()
    assert found["layers.2.weight"].abs().max() == pytest.approx(1 / math.sqrt(300), rel=0.05)
    assert found["layers.2.bias"].any()


def test_finished_networks_stay_as_they_are() -> None:
    """A network stops at the requested ratio, and the others continue."""
    grid = pixel_grid(6, 6)
    noise = torch.randint(0, 2, (1, 36), generator=torch.Generator().manual_seed(0)).float()
    values = torch.stack([torch.full((1, 36), 0.5), noise])
    targets, seeds = FitTargets(grid, values), [1, 2]
    stopped = FitSettings(30.0, 0.5, 100, 1e-3, 0, 0, stop_psnr=25.0)
    few, many = (
        fit_sirens(SHAPE, seeds, targets, stopped._replace(steps=steps)) for steps in (60, 100)
    )
    unstopped = fit_sirens(SHAPE, seeds, targets, stopped._replace(stop_psnr=0.0))
    for key, x in many.parameters.items():
        assert torch.equal(x[0], few.parameters[key][0])
        assert not torch.equal(x[1], few.parameters[key][1])
        torch.testing.assert_close(x[1], unstopped.parameters[key][1])
    assert unstopped.errors[0] < many.errors[0] < 10**-2.5


def test_one_start_for_all_networks(tmp_path: Path) -> None:
    """Untrained networks of one shape only differ without --same-init."""
    for same in (True, False):
        options = InrZooOptions(
            tmp_path / str(same), widths=(4,), steps=1, learning_rate=1e-12, same_init=same
        )
        zoo = open_zoo_folder(build_zoo(options, source=blobs(6)))
        first, second = zoo[0].to_tensors(), zoo[1].to_tensors()
        close = all(torch.allclose(x, second[key], atol=1e-6) for key, x in first.items())
        assert close == same
