"""Graphs: exact conversion in both directions, and PyG's own tools."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch_geometric.transforms as T
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import HeteroData

from networks import NAMED_SPECS, chain, sizes_of, specs
from nfn_graph import Batch, NetworkSpec, NeuronType, WeightGraph, WeightType
from nfn_graph.data import Layout, Placement, Shape
from nfn_graph.features import Incidence
from nfn_graph.testing import random_graph
from nfn_graph.transforms import FillBiases


def bits(x: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor, so that NaNs and signed zeros are compared, too."""
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_tensors_come_back_bit_for_bit(dtype):
    weights = [torch.randn(5, 2, 3, 3).to(dtype), torch.randn(4, 5).to(dtype)]
    biases = [None, torch.randn(4).to(dtype)]
    weights[0][0, 0, 0, 0] = float("nan")
    weights[1][0, 0] = -0.0
    back = WeightGraph.from_tensors(weights, biases).to_tensors()
    assert list(back) == ["0.weight", "1.weight", "1.bias"]
    for key, tensor in zip(back, [weights[0], weights[1], biases[1]], strict=True):
        assert back[key].dtype == dtype
        assert back[key].shape == tensor.shape
        assert torch.equal(bits(back[key]), bits(tensor))


def test_edges_are_target_major_and_keep_the_memory():
    weight = torch.arange(6.0).reshape(3, 2)
    graph = WeightGraph.from_tensors([weight])
    edges = graph["input", "weight", "output"].edge_attr
    assert edges.flatten().tolist() == weight.flatten().tolist()
    assert edges.data_ptr() == weight.data_ptr()


def test_non_contiguous_and_transposed_tensors_work():
    base = torch.randn(4, 6)
    weights = [base.t()[::2], torch.randn(2, 7, 3)[:, ::3].transpose(1, 2)]
    back = WeightGraph.from_tensors(weights).to_tensors()
    for key, tensor in zip(back, weights, strict=True):
        assert torch.equal(back[key], tensor)


def test_placements_of_slices_views_and_shared_tensors():
    """A linear layer after a flatten whose columns are split over two layers; a shared bias."""
    spec = NetworkSpec(
        (NeuronType("a", 0), NeuronType("b", 0), NeuronType("out", 1)),
        (WeightType("a", "out", 4), WeightType("b", "out", 4)),
    )
    weight, bias = torch.randn(3, 5 * 4), torch.randn(3)
    axes = ("target", "source", "tap")
    placements = (
        Placement(
            ("fc.weight",), (3, 20), torch.float32, ("a", "weight", "out"),
            (3, 5, 4), axes, (0, 0, 0), (3, 2, 4),
        ),
        Placement(
            ("fc.weight",), (3, 20), torch.float32, ("b", "weight", "out"),
            (3, 5, 4), axes, (0, 2, 0), (3, 5, 4),
        ),
        Placement(
            ("fc.bias", "tied.bias"), (3,), torch.float32, "out", (3,), ("neuron",), (0,), (3,)
        ),
    )  # fmt: skip
    layout = Layout(spec, Shape(((2,), (3,), (3,)), (((0, 0),), ((0, 0),))), placements)
    graph = WeightGraph.from_placements(layout, {"fc.weight": weight, "fc.bias": bias})
    edges = graph["b", "weight", "out"].edge_attr
    assert torch.equal(edges.reshape(3, 3, 4), weight.reshape(3, 5, 4)[:, 2:])
    back = graph.to_tensors()
    assert torch.equal(back["fc.weight"], weight)
    assert torch.equal(back["fc.bias"], bias)
    assert torch.equal(back["tied.bias"], bias)


@settings(max_examples=50)
@given(data=st.data(), symmetry=st.sampled_from(["np", "hnp"]))
def test_features_return_to_the_graph_bit_for_bit(data, symmetry):
    spec = data.draw(specs())
    graphs = [random_graph(spec, data.draw(sizes_of(spec, 1, 4)), 2) for _ in range(2)]
    batch = Batch.from_data_list(graphs)
    back = batch.features(symmetry).to_graph()
    for (key, x), (_, y) in zip(back.features().tensors(), batch.features().tensors(), strict=True):
        assert torch.equal(x, y), key


@pytest.mark.parametrize("symmetry", ["np", "hnp"])
@pytest.mark.parametrize("network", NAMED_SPECS)
def test_the_fold_is_a_permutation_of_entries(network, symmetry):
    spec = NAMED_SPECS[network]
    graph = random_graph(spec, {n.name: 4 for n in spec.neurons if n.size is None})
    folded = torch.cat([x.flatten() for _, x in graph.features(symmetry).tensors()])
    raw = torch.cat([x.flatten() for _, x in graph.features().tensors()])
    assert torch.equal(folded.sort().values, raw.sort().values)
    back = graph.features(symmetry).to_graph().features()
    for key, x in graph.features().tensors():
        assert torch.equal(dict(back.tensors())[key], x)


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))]
)
def test_graphs_copy_and_pickle(duplicate):
    graph = chain((2, 3, 4))
    graph.y = torch.tensor([1.0])
    again = duplicate(graph)
    assert type(again) is WeightGraph
    assert again.spec == graph.spec
    for key, tensor in graph.to_tensors().items():
        assert torch.equal(again.to_tensors()[key], tensor)
    again["hidden1"].x = again["hidden1"].x + 1
    assert not torch.equal(again["hidden1"].x, graph["hidden1"].x)


def test_to_moves_graphs_and_keeps_them_usable():
    moved = chain((2, 3, 4)).to("meta")
    assert moved["hidden1"].x.device.type == "meta"
    assert moved.features("hnp").neurons["hidden1"].shape == (3, 1 + 2 + 4, 1)
    assert moved.features("hnp").graph_of("hidden1").device.type == "meta"


def test_feature_only_transforms_of_pyg():
    graph = chain((2, 3, 4), channels=5)
    graph = T.Compose([T.ToDevice("cpu"), T.NormalizeFeatures(attrs=["edge_attr"])])(graph)
    assert isinstance(graph, WeightGraph)
    sums = graph["input", "weight", "hidden1"].edge_attr.sum(-1)
    assert torch.allclose(sums, torch.ones_like(sums))
    assert graph.features("np").channels == 5


def test_materialize_gives_plain_hetero_data():
    batch = Batch.from_data_list([chain((2, 3, 4), channels=2), chain((2, 5, 4), channels=2)])
    batch.y = torch.tensor([0, 1])
    data = batch.materialize()
    assert type(data) is HeteroData
    data.validate(raise_on_error=True)
    assert data.y.tolist() == [0, 1]
    assert data["hidden1"].x.shape == (8, 2)
    assert data["hidden1"].batch.tolist() == [0] * 3 + [1] * 5
    source, target = data["input", "weight", "hidden1"].edge_index
    assert source.tolist() == [0, 1] * 3 + [2, 3] * 5
    assert target.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    kept = T.RemoveIsolatedNodes()(chain((2, 3, 4)).materialize())
    assert kept["hidden1"].x.shape[0] == 3


def test_to_homogeneous_gives_plain_data_with_masks():
    graph = chain((2, 3, 4), kernels=[(3,), ()], channels=2)
    graph.y = torch.tensor([7])
    data = Batch.from_data_list([graph, graph]).to_homogeneous()
    data.validate(raise_on_error=True)
    assert data.num_nodes == 2 * (2 + 3 + 4)
    assert data.y.tolist() == [7, 7]
    assert data.x.shape == (18, 2)
    assert data.edge_attr.shape == (2 * (6 + 12), 3 * 2)
    assert data.edge_mask.sum().item() == 2 * (6 * 6 + 12 * 2)
    assert data.edge_attr[~data.edge_mask].abs().max() == 0
    assert data.x_mask.any(1).tolist() == ([False] * 2 + [True] * 7) * 2
    assert data.node_type.tolist() == ([0] * 2 + [1] * 3 + [2] * 4) * 2
    assert data.batch.tolist() == [0] * 9 + [1] * 9
    # Every edge connects neurons of one network, of the types that it states.
    source, target = data.edge_index
    assert torch.equal(data.batch[source], data.batch[target])
    assert torch.equal(data.node_type[source], data.edge_type)
    assert torch.equal(data.node_type[target], data.edge_type + 1)
    # It also has the weight of that pair of neurons.
    weight = graph.to_tensors()["1.weight"]
    last = (data.edge_type == 1) & (data.batch[source] == 1)
    rows, columns = target[last] - 9 - 5, source[last] - 9 - 2
    assert torch.equal(data.edge_attr[last][:, :2], weight[rows, columns])


def test_types_of_a_spec_mean_the_same_in_every_graph():
    shallow, deep = chain((2, 3, 4)), chain((2, 3, 5, 4), kernels=[(), (3,), ()])
    spec = NetworkSpec.union([shallow.spec, deep.spec])
    alone = shallow.to_homogeneous(spec=spec)
    together = Batch.from_data_list([shallow, deep]).to_homogeneous(spec=spec)
    names = [[n.name for n in spec.neurons][i] for i in alone.node_type.tolist()]
    assert names == ["input"] * 2 + ["hidden1"] * 3 + ["output"] * 4
    assert torch.equal(alone.node_type, together.node_type[:9])
    first = together.batch[together.edge_index[0]] == 0
    assert torch.equal(alone.edge_attr, together.edge_attr[first])
    assert torch.equal(alone.edge_type, together.edge_type[first])
    assert set(alone.edge_type.tolist()) < set(together.edge_type.tolist())
    # Without the spec, the ids are those of the graph's own types.
    assert not torch.equal(shallow.to_homogeneous().node_type, alone.node_type)


@pytest.mark.parametrize("batched", [False, True])
def test_the_missing_edge_index_is_asked_for_at_materialize(batched):
    graph = Batch.from_data_list([chain((2, 3, 4))] * 2) if batched else chain((2, 3, 4))
    edges = graph["input", "weight", "hidden1"]
    for ask in (
        lambda: graph.edge_index_dict,
        lambda: edges.edge_index,
        lambda: edges["edge_index"],
        lambda: T.ToUndirected()(graph),
        lambda: T.RemoveIsolatedNodes()(graph),
        lambda: T.ToSparseTensor()(graph),
    ):
        with pytest.raises(ValueError, match=r"stores none\)\. Use graph\.materialize\(\)"):
            ask()
    both_ways = T.ToUndirected()(graph.materialize())
    assert ("hidden1", "rev_weight", "input") in both_ways.edge_types
    edges.edge_index = torch.zeros(2, 6, dtype=torch.long)
    assert edges.edge_index.shape == (2, 6)
    assert copy.copy(graph)["input", "weight", "hidden1"].edge_index.shape == (2, 6)


@pytest.mark.parametrize("batched", [False, True])
def test_graphs_are_cast_and_their_labels_are_not(batched):
    graph = chain((2, 3, 4), dtype=torch.float32)
    graph.y = torch.tensor([0.5])
    graph = Batch.from_data_list([graph, graph]) if batched else graph
    tensors = dict(graph.features().tensors())
    for cast in (
        lambda: graph.to(torch.float64),
        lambda: graph.to("cpu", torch.float16),
        lambda: graph.to("cpu", dtype=torch.float64),
        lambda: graph.to(dtype=torch.float32),
    ):
        dtype = graph["hidden1"].x.dtype
        assert cast() is graph
        assert graph["hidden1"].x.dtype != dtype
        assert {x.dtype for _, x in graph.features().tensors()} == {graph["hidden1"].x.dtype}
        assert graph.y.dtype == torch.float32
    assert graph.features().dtype == torch.float32
    for key, x in graph.features().tensors():
        assert torch.allclose(x, tensors[key], atol=2e-3)
    assert graph.to(torch.float64, "x")["hidden1"].x.dtype == torch.float64
    assert graph["input", "weight", "hidden1"].edge_attr.dtype == torch.float32
    with pytest.raises(TypeError, match=r"floating-point dtype .* \(got torch.int64\)"):
        graph.to(torch.int64)
    assert graph.to("meta").y.device.type == "meta"


def test_graphs_are_loaded_without_trust(tmp_path):
    """`torch.load` with its defaults only builds classes that it knows."""
    graph = chain((2, 3, 4), kernels=[(3, 3), ()])
    graph.y = torch.tensor([1])
    filled = FillBiases()(chain((2, 5, 4), kernels=[(3, 3), ()], biases=False))
    filled.y = torch.tensor([2])
    batch = Batch.from_data_list([graph, filled, chain_with_label((2, 3))])
    for saved in (graph, filled, batch):
        saved.features("np")  # Values that are derived from it need not be saved.
        torch.save(saved, tmp_path / "graph.pt")
        loaded = torch.load(tmp_path / "graph.pt")
        assert type(loaded) is type(saved)
        assert loaded.spec == saved.spec
        assert torch.equal(loaded.y, saved.y)
        known = dict(loaded.features().tensors())
        assert all(torch.equal(x, known[key]) for key, x in saved.features().tensors())
    assert loaded.num_graphs == 3
    again = FillBiases().inverse(loaded[1]).to_tensors()
    before = FillBiases().inverse(filled).to_tensors()
    assert all(torch.equal(again[key], x) for key, x in before.items())
    assert list(again) == list(before)


def chain_with_label(widths: tuple[int, ...]) -> WeightGraph:
    graph = chain(widths)
    graph.y = torch.tensor([3])
    return graph


def test_printing_builds_no_indices(monkeypatch):
    graphs = [chain((2, 3, 4)), Batch.from_data_list([chain((2, 3, 4)), chain((2, 5, 4))])]

    def refuse(*args, **kwargs):
        raise AssertionError("indices were built")

    monkeypatch.setattr(Incidence, "__init__", refuse)
    with pytest.raises(AssertionError, match="indices were built"):
        chain((2, 7, 9)).features()
    for graph in graphs:
        assert "hidden1" in repr(graph)


def test_graphs_print_what_they_hold():
    text = repr(chain((2, 3, 4), kernels=[(3, 3), ()]))
    assert "73 entries" in text
    assert "input[fixed] 2 x 0, hidden1 3 x 1, output[fixed] 4 x 1" in text
    assert "input -> hidden1 6 x 9, hidden1 -> output 12 x 1" in text
    assert repr(WeightGraph()) == "WeightGraph()"
    assert "2 networks" in repr(Batch.from_data_list([chain((2, 3, 4))] * 2))


def test_pruned_weights_stay_edges():
    weight = torch.zeros(3, 2)
    graph = WeightGraph.from_tensors([weight, torch.ones(1, 3)])
    assert graph["input", "weight", "hidden1"].edge_attr.shape[0] == 6
    assert graph.materialize()["input", "weight", "hidden1"].edge_index.shape == (2, 6)


def test_mixed_dtypes_meet_in_the_wider_one():
    graph = WeightGraph.from_tensors([torch.randn(3, 2).bfloat16()], [torch.randn(3)])
    assert graph.features().dtype == torch.float32
    assert graph.to_tensors()["0.weight"].dtype == torch.bfloat16
    wide = graph.features().to_graph()
    assert wide["input", "weight", "output"].edge_attr.dtype == torch.float32
    for key, tensor in graph.to_tensors().items():
        assert wide.to_tensors()[key].dtype == tensor.dtype
        assert torch.equal(wide.to_tensors()[key], tensor)


def test_networks_of_equal_shapes_share_their_layout():
    """A batch of 100,000 networks then checks few layouts; dtypes and names distinguish them."""

    def graph(width, dtype=torch.float32, keys=None):
        weights = [torch.ones(width, 2, dtype=dtype), torch.ones(1, width, dtype=dtype)]
        return WeightGraph.from_tensors(weights, [weights[0][:, 0], None], keys)

    first, second = graph(3), graph(3)
    assert first.layout is second.layout
    named = graph(3, keys=[("a", "b"), ("c", "d")])
    for other in (graph(4), graph(3, torch.float64), named):
        assert other.layout != first.layout
        assert other.to_tensors().keys() == {p.keys[0] for p in other.layout.placements}
    assert list(named.to_tensors()) == ["a", "b", "c"]


def test_a_rebuilt_network_keeps_all_labels():
    graph = random_graph(NetworkSpec.chain(2, input_size=2, output_size=1), {"hidden1": 3})
    graph.y, graph["_number"] = torch.ones(1), 7
    stores = {key: graph.features()[key] for key in graph.spec.types}
    rebuilt = graph.rebuilt(graph.layout, stores)
    assert rebuilt.y is graph.y
    assert rebuilt["_number"] == 7
