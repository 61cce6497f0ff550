"""Masks from scores: each layer keeps the expected number of weights, all on paths."""

from __future__ import annotations

import math

import networkx
import pytest
import torch
from torch import Tensor, nn

from nfn_graph import Batch, WeightGraph
from nfn_graph.converters import from_module
from nfn_graph.symmetry import sample
from nfn_graph.tasks.masks import TicketScope, masks_from_scores, on_paths, ticket_from_scores

SCOPES: tuple[TicketScope, ...] = ("expected", "global", "layer")


class Skips(nn.Module):
    """An MLP with a residual connection, and a second path around its hidden layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 16)
        self.inner = nn.Linear(16, 16)
        self.last = nn.Linear(16, 3)
        self.past = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        hidden = hidden + torch.relu(self.inner(hidden))
        return self.last(hidden) + self.past(x)


class OnInput(nn.Module):
    """Something is added to the input, which is also read again."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.back, self.last = nn.Linear(4, 9), nn.Linear(9, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.back(torch.relu(self.out(x))))


class OnOutput(nn.Module):
    """The output is read, and something is added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out, self.back = nn.Linear(5, 4), nn.Linear(4, 9), nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return y + self.back(torch.relu(self.out(y)))


def networks() -> dict[str, WeightGraph]:
    torch.manual_seed(0)
    cnn = nn.Sequential(
        nn.Conv2d(2, 12, 3),
        nn.ReLU(),
        nn.Conv2d(12, 10, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(10 * 4, 5),
    )
    mlp = nn.Sequential(
        nn.Linear(16, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 6)
    )
    return {
        "mlp": from_module(mlp, example_input=torch.randn(1, 16)),
        "cnn": from_module(cnn, example_input=torch.randn(1, 2, 6, 6)),
        "skips": from_module(Skips(), example_input=torch.randn(1, 4)),
        "on input": from_module(OnInput(), example_input=torch.randn(1, 4)),
        "on output": from_module(OnOutput(), example_input=torch.randn(1, 5)),
    }


NAMES = ["mlp", "cnn", "skips", "on input", "on output"]


def sparse(graph: WeightGraph, share: float, seed: int) -> WeightGraph:
    """A mask that keeps a share of the weights."""
    generator = torch.Generator().manual_seed(seed)
    return (
        graph.features()
        .map(lambda x: (torch.rand(x.shape, generator=generator) < share).to(x.dtype))
        .to_graph()
    )


def by_search(mask: WeightGraph) -> list[Tensor]:
    """Finds the edges on paths with networkx, type by type."""
    plain = mask.materialize()
    kinds = plain.edge_types
    drawn = networkx.DiGraph()
    for kind in kinds:
        kept = plain[kind].edge_attr.flatten(1).any(1)
        for i, j in plain[kind].edge_index[:, kept].T.tolist():
            drawn.add_edge((kind[0], i), (kind[2], j))
    # These networks have one type of inputs and one type of outputs.
    starts, ends = {"input"}, {"output"}

    def all_from(types: set[str], search: networkx.DiGraph) -> set[tuple[str, int]]:
        first = {node for node in search if node[0] in types}
        return first.union(*(networkx.descendants(search, node) for node in first))

    ahead, back = all_from(starts, drawn), all_from(ends, drawn.reverse())
    return [
        torch.tensor(
            [
                bool(x.any()) and (kind[0], i) in ahead and (kind[2], j) in back
                for x, (i, j) in zip(
                    plain[kind].edge_attr, plain[kind].edge_index.T.tolist(), strict=True
                )
            ]
        )
        for kind in kinds
    ]


@pytest.mark.parametrize("name", NAMES)
def test_paths_are_those_of_a_search(name: str) -> None:
    graph = networks()[name]
    masks = [sparse(graph, share, seed) for seed, share in enumerate((0.05, 0.1, 0.2, 0.4, 1.0))]
    lost = 0
    for mask in masks:
        kept = mask.features()
        left = on_paths(kept)
        for x, before, expected in zip(
            left.weights.values(), kept.weights.values(), by_search(mask), strict=True
        ):
            assert torch.equal(x, before * expected.to(x.dtype).view(-1, 1, 1))
            lost += int((before - x).sum())
        for x, before in zip(left.neurons.values(), kept.neurons.values(), strict=True):
            assert torch.equal(x, before)
    assert lost > 0
    together = on_paths(Batch.from_data_list(masks).features()).to_graph()
    for i, mask in enumerate(masks):
        alone = on_paths(mask.features()).to_graph().to_tensors()
        assert all(torch.equal(x, alone[k]) for k, x in together[i].to_tensors().items())


def weight_scores(graph: WeightGraph, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        key: 2 * torch.randn(x.shape, generator=generator) - 3 - 0.3 * i
        for i, (key, x) in enumerate(graph.to_tensors().items())
        if x.dim() > 1
    }


@pytest.mark.parametrize("name", ["mlp", "cnn", "skips"])
@pytest.mark.parametrize("scope", SCOPES)
def test_tickets_are_exact_and_on_paths(name: str, scope: TicketScope) -> None:
    graph = networks()[name]
    scores = weight_scores(graph)
    total = sum(x.numel() for x in scores.values())
    shares = [(1 - 0.9) * x.numel() for x in scores.values()]
    alone = ticket_from_scores(scores, graph, 0.9, scope, paths=False)
    masks = ticket_from_scores(scores, graph, 0.9, scope)
    counts = [int(x.sum()) for x in masks.values()]
    assert list(masks) == list(scores)
    assert sum(counts) == (
        sum(map(round, shares)) if scope == "layer" else round((1 - 0.9) * total)
    )
    if scope == "layer":
        assert counts == [round(x) for x in shares]
    else:
        assert counts != [round(x) for x in shares]
    if scope != "expected":
        stacked = masks_from_scores({k: x[None] for k, x in scores.items()}, 0.9, scope)
        assert all(torch.equal(x[0], alone[key]) for key, x in stacked.items())
    own = {key: torch.ones_like(x) for key, x in graph.to_tensors().items()}

    def dead(found: dict[str, Tensor]) -> int:
        tensors = {**own, **{key: x.to(own[key].dtype) for key, x in found.items()}}
        mask = WeightGraph.from_placements(graph.layout, tensors)
        edges = [x.flatten(1).any(1) for x in mask.features().weights.values()]
        return sum(int((x & ~y).sum()) for x, y in zip(edges, by_search(mask), strict=True))

    assert dead(masks) == 0
    assert dead(alone) > 0


def test_layers_keep_what_is_expected_of_them() -> None:
    """The largest scores alone leave nothing of a layer whose weights look alike."""
    graph = networks()["mlp"]
    tensors = graph.to_tensors()
    first, second, third = (key for key, x in tensors.items() if x.dim() == 2)
    scores = {
        first: torch.where(torch.arange(320) < 30, 20.0, -20.0).view(20, 16),
        second: torch.full((20, 20), math.log(1 / 9)) + 1e-3 * torch.randn(20, 20),
        third: torch.where(torch.arange(120) < 15, 20.0, -20.0).view(6, 20),
    }
    plain = ticket_from_scores(scores, graph, 1 - 45 / 840, "global", paths=False)
    assert int(plain[second].sum()) == 0
    # A tenth of the 400 weights in the middle.
    masks = ticket_from_scores(scores, graph, 1 - 85 / 840, "expected", paths=False)
    assert [int(x.sum()) for x in masks.values()] == [30, 40, 15]


def test_too_few_for_a_path() -> None:
    """In this case the scores decide alone; with few weights, each layer keeps one."""
    graph = networks()["mlp"]
    scores = weight_scores(graph)
    found = ticket_from_scores(scores, graph, 1 - 2 / 840, "global")
    assert sum(int(x.sum()) for x in found.values()) == 2
    plain = ticket_from_scores(scores, graph, 1 - 2 / 840, "global", paths=False)
    assert all(torch.equal(x, plain[key]) for key, x in found.items())
    one = ticket_from_scores(scores, graph, 1 - 3 / 840)
    assert [int(x.sum()) for x in one.values()] == [1, 1, 1]
    alike = {key: torch.zeros_like(x) for key, x in scores.items()}
    assert sum(int(x.sum()) for x in ticket_from_scores(alike, graph, 0.9).values()) == 84
    everything = ticket_from_scores(scores, graph, 0.0)
    assert all(bool(x.all()) for x in everything.values())


@pytest.mark.parametrize("scope", SCOPES)
def test_tickets_follow_the_neurons(scope: TicketScope) -> None:
    graph = networks()["skips"]
    scores = weight_scores(graph)
    zeros = {key: torch.zeros_like(x) for key, x in graph.to_tensors().items()}
    scored = WeightGraph.from_placements(graph.layout, {**zeros, **scores})
    move = sample(graph, "hnp")
    assert not move.is_identity
    moved = {key: move.apply(scored).to_tensors()[key] for key in scores}
    masks = ticket_from_scores(scores, graph, 0.8, scope)
    given = {key: x.float() for key, x in masks.items()}
    kept = WeightGraph.from_placements(graph.layout, {**zeros, **given})
    found = ticket_from_scores(moved, move.apply(graph), 0.8, scope)
    for key, x in found.items():
        assert torch.equal(x.float(), move.apply(kept).to_tensors()[key])


def test_bad_scores() -> None:
    graph = networks()["mlp"]
    scores = weight_scores(graph)
    with pytest.raises(ValueError, match="expected, global or layer"):
        ticket_from_scores(scores, graph, 0.5, "rows")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="finite scores of"):
        ticket_from_scores({k: x * math.inf for k, x in scores.items()}, graph, 0.5)
    with pytest.raises(ValueError, match="--sparsity"):
        ticket_from_scores(scores, graph, 1.0)
    with pytest.raises(ValueError, match="weights that may be pruned"):
        ticket_from_scores({}, graph, 0.5)
