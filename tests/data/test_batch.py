"""Batches of networks of different sizes give the same results as one network at a time."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Batch as PyGBatch
from torch_geometric.data.collate import collate
from torch_geometric.loader import DataLoader as PyGDataLoader

from networks import (
    NAMED_SPECS,
    NESTED_SPECS,
    chain,
    grouped_spec,
    nested_specs,
    sizes_of,
    specs,
)
from nfn_graph import (
    NFN,
    Batch,
    DataLoader,
    NetworkSpec,
    NeuronType,
    NFLinear,
    Pool,
    WeightGraph,
    WeightType,
)
from nfn_graph.testing import random_graph


def assert_same(first: WeightGraph, second: WeightGraph, tolerance: float = 0.0) -> None:
    assert first.spec == second.spec
    for (key, x), (_, y) in zip(
        first.features().tensors(), second.features().tensors(), strict=True
    ):
        assert x.shape == y.shape, key
        assert x.numel() == 0 or (x - y).abs().max() <= tolerance, key


def assert_batch_equals_singles(graphs: list[WeightGraph], symmetry: str) -> None:
    spec = NetworkSpec.union(g.spec for g in graphs)
    channels = graphs[0].features().channels
    editor = NFN(spec, (4, 3), symmetry, in_channels=channels, act="SiLU").double()
    scorer = NFN(spec, (4, 3), symmetry, in_channels=channels, out_features=2, head=(8,)).double()
    batch = Batch.from_data_list(graphs)
    edited, scores = editor(batch).to_graph(), scorer(batch)
    for i, graph in enumerate(graphs):
        assert_same(edited[i], editor(graph).to_graph(), 1e-12)
        assert (scores[i] - scorer(graph)[0]).abs().max() < 1e-12


@settings(max_examples=40)
@given(data=st.data(), symmetry=st.sampled_from(["np", "hnp"]))
def test_batch_equals_singles_for_random_specs_and_widths(data, symmetry):
    spec = data.draw(specs(max_taps=2))
    graphs = [
        random_graph(spec, data.draw(sizes_of(spec, 1, 5)), channels=2)
        for _ in range(data.draw(st.integers(1, 4)))
    ]
    assert_batch_equals_singles(graphs, symmetry)


@settings(max_examples=40)
@given(data=st.data(), symmetry=st.sampled_from(["np", "hnp"]))
def test_batch_equals_singles_for_other_numbers_of_heads_groups_and_dims(data, symmetry):
    spec = data.draw(nested_specs() | st.sampled_from(list(NESTED_SPECS.values())))
    free = [n.name for n in spec.neurons if n.size is None]
    sizes = st.fixed_dictionaries({name: st.integers(1, 3) for name in free})
    graphs = [random_graph(spec, data.draw(sizes), channels=2) for _ in range(3)]
    assert_batch_equals_singles(graphs, symmetry)


@pytest.mark.parametrize("symmetry", ["np", "hnp"])
def test_nested_and_flat_networks_share_a_batch(symmetry):
    """A network without the nested types lacks their sites, and nothing leaks into it."""
    flat = NetworkSpec(
        (NeuronType("x", 0, size=2), NeuronType("out", 0, size=2)), (WeightType("x", "out"),)
    )
    graphs = [
        random_graph(grouped_spec(2, 2)),
        random_graph(flat),
        random_graph(grouped_spec(2, 2)),
    ]
    assert_batch_equals_singles(graphs, symmetry)


@pytest.mark.parametrize("symmetry", ["np", "hnp"])
def test_named_networks_in_batches(symmetry):
    for spec in NAMED_SPECS.values():
        widths = (1, 4, 2)
        graphs = [
            random_graph(spec, {n.name: w for n in spec.neurons if n.size is None}) for w in widths
        ]
        assert_batch_equals_singles(graphs, symmetry)


@pytest.mark.parametrize("symmetry", ["np", "hnp"])
def test_mixed_depths_equal_singles(symmetry):
    graphs = [chain((2, 5, 3)), chain((2, 3, 4, 3)), chain((2, 3)), chain((2, 2, 6, 4, 3))]
    assert_batch_equals_singles(graphs, symmetry)
    assert_batch_equals_singles(graphs[::-1], symmetry)


def test_different_input_sizes_share_an_np_batch():
    assert_batch_equals_singles([chain((2, 5, 3)), chain((4, 3, 3)), chain((1, 2, 6))], "np")


def test_the_order_of_graphs_does_not_matter():
    graphs = [chain((2, w, w + 1, 3)) for w in (4, 2, 5)]
    model = NFN(graphs[0].spec, (4, 4), "hnp", out_features=2, head=(8,)).double()
    forward = model(Batch.from_data_list(graphs))
    backward = model(Batch.from_data_list(graphs[::-1]))
    assert (forward - backward.flip(0)).abs().max() < 1e-12


def test_a_batch_of_one_is_that_network():
    graph = chain((2, 4, 3))
    batch = Batch.from_data_list([graph])
    assert batch.num_graphs == len(batch) == 1
    assert_same(batch[0], graph)


def test_batches_give_back_their_networks():
    graphs = [chain((2, 5, 3)), chain((2, 3, 4, 3)), chain((2, 4, 3))]
    for i, graph in enumerate(graphs):
        graph.y = torch.tensor([float(i)])
    batch = Batch.from_data_list(graphs)
    assert batch.y.tolist() == [0, 1, 2]
    for i, (out, graph) in enumerate(zip(batch.to_data_list(), graphs, strict=True)):
        assert_same(out, graph)
        assert type(out) is WeightGraph
        assert sorted(out.node_types) == sorted(graph.node_types)
        assert sorted(out.edge_types) == sorted(graph.edge_types)
        assert out.y.item() == i
        for key, tensor in graph.to_tensors().items():
            assert torch.equal(out.to_tensors()[key], tensor)
    assert_same(batch[-1], graphs[2])
    assert [g.y.item() for g in batch[[2, 0]]] == [2, 0]
    with pytest.raises(IndexError, match=r"below 3 \(got 3\)"):
        batch[3]


def test_pointers_are_right_for_mixed_depths():
    batch = Batch.from_data_list([chain((2, 3, 3)), chain((2, 4, 5, 3)), chain((2, 2, 3))])
    assert batch["hidden2"].batch.tolist() == [1] * 5
    assert batch["hidden2"].ptr.tolist() == [0, 0, 5, 5]
    assert batch["hidden1"].batch.tolist() == [0] * 3 + [1] * 4 + [2] * 2


def test_pygs_own_collate_is_refused_where_it_mixes_up_networks():
    """With depths 3, 2, 3, PyG drops nothing, but the second network gets the third's layer."""
    deep, shallow = chain((2, 4, 5, 3)), chain((2, 3, 3))
    wrong, slices, _ = collate(PyGBatch, [deep, shallow, deep])
    assert wrong["hidden2"].batch.unique().tolist() == [0, 1]
    assert slices["hidden2"]["x"].tolist() == [0, 5, 10]
    message = r"collated by PyG's own Batch.*hidden2 is missing.*nfn_graph\.DataLoader"
    for use in (
        lambda: wrong.features("np"),
        lambda: wrong.spec,
        lambda: PyGBatch.from_data_list([deep, shallow, deep]),
        lambda: next(iter(PyGDataLoader([deep, shallow, deep], batch_size=3))),
    ):
        with pytest.raises(ValueError, match=message):
            use()
    assert repr(wrong).startswith("WeightGraphBatch(")
    # Sizes may differ, too; the error names the type that is missing.
    with pytest.raises(ValueError, match=message):
        PyGBatch.from_data_list([deep, chain((3, 4, 5, 3)), shallow])
    # If a shallow network comes first, PyG drops the layers of the others.
    dropped, _, _ = collate(PyGBatch, [shallow, deep])
    assert "hidden2" not in dropped.node_types
    with pytest.raises(ValueError, match=r"collated by PyG's own Batch"):
        dropped.features("np")


def test_pygs_own_collate_is_accepted_where_it_is_right():
    graphs = [chain((2, w, 3)) for w in (4, 2)]
    model = NFN(graphs[0].spec, (4,), "hnp", out_features=1, head=(8,)).double()
    theirs = PyGBatch.from_data_list(graphs)
    assert isinstance(theirs, WeightGraph)
    assert torch.equal(model(theirs), model(Batch.from_data_list(graphs)))
    assert_same(theirs[1], graphs[1])


@pytest.mark.parametrize("loader", [DataLoader, PyGDataLoader])
@pytest.mark.parametrize("workers", [0, 2])
def test_data_loaders(loader, workers):
    graphs = [chain((2, w, 3)) for w in range(1, 6)]
    for i, graph in enumerate(graphs):
        graph.y = i
    seen = []
    for batch in loader(graphs, batch_size=2, num_workers=workers):
        assert batch.features("hnp").num_graphs == len(batch)
        seen += batch.y.tolist()
        for out in batch.to_data_list():
            assert_same(out, graphs[out.y])
    assert seen == [0, 1, 2, 3, 4]


def test_the_data_loader_passes_pygs_options_on():
    graphs = [chain((2, w, 3)) for w in (1, 2)]
    for graph in graphs:
        graph.note, graph.y = "kept or not", torch.ones(2)
    loader = DataLoader(graphs, batch_size=2, follow_batch=["y"], exclude_keys=["note"])
    batch = next(iter(loader))
    assert batch.y_batch.tolist() == [0, 0, 1, 1]
    assert "note" not in batch


def test_the_data_loader_collates_inside_tuples_and_mixes_depths():
    pairs = [(chain((2, 3, 3)), 0.5), (chain((2, 3, 4, 3)), 1.5)]
    (batch, labels), *rest = DataLoader(pairs, batch_size=2, shuffle=False)
    assert isinstance(batch, Batch)
    assert labels.tolist() == [0.5, 1.5]
    assert rest == []
    assert_same(batch[1], pairs[1][0])


def pickled(batch: Batch) -> Batch:
    return pickle.loads(pickle.dumps(batch))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickled])
def test_batches_copy_and_pickle(duplicate):
    batch = Batch.from_data_list([chain((2, 5, 3)), chain((2, 3, 4, 3))])
    again = duplicate(batch)
    assert type(again) is Batch
    assert_same(again, batch)
    assert_same(again[1], batch[1])


def test_features_return_to_a_batch_that_still_separates():
    batch = Batch.from_data_list([chain((2, 5, 3)), chain((2, 3, 4, 3))])
    doubled = (batch.features("hnp") * 2).to_graph()
    assert type(doubled) is Batch
    assert_same(doubled[1], (batch[1].features() * 2).to_graph())


def test_union_models_take_batches_of_any_part_of_the_union():
    shallow, deep = chain((2, 5, 3)), chain((2, 3, 4, 3))
    spec = NetworkSpec.union([shallow.spec, deep.spec])
    for symmetry in ("np", "hnp"):
        model = NFN(spec, (4, 2), symmetry, out_features=1, head=(8,)).double()
        both = model(Batch.from_data_list([shallow, deep]))
        assert (both[0] - model(shallow)[0]).abs().max() < 1e-12
        assert (both[1] - model(Batch.from_data_list([deep]))[0]).abs().max() < 1e-12


def test_entries_that_a_network_does_not_own_never_leak():
    """HNP folds the last weight onto hidden1 in one network and onto hidden2 in the other."""
    shallow, deep = chain((2, 5, 3)), chain((2, 3, 4, 3))
    batch = Batch.from_data_list([shallow, deep, chain((2, 3))])
    spec = batch.spec.fold("hnp")
    layer = NFLinear(spec, 1, 1).double()
    clean = batch.features("hnp")
    clean.zero_unfilled()
    masks = clean.incidence.masks["hnp"]
    # The weight of the one-layer network is a tap of the network, which the others lack.
    assert set(masks) == {"hidden1", "network"}
    # The values that an activation with f(0) != 0 leaves in those entries are not read.
    spoiled = clean.map_types(lambda key, x: x.where(masks[key], 77.0) if key in masks else x)
    assert any(bool((x == 77).any()) for _, x in spoiled.tensors())
    for function in (layer, Pool(spec), Pool(spec, "max"), Pool(spec, "sum", full=True)):
        expected, actual = function(clean), function(spoiled)
        if isinstance(expected, torch.Tensor):
            assert torch.equal(expected, actual)
        else:
            assert_same(expected.to_graph(), actual.to_graph())
    assert_same(spoiled.to_graph(), clean.to_graph())
