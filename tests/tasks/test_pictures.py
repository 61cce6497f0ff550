"""The pictures of the tasks that return weights, by what they show."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from nfn_graph.tasks.reports.edits import edit_sheet
from nfn_graph.tasks.reports.scores import score_plot


def test_scores_are_drawn_where_they_are(tmp_path: Path) -> None:
    """Every weight is a point at its value and score, among those pruned or those kept."""
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


def test_the_sheet_has_a_row_each(tmp_path: Path) -> None:
    """Original, edited and target, from top to bottom, a column for every network."""
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
