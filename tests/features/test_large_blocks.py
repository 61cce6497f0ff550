"""Blocks that are views instead of indices: the same numbers, without memory for indices."""

from __future__ import annotations

import pytest
import torch

from networks import NAMED_SPECS, batch_of, chain
from nfn_graph import NFN, Batch, NFLinear, WeightFeatures, use_backend
from nfn_graph.features import Incidence, _build, _incidence
from nfn_graph.features._incidence import _Cache
from nfn_graph.ops import _kernels, segment_sum
from nfn_graph.transforms import RoleTypes

SYMMETRIES = ["np", "hnp"]


@pytest.fixture(params=[1, 12])
def large(request, monkeypatch) -> int:
    """Blocks of at least this many rows are views: all of them, or those of some networks."""
    monkeypatch.setattr(_incidence, "_CACHE", _Cache(32, 2**28))
    monkeypatch.setattr(_build, "LARGE_ROWS", request.param)
    return request.param


def with_indices(features: WeightFeatures) -> WeightFeatures:
    """The same features with an incidence that lists all rows."""
    before, _build.LARGE_ROWS = _build.LARGE_ROWS, 2**62
    try:
        incidence = Incidence(features.incidence.spec, features.incidence.shapes, features.device)
    finally:
        _build.LARGE_ROWS = before
    return WeightFeatures(dict(features.tensors()), features.spec, incidence)


def role_batch() -> Batch:
    """Several tensors of one type in every network."""
    widths = [(3, 4, 1), (2, 2, 3, 5), (4,)]
    return Batch.from_data_list([RoleTypes()(chain((2, *w, 2))) for w in widths])


def results(layer: NFLinear, features: WeightFeatures, backend: str) -> list[torch.Tensor]:
    inputs = features.map(lambda x: x.detach().clone().requires_grad_())
    with use_backend(backend):
        out = [x for _, x in layer(inputs).tensors() if x.numel()]
    given = [x for _, x in inputs.tensors() if x.numel()] + list(layer.parameters())
    loss = sum((x.sin() * x).sum() for x in out)
    return out + list(torch.autograd.grad(loss, given, materialize_grads=True, allow_unused=True))


def assert_layer_is_the_same(features: WeightFeatures) -> None:
    layer = NFLinear(features.spec, features.channels, 2).double()
    expected = results(layer, with_indices(features), "plain")
    for backend in ("fused", "plain"):
        found = results(layer, features, backend)
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("symmetry", SYMMETRIES)
@pytest.mark.parametrize("network", NAMED_SPECS)
def test_layers_with_views_are_layers_with_indices(network, symmetry, large):
    batch = batch_of(NAMED_SPECS[network], (3, 5, 2, 4))
    features = batch.features(symmetry)
    rows = [r for r in features.incidence.weights.values() if r.groupings[0].blocks]
    assert rows or large > 1, "all blocks must be views"
    if large > 1 and network == "mlp":
        assert any(r.groupings[0].gaps for r in rows), "and others not"
    assert_layer_is_the_same(features)


@pytest.mark.parametrize("cached", [1, 24])
@pytest.mark.parametrize("symmetry", SYMMETRIES)
@pytest.mark.parametrize("network", NAMED_SPECS)
def test_layers_in_short_stretches_are_the_same(network, symmetry, cached, large, monkeypatch):
    """Rows that do not fit into the cache are processed in blocks."""
    monkeypatch.setattr(_kernels, "_CACHED", cached)
    monkeypatch.setattr(_kernels, "_FEWEST_ROWS", 1)
    assert_layer_is_the_same(batch_of(NAMED_SPECS[network], (3, 5, 2)).features(symmetry))


def test_messages_beside_a_block_need_little_memory(monkeypatch):
    """The messages of a row that has an index go to their place in the result a few at a time."""
    monkeypatch.setattr(_incidence, "_CACHE", _Cache(32, 2**28))
    monkeypatch.setattr(_build, "LARGE_ROWS", 30)
    monkeypatch.setattr(_kernels, "_CACHED", 0)
    monkeypatch.setattr(_kernels, "_FEWEST_ROWS", 4)
    features = Batch.from_data_list([chain((2, w, w, 2)) for w in (3, 6, 4)]).features("np")
    rows = features.rows(("hidden1", "weight", "hidden2"))
    assert [count for _, count in rows.groupings[0].gaps] == [9, 16]
    counts: list[int] = []
    listed_down = _kernels._listed_down

    def counted(*args):
        counts.append(args[-1])
        return listed_down(*args)

    monkeypatch.setattr(_kernels, "_listed_down", counted)
    table = torch.randn(sum(rows.cover_sizes), 2, dtype=torch.float64)
    found = _kernels.bag_down(table, rows)
    assert counts == [4, 4, 1, 4, 4, 4, 4]
    targets, sources = table.split_with_sizes(rows.cover_sizes)
    expected = targets[rows.targets.index.long()] + sources[rows.sources.index.long()]
    torch.testing.assert_close(found, expected)


def test_types_of_several_tensors(large):
    features = role_batch().features("np")
    assert_layer_is_the_same(features)


@pytest.mark.parametrize("symmetry", SYMMETRIES)
def test_where_types_are_missing(symmetry, large):
    graphs = [chain((2, 5, 3)), chain((2, 3, 4, 3)), chain((2, 3))]
    assert_layer_is_the_same(Batch.from_data_list(graphs).features(symmetry))


@pytest.mark.parametrize("symmetry", SYMMETRIES)
@pytest.mark.parametrize("network", ["mlp", "self", "residual", "attention"])
def test_rows_know_their_neurons_and_folds_come_back(network, symmetry, large):
    raw = batch_of(NAMED_SPECS[network], (3, 5, 2, 4)).features()
    listed = with_indices(raw)
    for key in raw.weights:
        ours, theirs = raw.rows(key), listed.rows(key)
        for a, b in zip(ours.groupings, theirs.groupings, strict=True):
            assert torch.equal(a.index, b.index)
            assert torch.equal(a.group_sizes, b.group_sizes)
        numbers = torch.arange(ours.num_rows).flip(0)
        assert torch.equal(ours.cover_rows_of(numbers), theirs.cover_rows_of(numbers))
    folded, expected = raw.fold(symmetry), listed.fold(symmetry)
    for (_, x), (_, y) in zip(folded.tensors(), expected.tensors(), strict=True):
        assert torch.equal(x, y)
    for (_, x), (_, y) in zip(folded.unfold().tensors(), raw.tensors(), strict=True):
        assert torch.equal(x, y)


def test_whole_models_chunks_and_gradients(large):
    batch = batch_of(NAMED_SPECS["mlp"], (3, 5, 2, 4))
    for pool in ("mean", "max"):
        model = NFN(batch.spec, (4, 4), in_channels=3, out_features=2, head=(8,), pool=pool)
        model = model.double().eval()
        features = batch.features()
        expected = model(with_indices(features))
        torch.testing.assert_close(model(features), expected)
        with torch.no_grad():
            torch.testing.assert_close(model(features, chunk_edges=7), expected)


def test_sums_and_their_gradients_under_vmap(large):
    for grouping in (
        role_batch().features().incidence.weights["hidden", "weight", "hidden"].groupings
    ):
        x = torch.randn(2, grouping.num_rows, 3, dtype=torch.float64)
        found = torch.vmap(lambda v, s=grouping: segment_sum(v, s))(x)
        for one, sums in zip(x, found, strict=True):
            torch.testing.assert_close(segment_sum(one, grouping), sums)
            run = lambda v, s=grouping: segment_sum(v, s)  # noqa: E731
            assert torch.autograd.gradcheck(run, (one.clone().requires_grad_(),))


def test_sums_of_few_digits_are_wide(large):
    features = batch_of(NAMED_SPECS["mlp"], (16, 16)).features("np").to(torch.bfloat16)
    layer = NFLinear(features.spec, 3, 2, aggr="sum").to(torch.bfloat16)
    ours, theirs = layer(features), layer(with_indices(features))
    for (_, x), (_, y) in zip(ours.tensors(), theirs.tensors(), strict=True):
        torch.testing.assert_close(x, y, rtol=0.03, atol=0.1)


def test_large_blocks_have_no_indices_and_are_cached():
    graph = chain((300, 400, 300), dtype=torch.float32)
    features = graph.features("np")
    weights = sum(x.shape[0] for x in features.weights.values())
    assert weights == 240_000
    assert features.incidence.num_bytes < weights // 4
    assert graph.features("np").incidence is features.incidence


def test_an_incidence_above_the_limit_is_kept_too(monkeypatch):
    cache = _Cache(max_entries=3, max_bytes=1000)
    monkeypatch.setattr(_incidence, "_CACHE", cache)
    first = chain((2, 40, 3)).features().incidence
    assert first.num_bytes > 1000
    assert chain((2, 40, 3)).features().incidence is first
    chain((2, 41, 3)).features()
    assert chain((2, 40, 3)).features().incidence is not first


def test_pointers_end_where_the_rows_do(large):
    """On CUDA, sums run to the end of the rows, whatever the last pointer is."""
    for batch in (batch_of(NAMED_SPECS["self"], (3, 5, 2)), role_batch()):
        incidence = batch.features().incidence
        rows = [*incidence.weights.values(), *incidence.neurons.values()]
        rows += [r for sites in incidence.sites.values() for r in sites]
        for found in rows:
            assert not len(found.cover_pointers) or int(found.cover_pointers[-1]) == len(
                found.cover_rows
            )
            for bags in (found.bags, *(grouping.bags for grouping in found.groupings)):
                for order, pointers in zip(bags[::2], bags[1::2], strict=True):
                    assert int(pointers[-1]) == len(order)


@pytest.mark.parametrize("symmetry", SYMMETRIES)
def test_split_sums_are_the_same_sums(symmetry, monkeypatch):
    features = batch_of(NAMED_SPECS["mlp"], (9, 30, 1)).features(symmetry)
    layer = NFLinear(features.spec, 3, 2).double()
    expected = results(layer, features, "fused")
    monkeypatch.setattr(_incidence, "longest_bag", lambda device: 4)
    incidence = Incidence(features.incidence.spec, features.incidence.shapes, features.device)
    split = WeightFeatures(dict(features.tensors()), features.spec, incidence)
    steps = [len(r.bags) // 2 for r in incidence.sites[symmetry]]
    assert max(steps) == 3, "30 rows, then 8 sums of 4, then 2"
    for rows in incidence.sites[symmetry]:
        for pointers in rows.bags[1::2]:
            assert int(pointers.diff().max()) <= 4
    for x, y in zip(results(layer, split, "fused"), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_only_cuda_splits_sums():
    assert _build.longest_bag(torch.device("cuda")) == 64
    assert _build.longest_bag(torch.device("cpu")) is None
