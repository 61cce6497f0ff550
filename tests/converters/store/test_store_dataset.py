"""`WeightDataset`: subsets, attributes, transforms, and batches equal to collated graphs."""

from __future__ import annotations

import pickle
from pathlib import Path

import checkpoints
import numpy as np
import pytest
import torch
from comparing import assert_same_graph
from stores import graphs, write_store
from torch_geometric.loader import DataLoader as PyGDataLoader

from nfn_graph import Batch, DataLoader, EdgeBatchSampler, WeightGraph
from nfn_graph.converters import WeightDataset, from_module, from_state_dict
from nfn_graph.converters.store.reader import StoredGraphs

GRAPHS = graphs()


def many() -> list[WeightGraph]:
    """Networks of several widths and depths in turn, as in a shuffled batch."""
    torch.manual_seed(1)
    sizes = [(3, 5, 2), (3, 4, 4, 2), (3, 7, 2), (3, 5, 2), (3, 2)]
    return [
        from_state_dict(checkpoints.mlp(sizes[i % 5], torch.float64).state_dict())
        for i in range(23)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("many"), many(), 6)


@pytest.fixture
def dataset(folder: Path) -> WeightDataset:
    return WeightDataset(folder, attributes={"y": "half", "n": "number"})


def collated(dataset: WeightDataset, indices: list[int]) -> Batch:
    """The result of PyG's collate for the single graphs."""
    return Batch.from_data_list([dataset[i] for i in indices])


def read_together(dataset: WeightDataset, indices: list[int]) -> Batch:
    found = dataset.__getitems__(indices)
    assert isinstance(found, StoredGraphs)
    return found.collate()


@pytest.mark.parametrize(
    "indices",
    [[0], [0, 3, 5], [7, 7, 2], [4, 1, 0, 22, 9, 13], list(range(23)), list(range(22, -1, -1))],
    ids=str,
)
def test_a_batch_equals_the_collated_graphs(dataset: WeightDataset, indices: list[int]) -> None:
    batch, expected = read_together(dataset, indices), collated(dataset, indices)
    assert_same_graph(batch, expected)
    for i in range(len(indices)):
        assert_same_graph(batch[i], expected[i])
    shapes = [x.shape for _, x in batch.features("np").tensors()]
    assert shapes == [x.shape for _, x in expected.features("np").tensors()]


SETS = {
    "buffers": ["buffers", "mlp", "buffers"],
    "carried tensors": ["convolution", "convolution"],
    "depths": ["mlp", "deep", "wide", "deep"],
    "without biases": ["without biases", "without biases"],
    "channels": ["channels", "channels"],
    "labels": ["labels", "labels"],
    "two types": ["two types", "two types"],
    "types of different networks": ["mlp", "double", "mlp"],
    "signalling NaNs": ["signalling", "mlp", "signalling", "wide"],
    "residual": ["residual", "residual"],
    "transformed": ["transformed", "transformed"],
}


@pytest.mark.parametrize("name", SETS)
def test_unusual_networks_in_batches(name: str, tmp_path: Path) -> None:
    chosen = [GRAPHS[key] for key in SETS[name]]
    dataset = WeightDataset(write_store(tmp_path, chosen, 2))
    indices = list(range(len(chosen)))
    assert_same_graph(read_together(dataset, indices), collated(dataset, indices))


def test_counters_of_norms_are_those_of_each_network(tmp_path: Path) -> None:
    networks = []
    for i in range(3):
        module = checkpoints.cnn()
        module[1].num_batches_tracked.fill_(i)
        networks.append(from_module(module, example_input=torch.empty(1, 2, 9, 9)))
    dataset = WeightDataset(write_store(tmp_path, networks, 2))
    batch = read_together(dataset, [2, 0, 1])
    assert_same_graph(batch, Batch.from_data_list([networks[i] for i in (2, 0, 1)]))
    assert [int(x.carried["1.num_batches_tracked"]) for x in batch.layouts] == [2, 0, 1]


def test_networks_that_cannot_be_batched_are_refused(tmp_path: Path) -> None:
    dataset = WeightDataset(write_store(tmp_path, [GRAPHS["mlp"], GRAPHS["channels"]]))
    with pytest.raises(ValueError, match="channels of every graph"):
        read_together(dataset, [0, 1])


@pytest.mark.parametrize("context", [None, "fork", "spawn"])
def test_loaders_give_the_same_batches(dataset: WeightDataset, context: str | None) -> None:
    dataset[0]  # The files are mapped before the workers start.
    workers = {} if context is None else {"num_workers": 2, "multiprocessing_context": context}
    order = [list(range(i, min(i + 5, 23))) for i in range(0, 23, 5)]
    if context == "spawn":
        order = order[:2]
    found = list(DataLoader(dataset, batch_sampler=order, **workers))
    assert len(found) == len(order)
    for batch, indices in zip(found, order, strict=True):
        assert_same_graph(batch, collated(dataset, indices))


def test_other_loaders_get_graphs(dataset: WeightDataset) -> None:
    same = dataset.select([0, 3, 5, 8])
    (batch,) = PyGDataLoader(same, batch_size=4)
    assert torch.equal(batch["hidden1"].x, collated(same, [0, 1, 2, 3])["hidden1"].x)
    (batch,) = DataLoader(same, batch_size=4, follow_batch=["edge_attr"])
    assert "edge_attr_batch" in batch["input", "weight", "hidden1"]
    (found,) = torch.utils.data.DataLoader(same, batch_size=4, collate_fn=list)
    assert_same_graph(found[2], same[2])


def test_subsets_by_position(dataset: WeightDataset) -> None:
    numbers = torch.tensor([g.n.item() for g in dataset])
    assert numbers.tolist() == list(range(23))
    mask = numbers % 2 == 0
    for index, expected in (
        (slice(3, 9, 2), [3, 5, 7]),
        (slice(None, -20), [0, 1, 2]),
        ([5, 0], [5, 0]),
        (torch.tensor([4, 4]), [4, 4]),
        (np.array([1, 22]), [1, 22]),
        (mask, list(range(0, 23, 2))),
    ):
        part = dataset[index]
        assert [g.n.item() for g in part] == expected
        assert part.table.column("number").to_pylist() == expected
        assert read_together(part, [0]).n.tolist() == expected[:1]
    assert [g.n.item() for g in dataset[5:][2:4]] == [7, 8]
    assert dataset[-1].n.item() == 22 and len(dataset.shuffle()) == 23
    with pytest.raises(IndexError):
        dataset[23]


def test_subsets_by_mask(dataset: WeightDataset) -> None:
    mask = np.arange(len(dataset)) % 3 == 0
    expected = np.flatnonzero(mask).tolist()
    for chosen in (mask, torch.from_numpy(mask), mask.tolist()):
        assert list(dataset.select(chosen).indices()) == expected
        assert list(dataset[chosen].indices()) == expected
    part = dataset.select([4, 2, 3])
    assert list(part.select([False, True, True]).indices()) == [2, 3]
    for wrong in (mask[1:], [0.5, 1.0]):
        with pytest.raises(IndexError, match=r"Expected (a mask of|positions)"):
            dataset.select(wrong)
    assert len(dataset.select([])) == 0


def test_what_keeps_networks_apart_is_said(tmp_path: Path) -> None:
    networks = [
        from_module(torch.nn.Sequential(torch.nn.Conv2d(1, 3, size), torch.nn.Conv2d(3, 2, 1)))
        for size in (3, 5)
    ]
    dataset = WeightDataset(write_store(tmp_path, networks, 2))
    with pytest.raises(ValueError, match="GrowKernels"):
        next(iter(DataLoader(dataset, batch_size=2)))


def test_subsets_by_metadata(dataset: WeightDataset) -> None:
    assert [g.n.item() for g in dataset.where(number=[3, 4, 99])] == [3, 4]
    assert [g.n.item() for g in dataset[2:].where(half=1.5)] == [3]
    assert len(dataset.where(number=[1, 2], half=1.0)) == 1
    assert len(dataset.where(number=-1)) == 0
    assert [g.n.item() for g in dataset.where(number=["3"])] == [3]
    with pytest.raises(ValueError, match=r"column of the store: .*'number'.*colour"):
        dataset.where(colour=3)
    with pytest.raises(ValueError, match="'number', which are int64"):
        dataset.where(number="many")


def test_attributes(folder: Path) -> None:
    dataset = WeightDataset(folder, attributes={"y": "half"})
    assert dataset[3].y.dtype == torch.float32 and dataset[3].y.tolist() == [1.5]
    dataset[3].y.zero_()
    assert dataset[3].y.tolist() == [1.5]
    for attributes, reason in (
        ({"y": "nothing"}, "column of the store"),
        ({"y": "shard"}, "numbers without gaps"),
        ({"index": "half"}, "another name"),
        ({"layout": "half"}, "another name"),
    ):
        with pytest.raises(ValueError, match=reason):
            WeightDataset(folder, attributes=attributes)


def double(graph: WeightGraph) -> WeightGraph:
    """A transform; at the top of the module, so that it can be sent to other processes."""
    graph["output"].x = 2 * graph["output"].x
    return graph


def test_transforms(dataset: WeightDataset, folder: Path) -> None:
    changed = WeightDataset(folder, attributes={"y": "half", "n": "number"}, transform=double)
    for i in (0, 4):
        assert torch.equal(changed[i]["output"].x, 2 * dataset[i]["output"].x)
    (batch,) = DataLoader(changed[:3], batch_size=3)
    expected = collated(dataset, [0, 1, 2])
    expected["output"].x *= 2
    assert torch.equal(batch["output"].x, expected["output"].x)
    assert torch.equal(changed[1]["output"].x, batch[1]["output"].x), "applied once"


def test_nothing_open_is_sent(dataset: WeightDataset) -> None:
    dataset[0]
    again = pickle.loads(pickle.dumps(dataset[4:9]))
    assert again.store._mapped == {} and len(again) == 5
    assert_same_graph(again[1], dataset[5])


@pytest.mark.parametrize("drop_last", [False, True])
def test_bucketed_batches_hold_one_architecture(dataset: WeightDataset, drop_last: bool) -> None:
    part = dataset[1:]
    sampler = part.bucketed(3, seed=5, drop_last=drop_last)
    epochs = [list(sampler) for _ in range(2)]
    for epoch in epochs:
        assert len(epoch) == len(sampler)
        for batch in epoch:
            assert len({part[i].layout.shape for i in batch}) == 1
            assert len(batch) == 3 or not drop_last
        seen = sorted(i for batch in epoch for i in batch)
        assert seen == sorted(set(seen))
        # Of 8, 5, 5 and 4 networks, full batches hold 6, 3, 3 and 3.
        assert len(seen) == (15 if drop_last else 22)
    assert epochs[0] != epochs[1]
    again = part.bucketed(3, seed=5, drop_last=drop_last)
    assert list(again) == epochs[0]
    again.set_epoch(1)
    assert list(again) == epochs[1]
    plain = list(part.bucketed(3, shuffle=False))
    assert [b for b in plain if 0 in b] == [[0, 5, 10]]
    loader = DataLoader(part, batch_sampler=sampler)
    assert all(len(set(batch["input"].ptr.diff().tolist())) == 1 for batch in loader)
    with pytest.raises(ValueError, match="batch size"):
        part.bucketed(0)


def test_batches_by_edges(dataset: WeightDataset) -> None:
    part = dataset[2:]
    sizes = [sum(store.edge_attr.numel() for store in graph.edge_stores) for graph in part]
    assert part.sizes == sizes and len(set(sizes)) > 1
    limit = 2 * max(sizes)
    sampler = EdgeBatchSampler(part, limit)
    assert sorted(i for batch in sampler for i in batch) == list(range(len(part)))
    for batch in DataLoader(part, batch_sampler=sampler):
        assert sum(store.edge_attr.numel() for store in batch.edge_stores) <= limit
