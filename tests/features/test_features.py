"""Weight-space features as values: arithmetic, pytrees, and no change to their input."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.utils import _pytree as pytree

from networks import NAMED_SPECS, batch_of, chain, same, self_chain_spec
from nfn_graph import Batch, NetworkSpec, NeuronType, NFLinear, WeightFeatures, WeightType
from nfn_graph.testing import random_graph


def features(symmetry: str | None = "hnp", widths=(3, 5)) -> WeightFeatures:
    return Batch.from_data_list([chain((2, w, 4), channels=2) for w in widths]).features(symmetry)


def test_arithmetic_acts_on_every_tensor():
    f = features()
    for combined, expected in [
        (f + f, lambda x: x + x),
        (f - 1, lambda x: x - 1),
        (2 * f, lambda x: x * 2),
        (1 + f, lambda x: x + 1),
        (f / 4, lambda x: x / 4),
        (-f, lambda x: -x),
        (f * f, lambda x: x * x),
        (f * torch.tensor([1.0, 3.0]), lambda x: x * torch.tensor([1.0, 3.0])),
    ]:
        assert same(combined, f.map(expected))


def test_cat_joins_channels():
    f = features()
    joined = WeightFeatures.cat([f, f * 2])
    assert joined.channels == 4
    assert same(joined.map(lambda x: x[..., 2:]), f * 2)


def test_the_pytree_holds_the_tensors_and_nothing_else():
    f = features()
    leaves, tree = pytree.tree_flatten(f)
    assert len(leaves) == len(list(f.tensors()))
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    assert same(pytree.tree_unflatten(leaves, tree), f)
    assert same(pytree.tree_map(lambda x: x + 1, f), f + 1)


def test_moving_and_casting():
    f = features()
    assert f.to(torch.float32).dtype == torch.float32
    moved = f.to("meta")
    assert moved.device.type == "meta"
    assert moved.incidence.device.type == "meta"
    assert f.incidence.device.type == "cpu"
    assert not f.map(lambda x: x.requires_grad_()).detach().neurons["hidden1"].requires_grad


def test_features_fold_and_unfold_between_groups():
    raw = features(None)
    assert same(raw.fold("hnp").unfold(), raw)
    assert same(raw.fold("np").fold("hnp"), raw.fold("hnp"))
    assert raw.unfold() is raw
    assert raw.fold("np").fold("np").spec == raw.spec.fold("np")


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))]
)
def test_features_copy_and_pickle(duplicate):
    mixed = Batch.from_data_list([chain((2, 5, 3)), chain((2, 3, 4, 3)), chain((2, 3))])
    f = mixed.features("hnp").zero_unfilled()
    again = duplicate(f)
    assert same(again, f)
    assert same(again + f, f + f), "they are of the same networks"
    assert same(again.to_graph().features(), f.to_graph().features())


def test_a_network_may_lack_the_self_weight_of_a_batch():
    spec = self_chain_spec()
    plain = NetworkSpec(spec.neurons, (spec.weights[0], spec.weights[2]))
    graphs = [random_graph(s, {"h": w}, 2) for s, w in ((spec, 3), (plain, 4), (spec, 2))]
    batch = Batch.from_data_list(graphs)
    for symmetry in ("np", "hnp"):
        assert same(batch.features(symmetry).unfold(), batch.features())
        layer = NFLinear(batch.spec.fold(symmetry), 2, 3).double()
        out = layer(batch.features(symmetry)).unfold()
        for i in range(3):
            single = Batch.from_data_list([graphs[i], graphs[0]]).features(symmetry)
            alone = layer(single).unfold()
            for key, x in out.tensors():
                mine, theirs = (f.graph_of(key) for f in (out, alone))
                torch.testing.assert_close(x[mine == i], alone[key][theirs == 0])


def test_networks_have_all_or_none_of_the_taps_of_a_weight():
    """The taps of a pair type with a fixed parent belong to the weight between the free parents."""
    heads = NeuronType("q", 0), NeuronType("kv", 0)
    pairs = NeuronType("d", 0, 2, parents=("kv",)), NeuronType("p", 1, parents=("q", "d"))
    weights = (WeightType("q", "kv"),)
    sizes = {"q": 2, "kv": 2}
    graphs = [random_graph(NetworkSpec((*heads, *some), weights), sizes) for some in (pairs, ())]
    with pytest.raises(ValueError, match="network 1 to have all or none of the types"):
        Batch.from_data_list(graphs).features("hnp")


def test_layers_do_not_change_their_input():
    f = features()
    before = f.map(torch.clone)
    NFLinear(f.spec, 2, 2).double()(f)
    assert same(f, before)


def test_what_does_not_belong_together_is_refused():
    with pytest.raises(ValueError, match="Expected features of"):
        features("np") + features("hnp")
    with pytest.raises(ValueError, match="of the same networks"):
        features(widths=(3, 5)) + features(widths=(5, 3))
    with pytest.raises(ValueError, match="at least one"):
        WeightFeatures.cat([])
    orphan = WeightFeatures(dict(features().tensors()), features().spec, features().incidence)
    with pytest.raises(ValueError, match="without a graph"):
        orphan.to_graph()


def test_features_print_their_shapes():
    text = repr(features())
    assert text.startswith("WeightFeatures(2 networks; hidden1 [8, 7, 2]")


def test_parallel_tensors_are_printed_with_their_names():
    f = batch_of(NAMED_SPECS["parallel"]).features()
    assert "a->b(first) [" in repr(f)
    assert "a->b(second) [" in repr(f)


@pytest.mark.parametrize("symmetry", [None, "np", "hnp"])
@pytest.mark.parametrize("batched", [False, True])
def test_labels_and_pointers_go_along_to_another_device(batched, symmetry):
    graph = chain((2, 3, 4))
    graph.y = torch.tensor([1])
    graph = Batch.from_data_list([graph, graph]) if batched else graph
    moved = graph.features(symmetry).to("meta").to_graph()
    found = [x for store in moved.stores for x in store.values() if isinstance(x, torch.Tensor)]
    assert len(found) == 6 + 6 * batched  # Features, the label, and pointers of three types.
    assert {x.device.type for x in found} == {"meta"}
    assert graph.y.device.type == "cpu"
