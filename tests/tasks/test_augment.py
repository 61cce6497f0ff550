"""Augmentations: what they keep, what they change, and that every call samples anew."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nfn_graph import Batch, WeightGraph
from nfn_graph.tasks.augment import (
    MixUp,
    MoveCoordinates,
    PermuteNeurons,
    WeightDrop,
    WeightNoise,
    move_coordinates,
)
from nfn_graph.tasks.zoo.seeds import generator_of
from nfn_graph.tasks.zoo.siren import SirenShape, initialise_siren, pixel_grid, siren_forward
from nfn_graph.transforms import CanonicalPhases

W0 = 30.0


def siren(*widths: int, seed: int = 0, spread: float = 1.0) -> WeightGraph:
    shape = SirenShape(widths[0], widths[1:-1], widths[-1])
    tensors = initialise_siren(shape, W0, generator_of(seed, "x"))
    layers = range(shape.num_layers)
    return WeightGraph.from_tensors(
        [tensors[f"layers.{i}.weight"].double() for i in layers],
        [tensors[f"layers.{i}.bias"].double() * spread for i in layers],
        [(f"layers.{i}.weight", f"layers.{i}.bias") for i in layers],
    )


def render(graph: WeightGraph, points: Tensor) -> Tensor:
    tensors = {key: x.unsqueeze(0) for key, x in graph.to_tensors().items()}
    return siren_forward(tensors, points, W0)[0]


GRID = pixel_grid(9, 7, torch.float64)
CUBE = torch.rand(3, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2 - 1


def values(graph: WeightGraph) -> list[Tensor]:
    return [x for _, x in graph.features().tensors()]


@pytest.mark.parametrize(
    "transform",
    [
        PermuteNeurons(),
        WeightNoise(0.1),
        WeightDrop(0.3),
        MoveCoordinates(20, (0.8, 1.2), 0.1),
        CanonicalPhases(W0),
    ],
    ids=lambda t: type(t).__name__,
)
def test_inputs_stay_as_they_are(transform: WeightNoise) -> None:
    graph = siren(2, 8, 8, 1)
    graph.y = 3
    before = [x.clone() for x in values(graph)]
    first, second = transform(graph), transform(graph)
    assert all(torch.equal(a, b) for a, b in zip(before, values(graph), strict=True))
    assert first.y == 3 and first.layout == graph.layout
    assert any(not torch.equal(a, b) for a, b in zip(before, values(first), strict=True))
    if not isinstance(transform, CanonicalPhases):
        pairs = zip(values(first), values(second), strict=True)
        assert any(not torch.equal(a, b) for a, b in pairs), "the same draw twice"


def test_permutation_keeps_the_function() -> None:
    graph = siren(2, 8, 6, 1)
    moved = PermuteNeurons()(graph)
    torch.testing.assert_close(render(moved, GRID), render(graph, GRID), atol=1e-9, rtol=0)


def test_noise_is_random_and_of_the_stated_size() -> None:
    graph = siren(2, 60, 60, 1)
    noisy = WeightNoise(0.1)(graph)
    for (key, a), (_, b) in zip(
        graph.features().tensors(), noisy.features().tensors(), strict=True
    ):
        noise = b - a
        if a.numel() < 50:
            continue
        assert noise.std().item() == pytest.approx(0.1 * a.std().item(), rel=0.3), key
        assert noise.mean().abs() < 0.4 * noise.std(), "a constant is no noise"
    still = WeightNoise(0.0)(graph)
    assert all(torch.equal(a, b) for a, b in zip(values(graph), values(still), strict=True))


def test_drop_zeroes_weights_only() -> None:
    graph = siren(2, 60, 60, 1)
    thin = WeightDrop(0.25)(graph)
    key = ("hidden1", "weight", "hidden2")
    dropped = thin[key].edge_attr == 0
    assert dropped.double().mean() == pytest.approx(0.25, abs=0.03)
    assert torch.equal(thin[key].edge_attr[~dropped], graph[key].edge_attr[~dropped])
    for name in ("hidden1", "hidden2", "output"):
        assert torch.equal(thin[name].x, graph[name].x)


def test_generators_repeat() -> None:
    graph = siren(2, 8, 8, 1)
    first, second = (WeightNoise(0.1, torch.Generator().manual_seed(5))(graph) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(values(first), values(second), strict=True))


@pytest.mark.parametrize(("inputs", "points"), [(2, GRID), (3, CUBE)])
def test_moving_acts_on_the_picture(inputs: int, points: Tensor) -> None:
    graph = siren(inputs, 8, 8, 1)
    transform = MoveCoordinates(90, (0.5, 2.0), 0.3)
    matrix, shift = transform.draw(inputs)
    assert not torch.allclose(matrix, torch.eye(inputs, dtype=matrix.dtype))
    size = torch.linalg.det(matrix) ** (1 / inputs)
    assert 0.5 <= size <= 2
    torch.testing.assert_close(matrix @ matrix.t(), size**2 * torch.eye(inputs, dtype=matrix.dtype))
    moved = move_coordinates(graph, matrix, shift)
    # The value at x is moved to A x + t.
    there = matrix @ points + shift.unsqueeze(1)
    torch.testing.assert_close(render(moved, there), render(graph, points), atol=1e-9, rtol=0)
    assert (render(moved, points) - render(graph, points)).abs().max() > 1e-3


def test_every_network_of_a_batch_is_moved_in_its_own_way() -> None:
    graphs = [siren(2, 8, 8, 1), siren(2, 5, 6, 1), siren(2, 8, 8, 1)]
    transform = MoveCoordinates(90, (0.5, 2.0), 0.3)
    drawn = [transform.draw(2) for _ in graphs]
    matrices, shifts = (torch.stack(parts) for parts in zip(*drawn, strict=True))
    moved = move_coordinates(Batch.from_data_list(graphs), matrices, shifts)
    for i, graph in enumerate(graphs):
        alone = move_coordinates(graph, matrices[i], shifts[i])
        assert torch.equal(render(moved[i], GRID), render(alone, GRID))
    again = transform(Batch.from_data_list([graphs[0], graphs[0]]))
    assert (render(again[0], GRID) - render(again[1], GRID)).abs().max() > 1e-3


def test_a_quarter_turn_turns_the_picture() -> None:
    graph = siren(2, 8, 8, 1)
    grid = pixel_grid(9, 9, torch.float64)
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    moved = move_coordinates(graph, turn, torch.zeros(2))
    picture, turned = (render(g, grid).view(9, 9) for g in (graph, moved))
    # (row, column) = (0, 1), the middle of the right edge, moves to (-1, 0), the middle of the top.
    torch.testing.assert_close(turned, torch.rot90(picture), atol=1e-9, rtol=0)


def test_no_movement_by_default() -> None:
    graph = siren(2, 8, 8, 1)
    still = MoveCoordinates()(graph)
    torch.testing.assert_close(render(still, GRID), render(graph, GRID), atol=1e-12, rtol=0)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="two or three inputs"):
        MoveCoordinates(10)(siren(4, 8, 1))
    with pytest.raises(TypeError, match="Expected a WeightGraph"):
        MoveCoordinates(10)(torch.rand(2))
    no_bias = WeightGraph.from_tensors([torch.rand(4, 2), torch.rand(1, 4)])
    with pytest.raises(ValueError, match="with biases"):
        MoveCoordinates(10)(no_bias)
    with pytest.raises(ValueError, match="with one bias per neuron"):
        CanonicalPhases()(no_bias)
    for bad in (
        lambda: WeightNoise(-1),
        lambda: WeightDrop(2),
        lambda: MixUp(0),
        lambda: MoveCoordinates(scale=(0, 1)),
        lambda: CanonicalPhases(0),
    ):
        with pytest.raises(ValueError, match="Expected"):
            bad()


@pytest.mark.parametrize(("widths", "points"), [((2, 9, 7, 5, 3), GRID), ((3, 16, 1), CUBE)])
@pytest.mark.parametrize("spread", [1.0, 7.0])
def test_canonical_form_keeps_the_function(
    widths: tuple[int, ...], points: Tensor, spread: float
) -> None:
    graph = siren(*widths, spread=spread)
    canonical = CanonicalPhases(W0)(graph)
    torch.testing.assert_close(render(canonical, points), render(graph, points), atol=1e-9, rtol=0)
    for name in graph.spec.neuron:
        if name.startswith("hidden"):
            phases = canonical[name].x * W0
            assert phases.min() >= 0 and phases.max() <= math.pi / 2
            before = graph[name].x * W0
            assert before.min() < 0 and before.max() > math.pi / 2
    again = CanonicalPhases(W0)(canonical)
    for a, b in zip(values(canonical), values(again), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_canonical_form_forgets_flips_and_shifts() -> None:
    graph = siren(2, 9, 7, 1)
    tensors = graph.to_tensors()
    keys = list(tensors)
    signs = torch.tensor([1.0, -1.0]).repeat(5)[:9].double()
    turns = torch.tensor([0, 1, -1, 2, 3, 0, -2, 1, 0]).double()
    tensors["layers.0.weight"] = tensors["layers.0.weight"] * signs[:, None]
    tensors["layers.0.bias"] = tensors["layers.0.bias"] * signs + turns * math.pi / W0
    outgoing = signs * torch.where(turns % 2 == 0, 1.0, -1.0)
    tensors["layers.1.weight"] = tensors["layers.1.weight"] * outgoing
    other = WeightGraph.from_placements(graph.layout, tensors)
    torch.testing.assert_close(render(other, GRID), render(graph, GRID), atol=1e-9, rtol=0)
    first, second = CanonicalPhases(W0)(graph), CanonicalPhases(W0)(other)
    for key in keys:
        torch.testing.assert_close(
            first.to_tensors()[key], second.to_tensors()[key], atol=1e-9, rtol=0
        )


def test_canonical_form_of_a_batch() -> None:
    graphs = [siren(2, 9, 7, 1), siren(2, 4, 1, seed=1), siren(2, 5, 6, 1, seed=2)]
    batch = CanonicalPhases(W0)(Batch.from_data_list(graphs))
    for i, graph in enumerate(graphs):
        alone = CanonicalPhases(W0)(graph).to_tensors()
        for key, value in batch[i].to_tensors().items():
            torch.testing.assert_close(value, alone[key], atol=1e-12, rtol=0)


def test_mixup_mixes_networks_of_one_shape() -> None:
    graphs = [siren(2, 4, 5, 1, seed=i) for i in range(4)]
    graphs[2:2] = [siren(2, 6, 5, 1, seed=9)]
    generator = torch.Generator().manual_seed(1)
    batch = MixUp(1.0, generator)(Batch.from_data_list(graphs))
    partner, share = batch.mixed_with.tolist(), batch.mixed_share.double()
    assert partner[2] == 2 and sorted(partner) == [0, 1, 2, 3, 4]
    assert any(i != j for i, j in enumerate(partner))
    assert share.min() >= 0 and share.max() <= 1 and share.unique().numel() == 5
    for i, own in enumerate(graphs):
        other = graphs[partner[i]].to_tensors()
        for key, value in own.to_tensors().items():
            expected = share[i] * value + (1 - share[i]) * other[key]
            torch.testing.assert_close(batch[i].to_tensors()[key], expected)


@pytest.mark.parametrize("alpha", [0.1, 1.0, 20.0])
def test_shares_of_mixup_have_the_beta_distribution(alpha: float) -> None:
    """Its standard deviation is 1 / (2 sqrt(2 alpha + 1))."""
    shares = MixUp(alpha, torch.Generator().manual_seed(0))._shares(4000)
    assert float(shares.mean()) == pytest.approx(0.5, abs=0.03)
    assert float(shares.std()) == pytest.approx(0.5 / math.sqrt(2 * alpha + 1), abs=0.01)
