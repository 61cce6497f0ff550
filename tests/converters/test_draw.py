"""Pictures and tables are checked by their content."""

from __future__ import annotations

import io

import pytest
import torch
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.figure import Figure

from networks import chain
from nfn_graph import Batch, WeightGraph
from nfn_graph.converters.draw import draw
from nfn_graph.converters.state_dict import from_state_dict
from nfn_graph.converters.summary import COLUMNS, summary


def texts(figure: Figure) -> str:
    return "\n".join(text.get_text() for axes in figure.axes for text in axes.texts)


def edges(figure: Figure) -> list[LineCollection]:
    return [c for c in figure.axes[0].collections if isinstance(c, LineCollection)]


def neurons(figure: Figure) -> list[PathCollection]:
    return [c for c in figure.axes[0].collections if isinstance(c, PathCollection)]


def pixels(figure: Figure) -> torch.Tensor:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="rgba", dpi=50)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8).reshape(-1, 4)


def test_every_weight_and_neuron_of_a_small_network_is_shown() -> None:
    figure = draw(chain((2, 5, 3)))
    assert [len(c.get_segments()) for c in edges(figure)] == [10, 15]
    assert [len(c.get_offsets()) for c in neurons(figure)] == [2, 5, 3]
    assert all(name in texts(figure) for name in ("input", "hidden1", "output", "5 neurons"))
    assert "shown" not in texts(figure)
    assert list(figure.axes[0].images) == []


def test_colour_is_the_sign_and_size_of_a_weight() -> None:
    weight = torch.tensor([[2.0, -2.0, 0.0, float("nan")]])
    figure = draw(WeightGraph.from_tensors([weight]))
    red, blue, none, nan = edges(figure)[0].get_colors().tolist()
    assert red[0] > red[2] and red[3] > 0.8
    assert blue[2] > blue[0] and blue[3] > 0.8
    assert none[3] < 0.2
    assert nan[1] > max(nan[0], nan[2])
    assert "green is NaN" in texts(figure)
    widths = edges(figure)[0].get_linewidths()
    assert widths[0] > widths[2]


def test_large_layers_are_sampled_with_a_note() -> None:
    graph = chain((3, 100, 2))
    figure = draw(graph, max_neurons=10)
    assert "10 of 100 shown" in texts(figure)
    assert "⋮" in texts(figure)
    assert [len(c.get_segments()) for c in edges(figure)] == [30, 20]
    # The shown edges are those of the shown neurons, from the first to the last.
    values = graph["input", "weight", "hidden1"].edge_attr[..., 0, 0].reshape(100, 3)
    first, last = edges(figure)[0].get_colors()[[0, -1]].tolist()
    assert (first[0] > first[2]) == bool(values[0, 0] > 0)
    assert (last[0] > last[2]) == bool(values[99, 2] > 0)


def test_kernels_are_shown_as_images_with_height_and_width() -> None:
    graph = chain((2, 4, 3), [(3, 2), ()])
    figure = draw(graph)
    (image,) = figure.axes[0].images
    # Three targets and two sources, with a line between them.
    assert image.get_array().shape == (3 * 3 + 2, 2 * 2 + 1, 4)
    kernel = graph["input", "weight", "hidden1"].edge_attr[0, :, 0].reshape(3, 2)
    shown = torch.tensor(image.get_array()[:3, :2].tolist())
    assert torch.equal(shown[..., 0] > shown[..., 2], kernel > 0)
    assert "3 × 2 kernels" in texts(figure)


def test_kernels_of_one_axis_are_lines_and_flattened_positions_squares() -> None:
    figure = draw(chain((1, 1, 1), [(9,), ()]))
    assert figure.axes[0].images[0].get_array().shape == (1, 9, 4)
    tensors = {"0.weight": torch.randn(1, 1, 3, 3), "2.weight": torch.randn(1, 9)}
    figure = draw(from_state_dict(tensors, flatten="channels_first"))
    assert [image.get_array().shape for image in figure.axes[0].images] == [(3, 3, 4)] * 2


def test_fixed_layers_are_squares() -> None:
    figure = draw(chain((2, 5, 3)))
    corners = [len(c.get_paths()[0].vertices) for c in neurons(figure)]
    assert corners[0] == corners[2] < corners[1]


def test_the_picture_has_ink_and_depends_on_the_weights() -> None:
    graph = chain((2, 5, 3))
    first, second = pixels(draw(graph)), pixels(draw(chain((2, 5, 3))))
    assert (first[:, :3] < 255).any(1).float().mean() > 0.02
    assert torch.equal(first, pixels(draw(graph)))
    assert not torch.equal(first, second)


def test_drawing_changes_nothing_and_refuses_batches() -> None:
    graph = chain((2, 4, 1), channels=2)
    before = {key: x.clone() for key, x in graph.to_tensors().items()}
    draw(graph, channel=1)
    assert all(torch.equal(x, before[key]) for key, x in graph.to_tensors().items())
    with pytest.raises(ValueError, match="one network"):
        draw(Batch.from_data_list([graph, graph]))
    with pytest.raises(ValueError, match="max_neurons=1"):
        draw(graph, max_neurons=1)


def test_summary_counts() -> None:
    weight = torch.tensor([[1.0, 0.0, 3.0], [float("nan"), float("inf"), 0.0]])
    table = summary(WeightGraph.from_tensors([weight], [torch.tensor([2.0, 4.0])]))
    inputs, outputs, weights = table.rows
    assert (inputs.neurons, inputs.taps, inputs.weights) == (3, 0, None)
    assert (outputs.neurons, outputs.taps, outputs.mean, outputs.std) == (2, 1, 3.0, 1.0)
    assert (weights.weights, weights.neurons, weights.mean) == (6, None, 1.0)
    assert (weights.zeros, weights.nan, weights.inf) == (2, 1, 1)
    assert weights.std == pytest.approx(1.5**0.5)
    lines = str(table).splitlines()
    assert tuple(lines[0].split()) == COLUMNS
    assert lines[4].split() == ["input", "->", "output", "6", "1", "1", "1.22", "2", "1", "1"]


def test_summary_of_half_precision_does_not_overflow() -> None:
    weight = torch.full((300, 300), 60000.0, dtype=torch.float16)
    table = summary(WeightGraph.from_tensors([weight]))
    assert table.rows[-1].mean == 60000.0
    assert table.rows[-1].std == 0.0
