"""Batches by edges: complete, below the limit, balanced, and random by seed and epoch."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nfn_graph import DataLoader, EdgeBatchSampler, WeightGraph
from nfn_graph.data import network_sizes


def mlp(*sizes: int) -> WeightGraph:
    pairs = itertools.pairwise(sizes)
    return WeightGraph.from_tensors([torch.randn(out, in_) for in_, out in pairs])


def zoo(count: int) -> list[int]:
    """Sizes of networks with two hidden layers of a random width."""
    draw = random.Random(1)
    return [2 * w + w * w + w for w in (draw.choice([4, 8, 16, 32, 64]) for _ in range(count))]


def of_ranks(sizes: list[int], limit: int, ranks: int, epoch: int = 0, **options: object) -> list:
    """The batches of every rank, each from a separate sampler."""
    found = []
    for rank in range(ranks):
        sampler = EdgeBatchSampler(sizes, limit, rank=rank, world_size=ranks, **options)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(batches) == len(sampler)
        found.append(batches)
    return found


def edges(sizes: list[int], batch: list[int]) -> int:
    return sum(sizes[i] for i in batch)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(0, 60),
    st.booleans(),
    st.integers(0, 3),
)
def test_complete_and_below_the_limit(
    sizes: list[int], ranks: int, room: int, shuffle: bool, epoch: int
) -> None:
    limit = max(sizes) + room
    try:
        found = of_ranks(sizes, limit, ranks, epoch, shuffle=shuffle)
    except ValueError as error:
        # Only if there are fewer networks than ranks, or if pairs of them do not fit.
        smallest = sum(sorted(sizes)[:2])
        assert len(sizes) < ranks or (len(sizes) % ranks and smallest + max(sizes) > limit)
        assert "Expected" in str(error)
        return
    batches = list(itertools.chain(*found))
    assert sorted(itertools.chain(*batches)) == list(range(len(sizes)))
    assert all(len(batch) > 0 and edges(sizes, batch) <= limit for batch in batches)
    assert len({len(rank) for rank in found}) == 1


def test_every_pair_fits_so_there_is_always_a_plan() -> None:
    for count, ranks in itertools.product(range(1, 14), range(1, 5)):
        if count >= ranks:
            for shuffle in (True, False):
                of_ranks([5] * count, 10, ranks, shuffle=shuffle)


def test_drawn_by_seed_and_epoch() -> None:
    sizes, first = zoo(200), of_ranks(zoo(200), 20_000, 2)
    assert first == of_ranks(sizes, 20_000, 2)
    assert first != of_ranks(sizes, 20_000, 2, seed=1)
    assert first != of_ranks(sizes, 20_000, 2, epoch=1)
    assert of_ranks(sizes, 20_000, 2, seed=1) != of_ranks(sizes, 20_000, 2, epoch=1)
    # A network shares a batch with others in the next epoch.
    with_first = [
        next(set(b) for r in of_ranks(sizes, 20_000, 1, e) for b in r if 0 in b) for e in (0, 1)
    ]
    assert len(with_first[0] & with_first[1]) < len(with_first[0]) / 2


def test_in_order_without_shuffling() -> None:
    sizes = [3, 3, 3, 9, 1, 1]
    assert of_ranks(sizes, 9, 1, shuffle=False) == [[[0, 1, 2], [3], [4, 5]]]
    both = of_ranks(sizes, 9, 2, shuffle=False)
    assert [i for step in zip(*both, strict=True) for b in step for i in b] == list(range(6))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_balances_edges(ranks: int) -> None:
    sizes = zoo(1000)
    limit = 50_000
    found = of_ranks(sizes, limit, ranks)
    loads = torch.tensor([[edges(sizes, batch) for batch in rank] for rank in found])
    assert loads.min() > 0.98 * loads.max()
    assert loads.sum(1).max() - loads.sum(1).min() <= loads.max() - loads.min()
    # There are no more batches than necessary, rounded up for the ranks and for the bin packing.
    assert loads.numel() <= sum(sizes) / limit * 1.02 + ranks
    # Batches with equal numbers of networks would differ a lot.
    count = len(sizes) // loads.numel()
    by_number = [edges(sizes, list(range(i, i + count))) for i in range(0, 900, count)]
    assert max(by_number) > 1.2 * limit


def test_ranks_of_a_step_are_alike_where_batches_are_not() -> None:
    """Some networks fill a batch by themselves, and the others together do not."""
    sizes = [100] * 6 + [30] * 8
    found = of_ranks(sizes, 100, 2)
    for step in zip(*found, strict=True):
        first, second = (edges(sizes, batch) for batch in step)
        assert abs(first - second) <= 30


def test_loader_of_graphs() -> None:
    graphs = [mlp(2, width, width, 1) for width in (3, 9, 5, 7, 4, 8, 6)]
    for index, graph in enumerate(graphs):
        graph.index = torch.tensor([index])
    sampler = EdgeBatchSampler(graphs, 150)
    seen = []
    for batch in DataLoader(graphs, batch_sampler=sampler):
        entries = sum(x.numel() for store in batch.edge_stores for x in [store.edge_attr])
        assert entries <= 150
        seen += batch.index.tolist()
    assert sorted(seen) == list(range(7))


def test_sizes_count_every_tap() -> None:
    weights = [torch.randn(4, 1, 3, 3), torch.randn(6, 4, 2, 2), torch.randn(10, 6)]
    graph = WeightGraph.from_tensors(weights)
    assert network_sizes([graph, 7, torch.tensor(3)]) == [sum(w.numel() for w in weights), 7, 3]


def test_dataset_that_knows_its_sizes() -> None:
    class Dataset:
        sizes = (5, 5, 2)

        def __getitem__(self, index: int) -> None:
            raise AssertionError("no network is to be loaded")

    assert sorted(i for b in EdgeBatchSampler(Dataset(), 7) for i in b) == [0, 1, 2]


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ([1, 9, 3], {"max_edges": 8}, "at most max_edges = 8 edges each .got 9 in network 1."),
        ([1, 0], {"max_edges": 8}, "networks with edges .got 0 in network 1."),
        ([4], {"max_edges": 8, "world_size": 2}, "network for each of 2 ranks .got 1."),
        ([], {"max_edges": 8}, "network for each of 1 ranks .got 0."),
        ([8, 8, 8], {"max_edges": 8, "world_size": 2}, "leave the last 1 out"),
        ([8], {"max_edges": 8, "rank": 1}, "a rank from 0 to 0 .got 1."),
    ],
)
def test_bad_input(sizes: list[int], options: dict, message: str) -> None:
    for shuffle in (True, False):
        with pytest.raises(ValueError, match=message):
            EdgeBatchSampler(sizes, shuffle=shuffle, **options)


def test_neither_graphs_nor_sizes() -> None:
    with pytest.raises(TypeError, match="WeightGraphs, or their numbers of edges"):
        EdgeBatchSampler(["a"], 3)


def test_tight_limit_in_every_epoch() -> None:
    """Only a six and a four fit together, although all are similar."""
    for epoch in range(20):
        (batches,) = of_ranks([6, 4, 4, 6], 10, 1, epoch)
        assert sorted(sorted(batch) for batch in batches) in (
            [[0, 1], [2, 3]],
            [[0, 2], [1, 3]],
        )


def test_no_rank_has_the_larger_batch_in_all_steps() -> None:
    sizes = list(range(51, 99))
    found = of_ranks(sizes, 100, 2)
    totals = [sum(edges(sizes, batch) for batch in rank) for rank in found]
    assert len(found[0]) == 24 and abs(totals[0] - totals[1]) <= 1
