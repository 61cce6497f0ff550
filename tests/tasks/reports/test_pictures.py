"""The pictures of the tasks that return weights are checked by their content."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from nfn_graph import Probe, ProbeNet
from nfn_graph.converters import from_module
from nfn_graph.tasks.reports.network_figures import (
    draw_probes,
    edit_sheet,
    probe_images,
    probe_points,
    score_plot,
)


def test_scores_are_drawn_where_they_are(tmp_path: Path) -> None:
    """Every weight is a point at its value and score, in the colour of pruned or kept weights."""
    torch.manual_seed(0)
    layers = {
        name: (torch.randn(50), torch.randn(50), torch.rand(50) < 0.3)
        for name in ("input to hidden1", "hidden1 to output")
    }
    figure = score_plot(tmp_path / "scores.png", layers, title="nfn-np, test")
    assert (tmp_path / "scores.png").stat().st_size > 1000
    assert [axes.get_title() for axes in figure.axes] == list(layers)
    for axes, (initial, scores, kept) in zip(figure.axes, layers.values(), strict=True):
        pruned_points, kept_points = axes.collections
        for points, chosen in ((pruned_points, ~kept), (kept_points, kept)):
            expected = torch.stack([initial[chosen], scores[chosen]], 1).numpy()
            np.testing.assert_allclose(np.asarray(points.get_offsets()), expected, rtol=1e-6)
        colours = [points.get_facecolor().tolist() for points in (pruned_points, kept_points)]
        assert colours[0] != colours[1]


def test_probes_are_drawn_where_they_lie(tmp_path: Path) -> None:
    """The first coordinate points down, like the rows of an image, and so does the background."""
    torch.manual_seed(0)
    points, background = torch.rand(7, 2) * 3 - 1.5, torch.rand(5, 5)
    figure = probe_points(tmp_path / "points.png", points, background)
    axes = figure.axes[0]
    offsets = np.asarray(axes.collections[0].get_offsets())
    np.testing.assert_allclose(offsets, points.flip(1).numpy(), rtol=1e-6)
    assert axes.get_ylim()[0] > axes.get_ylim()[1]
    assert axes.images[0].get_extent() == [-1, 1, 1, -1]
    np.testing.assert_allclose(axes.images[0].get_array(), background.numpy())
    assert len(probe_points(tmp_path / "cube.png", torch.rand(7, 3)).axes) == 3


def test_probe_images_share_a_scale(tmp_path: Path) -> None:
    torch.manual_seed(0)
    images = torch.randn(60, 1, 4, 4)
    figure = probe_images(tmp_path / "images.png", images)
    drawn = [axes.images[0] for axes in figure.axes if axes.images]
    assert len(drawn) == 48
    assert len({image.get_clim() for image in drawn}) == 1
    for image, pixels in zip(drawn, images[:48, 0], strict=True):
        np.testing.assert_allclose(image.get_array(), pixels.numpy())
    assert probe_images(tmp_path / "colour.png", torch.rand(3, 3, 4, 4)).axes


@pytest.mark.parametrize("inputs", [2, 3, 5])
def test_only_probes_that_can_be_seen_are_drawn(inputs: int, tmp_path: Path) -> None:
    graph = from_module(nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, 1)))
    model = ProbeNet(Probe(graph.spec, 6), 2)
    figure = draw_probes(tmp_path / "probes.png", model, [graph, graph])
    assert (figure is not None) == (inputs < 4) == (tmp_path / "probes.png").is_file()
    assert draw_probes(tmp_path / "none.png", model.head, [graph]) is None


def test_the_sheet_has_a_row_each(tmp_path: Path) -> None:
    """Original, edited network and target from top to bottom, and one column per network."""
    torch.manual_seed(0)
    rows = {name: torch.rand(3, 1, 6, 5) for name in ("original", "edited", "target")}
    figure = edit_sheet(tmp_path / "sheet.png", *rows.values())
    assert (tmp_path / "sheet.png").stat().st_size > 1000
    panels = iter(figure.axes)
    for name, pictures in rows.items():
        for column, picture in enumerate(pictures):
            axes = next(panels)
            shown = np.asarray(axes.images[0].get_array())
            np.testing.assert_allclose(shown.reshape(6, 5), picture[0].numpy(), rtol=1e-6)
            assert axes.get_ylabel() == (name if column == 0 else "")
    assert next(panels, None) is None
