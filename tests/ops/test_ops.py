"""The kernels, compared with plain operations, with gradients, in all unusual shapes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from networks import NAMED_SPECS, all_groupings, batch_of, chain, sizes_of, specs
from nfn_graph import NFN, Batch, NetworkSpec, NFLinear, use_backend
from nfn_graph.features import Incidence, _incidence, group_of_rows
from nfn_graph.features._incidence import _Cache
from nfn_graph.ops import _matmul, expand, segment_sum
from nfn_graph.ops._kernels import Expand, SegmentSum, plain_segment_sum
from nfn_graph.ops._matmul import _linear, add_product, product, sum_of_products
from nfn_graph.testing import random_graph
from nfn_graph.transforms import RoleTypes

SYMMETRIES = ["np", "hnp"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_segment_sums_and_expansions(dtype):
    for grouping in all_groupings():
        rows = len(grouping.order)
        x = torch.randint(-4, 5, (rows, 3)).to(dtype)
        assert torch.equal(SegmentSum.apply(x, grouping, None), plain_segment_sum(x, grouping))
        wide = torch.randn(rows, 6).to(dtype)[:, ::2]
        close = {"rtol": 0.02, "atol": 0.1} if dtype == torch.bfloat16 else {}
        summed = SegmentSum.apply(wide, grouping, None)
        torch.testing.assert_close(summed, plain_segment_sum(wide, grouping), **close)
        y = torch.randn(grouping.num_groups, 3).to(dtype)
        assert torch.equal(Expand.apply(y, grouping, None), y[grouping.index.long()])
        assert SegmentSum.apply(x[:, :0], grouping, None).shape == (grouping.num_groups, 0)


def test_gradients_of_segment_sums_and_expansions_of_any_order():
    for grouping in all_groupings():
        x = torch.randn(len(grouping.order), 2, dtype=torch.float64, requires_grad=True)
        y = torch.randn(grouping.num_groups, 2, dtype=torch.float64, requires_grad=True)
        for function, value in ((SegmentSum, x), (Expand, y)):
            run = lambda v, f=function, s=grouping: f.apply(v, s, None)  # noqa: E731
            assert torch.autograd.gradcheck(run, (value,))
            assert torch.autograd.gradgradcheck(lambda v, r=run: r(v).sin(), (value,))


def test_kernels_and_their_gradients_inside_vmap():
    for grouping in all_groupings():
        x = torch.randn(len(grouping.order), 3, dtype=torch.float64, requires_grad=True)
        y = torch.randn(grouping.num_groups, 3, dtype=torch.float64, requires_grad=True)
        for function, public, value in ((SegmentSum, segment_sum, x), (Expand, expand, y)):
            several = torch.stack([value, 2 * value])
            run = torch.vmap(lambda v, f=public, s=grouping: f(v, s))
            expected = torch.stack([function.apply(v, grouping, None) for v in several])
            torch.testing.assert_close(run(several), expected)
            out = function.apply(value, grouping, None)
            seeds = torch.stack([torch.randn_like(out) for _ in range(2)])
            (found,) = torch.autograd.grad(
                out, value, seeds, is_grads_batched=True, retain_graph=True
            )
            for seed, grad in zip(seeds, found, strict=True):
                (alone,) = torch.autograd.grad(out, value, seed, retain_graph=True)
                torch.testing.assert_close(grad, alone)


def outputs(layer: NFLinear, features, backend: str) -> list[torch.Tensor]:
    with use_backend(backend):
        return [x for _, x in layer(features).tensors() if x.numel()]


def assert_fused_is_plain(spec: NetworkSpec, batch: Batch, symmetry: str, **options) -> None:
    features = batch.features(symmetry, spec=spec).map(lambda x: x.requires_grad_())
    layer = NFLinear(spec.fold(symmetry), features.channels, 2, **options).double()
    inputs = [x for _, x in features.tensors() if x.numel()] + list(layer.parameters())
    fused, plain = (outputs(layer, features, name) for name in ("fused", "plain"))
    grads = [torch.randn_like(x) for x in fused]
    for x, y in zip(fused, plain, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    # Parameters of types that no network here has are not used at all.
    ours, theirs = (
        torch.autograd.grad(o, inputs, grads, allow_unused=True, materialize_grads=True)
        for o in (fused, plain)
    )
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("options", [{}, {"aggr": "sum"}, {"bias": False}])
@pytest.mark.parametrize("symmetry", SYMMETRIES)
@pytest.mark.parametrize("network", NAMED_SPECS)
def test_the_fused_layer_is_the_plain_layer(network, symmetry, options):
    spec = NAMED_SPECS[network]
    assert_fused_is_plain(spec, batch_of(spec), symmetry, **options)


@settings(max_examples=40)
@given(data=st.data(), symmetry=st.sampled_from(SYMMETRIES))
def test_the_fused_layer_on_random_specs(data, symmetry):
    spec = data.draw(specs(max_taps=2))
    graphs = [random_graph(spec, data.draw(sizes_of(spec, 1, 4)), 2) for _ in range(2)]
    assert_fused_is_plain(spec, Batch.from_data_list(graphs), symmetry)


@pytest.mark.parametrize("symmetry", SYMMETRIES)
def test_the_fused_layer_where_types_are_missing(symmetry):
    graphs = [chain((2, 5, 3)), chain((2, 3, 4, 3)), chain((2, 3))]
    batch = Batch.from_data_list(graphs)
    assert_fused_is_plain(batch.spec, batch, symmetry)
    assert_fused_is_plain(batch.spec, Batch.from_data_list(graphs[2:]), symmetry)


@pytest.mark.parametrize("symmetry", SYMMETRIES)
@pytest.mark.parametrize("network", ["mlp", "self", "residual", "one layer"])
def test_gradcheck_of_the_fused_layer(network, symmetry):
    spec = NAMED_SPECS[network]
    features = batch_of(spec, (2, 3), channels=1).features(symmetry)
    layer = NFLinear(features.spec, 1, 1).double()
    keys = [key for key, x in features.tensors() if x.numel()]
    values = [dict(features.tensors())[key].clone().requires_grad_() for key in keys]
    names = [name for name, _ in layer.named_parameters()]

    def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = dict(zip(keys, inputs, strict=False))
        parameters = dict(zip(names, inputs[len(keys) :], strict=True))
        filled = features.map_types(lambda key, x: given.get(key, x))
        out = torch.func.functional_call(layer, parameters, (filled,))
        return tuple(x for _, x in out.tensors() if x.numel())

    parameters = [p.detach().requires_grad_() for p in layer.parameters()]
    assert torch.autograd.gradcheck(run, (*values, *parameters), fast_mode=True)


def test_gradients_of_only_the_inputs_or_only_the_parameters():
    batch = batch_of(NAMED_SPECS["mlp"])
    features = batch.features("np")
    layer = NFLinear(features.spec, 3, 2).double()
    sum(x.sum() for _, x in layer(features).tensors()).backward()
    assert all(p.grad is not None for p in layer.parameters())
    layer.requires_grad_(False)
    inputs = features.map(lambda x: x.clone().requires_grad_())
    sum(x.square().sum() for _, x in layer(inputs).tensors()).backward()
    assert all(x.grad is not None for _, x in inputs.tensors() if x.numel())


@pytest.mark.parametrize("backend", ["fused", "plain"])
@pytest.mark.parametrize("symmetry", SYMMETRIES)
def test_outputs_may_be_changed_in_place(symmetry, backend):
    features = batch_of(NAMED_SPECS["mlp"]).features(symmetry)
    layer = NFLinear(features.spec, 3, 2).double()
    expected = [x.relu() for x in outputs(layer, features, backend)]
    for x, y in zip(outputs(layer, features, backend), expected, strict=True):
        assert torch.equal(x.relu_(), y)


def test_results_are_the_same_bits_in_every_run():
    batch = batch_of(NAMED_SPECS["mlp"], (17, 30, 9))
    features = batch.features("np").map(lambda x: x.float().requires_grad_())
    layer = NFLinear(features.spec, 3, 8)
    inputs = [x for _, x in features.tensors() if x.numel()] + list(layer.parameters())
    runs = []
    for _ in range(5):
        out = [x for _, x in layer(features).tensors() if x.numel()]
        runs.append(out + list(torch.autograd.grad([x.sin().sum() for x in out], inputs)))
    for run in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(run, runs[0], strict=True))


def test_edges_of_one_role_by_neuron():
    """If a type has several tensors, the groups are the edges of a neuron, wherever they are."""
    graphs = [RoleTypes()(chain((2, *widths, 2))) for widths in [(3, 4, 1), (2, 2, 3, 5), (4,)]]
    edges = Batch.from_data_list(graphs).features().incidence.weights["hidden", "weight", "hidden"]
    x = torch.randn(edges.num_rows, 2, dtype=torch.float64)
    for grouping in edges.groupings:
        torch.testing.assert_close(
            SegmentSum.apply(x, grouping, None), plain_segment_sum(x, grouping)
        )
        sizes = torch.bincount(grouping.index, minlength=grouping.num_groups)
        assert torch.equal(sizes, grouping.group_sizes)


@given(st.lists(st.integers(0, 5), max_size=9))
def test_groups_of_rows(sizes):
    expected = [group for group, size in enumerate(sizes) for _ in range(size)]
    found = group_of_rows(torch.tensor(sizes, dtype=torch.long), len(expected))
    assert found.tolist() == expected


def test_index_tensors_are_as_small_as_they_can_be():
    edges = chain((3, 5, 4, 2)).features().incidence.weights["hidden1", "weight", "hidden2"]
    for tensor in (edges.cover_rows, edges.cover_pointers, edges.transposed, edges.sources.order):
        assert tensor.dtype == torch.int32
    assert edges.target.tolist() == [i // 5 for i in range(20)]
    assert edges.source.tolist() == [i % 5 for i in range(20)]


def test_an_incidence_made_in_inference_mode_serves_training_later():
    graph = chain((2, 23, 3))
    layer = NFLinear(graph.spec.fold("np"), 1, 1).double()
    with torch.inference_mode():
        layer(chain((2, 23, 3)).features("np"))
    gradients = []
    for backend in ("fused", "plain"):
        layer.zero_grad()
        sum(x.sum() for x in outputs(layer, graph.features("np"), backend)).backward()
        gradients.append([p.grad.clone() for p in layer.parameters()])
    for fused, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(fused, plain)


def test_masks_made_in_inference_mode_serve_training_later():
    """A network of a union that lacks a fixed weight: its taps are masked, and masks are kept."""
    graphs = [chain((2, 19, 3)), chain((2, 3, 17, 3)), chain((2, 3))]
    batch = Batch.from_data_list(graphs)
    model = NFN(batch.spec, (2,), "hnp", out_features=1, head=(4,)).double()
    with torch.inference_mode():
        model(Batch.from_data_list(graphs))
    model(batch).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def networks_of(*widths: int) -> list[Incidence]:
    return [chain((2, n, 3)).features().incidence for n in widths]


def test_the_cache_is_bounded_by_entries_and_by_bytes(monkeypatch):
    cache = _Cache(max_entries=3, max_bytes=10**6)
    monkeypatch.setattr(_incidence, "_CACHE", cache)
    (first,) = networks_of(5)
    assert networks_of(5) == [first]
    networks_of(6, 7, 8)
    assert len(cache._values) == 3
    assert networks_of(5) != [first]
    cache.max_bytes = sum(i.num_bytes for i in networks_of(7, 8))
    networks_of(6)
    kept = list(cache._values.values())
    assert sum(incidence.num_bytes for incidence in kept) <= cache.max_bytes
    networks_of(5000)
    assert list(cache._values.values()) == kept, "what cannot be kept drives nothing out"


def test_the_cache_notices_what_grew_when_it_was_used(monkeypatch):
    cache = _Cache(max_entries=3, max_bytes=10**6)
    monkeypatch.setattr(_incidence, "_CACHE", cache)
    (grown,) = networks_of(5)
    grown.masks["np"] = {"hidden1": torch.zeros(2 * 10**6, dtype=torch.bool)}
    networks_of(6)
    assert networks_of(5) != [grown]


def test_an_incidence_knows_its_bytes():
    small, large = (chain((2, n, n, 3)).features().incidence for n in (10, 100))
    edges = 100 * 100
    assert 16 * edges <= large.num_bytes <= 64 * edges
    assert small.num_bytes < large.num_bytes / 20


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize(
    "shape",
    [(5, 3, 2), (5000, 4, 6), (5000, 1, 1), (12000, 16, 24), (3000, 260, 270), (1300, 600, 1100)],
)
def test_products_are_those_of_float64(shape, onednn, monkeypatch):
    """Any library may compute them."""
    count, read, returned = shape
    x, matrix, y = (
        torch.randn(count, read),
        torch.randn(read, returned),
        torch.randn(count, returned),
    )
    exact = x.double() @ matrix.double()

    def check(found, expected):
        scale = expected.abs().max().clamp(min=count**0.5)
        assert found.dtype == torch.float32
        assert ((found.double() - expected).abs().max() / scale) < 1e-5

    if not onednn:
        monkeypatch.setattr(_matmul, "_onednn_linear", lambda: None)
    large = count * read * returned >= 2**22 or shape == (5000, 4, 6)
    available = torch.backends.mkldnn.is_available()
    assert (_linear(x, matrix) is not None) == (large and onednn and available)
    check(product(x, matrix), exact)
    check(sum_of_products(y, x), y.double().t() @ x.double())
    kept = y.double()
    assert add_product(y, x, matrix) is y
    check(y, exact + kept)


@pytest.mark.parametrize("wrong", [None, lambda x, w, *_: x, lambda x, w: x])
def test_a_private_product_that_changed_is_not_used(wrong, monkeypatch):
    """The operation may be gone, compute something else, or take other arguments."""
    namespace = SimpleNamespace()
    if wrong is not None:
        namespace._linear_pointwise = SimpleNamespace(default=wrong)
    monkeypatch.setattr(torch.ops, "mkldnn", namespace)
    assert _matmul._onednn_linear.__wrapped__() is None
