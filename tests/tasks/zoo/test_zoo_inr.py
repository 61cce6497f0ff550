"""Zoos of SIRENs: fits, PSNR, pictures."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from zoo_data import tiny_images

from nfn_graph.cli import main
from nfn_graph.tasks.classify_inr import ClassifyInr, ClassifyInrOptions
from nfn_graph.tasks.sources import Clouds
from nfn_graph.tasks.sources.clouds import normalise
from nfn_graph.tasks.zoo import (
    InrZooOptions,
    build_zoo,
    open_zoo_folder,
    render_networks,
    render_zoo,
)
from nfn_graph.tasks.zoo.inr import list_fits
from nfn_graph.tasks.zoo.optimisers import stack
from nfn_graph.tasks.zoo.seeds import generator_of
from nfn_graph.tasks.zoo.siren import (
    FitSettings,
    FitTargets,
    SirenShape,
    fit_sirens,
    initialise_siren,
    pixel_grid,
    siren_forward,
)

IMAGES = tiny_images(30)
SHAPE = SirenShape(2, (6, 5), 1)


class Siren(nn.Module):
    """One SIREN, as Sitzmann et al. write it: the reference."""

    def __init__(self, shape: SirenShape, w0: float) -> None:
        super().__init__()
        widths = (shape.inputs, *shape.hidden, shape.outputs)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))  # noqa: B905, RUF007
        self.w0 = w0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.sin(self.w0 * layer(x))
        return self.layers[-1](x) + 0.5


def pixels_of(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.array(image)


def small(out: Path, **options: object) -> InrZooOptions:
    chosen = InrZooOptions(
        out, images=6, test_images=2, fits=2, widths=(8, 12), steps=60, shard_size=5
    )
    return replace(chosen, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("points", [0, 20])
def test_together_equals_plain_torch(points: int) -> None:
    grid = pixel_grid(8, 8, torch.float64)
    values = IMAGES.values(torch.arange(4)).flatten(2).double()
    settings = FitSettings(30.0, 0.5, 25, 1e-3, points, 7)
    seeds = [11, 12, 13, 14]
    fits = fit_sirens(SHAPE, seeds, FitTargets(grid, values), settings)
    for i, seed in enumerate(seeds):
        network = Siren(SHAPE, 30.0).double()
        network.load_state_dict(initialise_siren(SHAPE, 30.0, generator_of(seed, "initial")))
        optimiser = torch.optim.Adam(network.parameters(), lr=1e-3)
        draws = generator_of(7, "points")
        for _ in range(25):
            chosen = torch.randint(64, (20,), generator=draws) if points else slice(None)
            optimiser.zero_grad()
            error = network(grid.t()[chosen]) - values[i].t()[chosen]
            error.square().mean().backward()
            optimiser.step()
        for key, value in network.state_dict().items():
            torch.testing.assert_close(fits.parameters[key][i], value, atol=1e-10, rtol=1e-10)
        error = (network(grid.t()) - values[i].t()).square().mean()
        torch.testing.assert_close(fits.errors[i], error.detach())


def test_own_coordinates() -> None:
    parameters = stack([initialise_siren(SHAPE, 30.0, generator_of(s, "x")) for s in range(3)])
    points = torch.rand(3, 2, 7)
    found = siren_forward(parameters, points, 30.0)
    for i in range(3):
        one = {key: x[i : i + 1] for key, x in parameters.items()}
        torch.testing.assert_close(found[i : i + 1], siren_forward(one, points[i], 30.0))


def test_zoo(tmp_path: Path) -> None:
    zoo = open_zoo_folder(build_zoo(small(tmp_path / "zoo"), source=IMAGES))
    rows = zoo.rows
    by_split = {s: [r for r in rows if r["split"] == s] for s in ("train", "validation", "test")}
    assert len(by_split["test"]) == 2
    assert len(by_split["train"]) // 2 + len(by_split["validation"]) == 6
    assert all(int(IMAGES.labels[r["image"]]) == r["label"] for r in rows)
    assert all(bool(IMAGES.is_test[r["image"]]) == (r["split"] == "test") for r in rows)
    assert {r["width"] for r in rows} == {8, 12}
    assert all(r["w0"] == 30 and r["output_offset"] == 0.5 for r in rows)
    pictures = render_networks(zoo, range(len(zoo)))
    for row, picture in zip(rows, pictures, strict=True):
        mse = (picture - IMAGES.values(slice(row["image"], row["image"] + 1))[0]).square().mean()
        assert -10 * torch.log10(mse).item() == pytest.approx(row["psnr"], abs=1e-3)
        assert row["psnr"] > 12
    assert zoo[0].layout.shape.sizes[1] == (rows[0]["width"],)


def test_several_fits_differ_in_weights_not_in_the_picture(tmp_path: Path) -> None:
    options = small(tmp_path / "zoo", steps=400, widths=(24,), fits=3, validation_share=0.0)
    zoo = open_zoo_folder(build_zoo(options, source=IMAGES))
    assert [(r["image"], r["fit"]) for r in zoo.rows[:3]] == [
        (zoo.rows[0]["image"], f) for f in range(3)
    ]
    first, second = zoo.state_dict(0), zoo.state_dict(1)
    assert (first["layers.0.weight"] - second["layers.0.weight"]).abs().mean() > 0.1
    pictures = render_networks(zoo, [0, 1, 3])
    assert (pictures[0] - pictures[1]).abs().max() < 0.1
    assert (pictures[0] - pictures[2]).abs().max() > 0.1


def test_sharding_does_not_matter(tmp_path: Path) -> None:
    chosen = {"dtype": "float64", "points": 20}
    zoos = [
        open_zoo_folder(
            build_zoo(small(tmp_path / str(n), shard_size=n, together=t, **chosen), source=IMAGES)
        )
        for n, t in ((100, 0), (3, 2))
    ]
    assert len(zoos[0]) == len(zoos[1])
    for i in range(len(zoos[0])):
        for key, value in zoos[0].state_dict(i).items():
            torch.testing.assert_close(value, zoos[1].state_dict(i)[key], atol=1e-10, rtol=1e-10)


def sphere_clouds() -> Clouds:
    points = torch.randn(4, 600, 3, generator=torch.Generator().manual_seed(0))
    points = points / points.norm(dim=-1, keepdim=True)
    flags = torch.tensor([False, False, False, True])
    return Clouds("spheres", normalise(points), torch.zeros(4).long(), flags, ("sphere",))


def test_clouds(tmp_path: Path) -> None:
    options = small(tmp_path / "zoo", kind="cloud", images=3, test_images=1, widths=(), steps=300)
    options = replace(options, samples=2000, fits=1)
    zoo = open_zoo_folder(build_zoo(options, source=sphere_clouds()))
    assert zoo.rows[0]["shape"] == "3-128-1"
    assert all(row["psnr"] > 20 for row in zoo.rows)
    parameters = {key: x.unsqueeze(0) for key, x in zoo.state_dict(0).items()}
    points = torch.tensor([[0.0, 0, 0], [0.9, 0, 0], [0, 0.45, 0]]).t()
    found = siren_forward(parameters, points, 30.0)[0, 0]
    assert found[0] > found[2] > found[1]
    render_zoo(zoo, tmp_path / "a.png", zoom=1)
    assert pixels_of(tmp_path / "a.png").shape == (102, 102)


def test_sheet_shows_the_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "zoo")
    # fmt: off
    arguments = ["--images", "3", "--test-images", "1", "--steps", "300", "--validation-share", "0"]
    # fmt: on
    assert main(["zoo", "inr", "--out", out, *arguments]) == 0
    assert "4 networks, mean PSNR" in capsys.readouterr().out
    sheet = tmp_path / "sheet.png"
    assert main(["zoo", "render", out, "-o", str(sheet), "--zoom", "2"]) == 0
    pixels = pixels_of(sheet)
    zoo = open_zoo_folder(out)
    assert pixels.shape == (2 * (16 + 2) + 2,) * 2
    from nfn_graph.tasks.sources import open_images

    digits = open_images("digits")
    for i, row in enumerate(zoo.rows):
        top, left = i // 2 * 18 + 2, i % 2 * 18 + 2
        shown = pixels[top : top + 16 : 2, left : left + 16 : 2] / 255
        expected = digits.values(slice(row["image"], row["image"] + 1))[0, 0].numpy()
        assert np.abs(shown - expected).mean() < 0.05
    assert main(["zoo", "render", out, "--split", "validation"]) == 2
    assert "--split validation" in capsys.readouterr().err


def test_too_many_images(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at most 24 for --images"):
        list_fits(small(tmp_path, images=25), IMAGES)
    with pytest.raises(ValueError, match="no --samples with --kind image"):
        small(tmp_path, samples=100).check()
    assert len(list_fits(small(tmp_path, images=0, test_images=0, fits=1), IMAGES)) == 30


def test_diverged_fits_are_known_as_such(tmp_path: Path) -> None:
    options = small(tmp_path / "zoo", images=2, test_images=1, fits=1, steps=3, learning_rate=1e38)
    zoo = open_zoo_folder(build_zoo(options, source=IMAGES))
    assert all(math.isnan(row["mse"]) and math.isnan(row["psnr"]) for row in zoo.rows)
    task = ClassifyInr(ClassifyInrOptions(tmp_path / "zoo", tmp_path / "run"))
    assert len(task.usable(zoo)) == 0 < len(zoo)


def test_colour(tmp_path: Path) -> None:
    images = tiny_images(10, channels=3)
    options = small(tmp_path / "zoo", images=2, test_images=1, fits=1)
    zoo = open_zoo_folder(build_zoo(options, source=images))
    assert zoo.rows[0]["shape"].endswith("-3")
    assert render_networks(zoo, [0], (5, 6)).shape == (1, 3, 5, 6)
    render_zoo(zoo, tmp_path / "a.png")
    assert pixels_of(tmp_path / "a.png").shape[2] == 3
