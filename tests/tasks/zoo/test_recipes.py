"""Recipes of published zoos: real options, explicit ones count instead, and what they ask for."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from siren_data import blobs

from nfn_graph.cli import main
from nfn_graph.tasks.zoo import InrZooOptions, build_zoo, open_zoo_folder
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
    """Also where the value that is given is the default."""
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
    """A network stops at the ratio that was asked for, and the others go on."""
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
    """Networks of one shape that are not trained at all differ only without --same-init."""
    for same in (True, False):
        options = InrZooOptions(
            tmp_path / str(same), widths=(4,), steps=1, learning_rate=1e-12, same_init=same
        )
        zoo = open_zoo_folder(build_zoo(options, source=blobs(6)))
        first, second = zoo[0].to_tensors(), zoo[1].to_tensors()
        close = all(torch.allclose(x, second[key], atol=1e-6) for key, x in first.items())
        assert close == same
