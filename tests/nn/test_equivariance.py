"""The symmetry law of every layer and model, and that none has more symmetry than it states."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from networks import NAMED_SPECS, NESTED_SPECS, chain, nested_specs, same
from nfn_graph import (
    NFN,
    Activation,
    Batch,
    ChannelNorm,
    Dropout,
    Fold,
    FourierFeatures,
    IOEncoding,
    NetworkSpec,
    NFLinear,
    Pool,
    Residual,
    Standardize,
    WeightFeatures,
    WeightGraph,
)
from nfn_graph.symmetry import Permutation, from_places, sample
from nfn_graph.testing import assert_equivariant, assert_invariant, random_graph

CHANNELS = 3
DTYPES = [torch.float32, torch.float64]
SYMMETRIES = ["np", "hnp"]
# In a network of one layer, HNP permutes nothing; test_no_permutation_is_refused covers it.
PERMUTED = [
    (name, group)
    for name in NAMED_SPECS
    for group in SYMMETRIES
    if (name, group) != ("one layer", "hnp")
]


def mixed_batch(spec: NetworkSpec, dtype: torch.dtype) -> Batch:
    """Three networks of different widths."""
    graphs = []
    for extra in (0, 2, 1):
        sizes = {n.name: 3 + extra + i for i, n in enumerate(spec.neurons) if n.size is None}
        graphs.append(random_graph(spec, sizes, CHANNELS, dtype))
    return Batch.from_data_list(graphs)


MODEL_OPTIONS = [
    {},
    {"norm": True, "residual": True, "dropout": 0.5},
    {"pointwise": True},
    {"aggr": "sum"},
    {"fourier_features": 4, "fourier_scale": 0.5},
    {"standardize": True},
    {"io_encoding": "learned", "encode_layers": True},
    {"io_encoding": "sinusoidal", "norm": True},
]

FOLDED_LAYERS: dict[str, Callable[[NetworkSpec, str], nn.Module]] = {
    "linear": lambda s, g: NFLinear(s.fold(g), CHANNELS, 4),
    "linear, sums": lambda s, g: NFLinear(s.fold(g), CHANNELS, 2, aggr="sum"),
    "pointwise": lambda s, g: NFLinear(s.fold(g), CHANNELS, 4, pointwise=True),
    "channel norm": lambda s, g: ChannelNorm(s.fold(g), CHANNELS),
    "residual": lambda s, g: Residual(NFLinear(s.fold(g), CHANNELS, CHANNELS)),
    "activation": lambda s, g: Activation(nn.GELU()),
    "dropout in eval": lambda s, g: Dropout(0.5).eval(),
    "stack": lambda s, g: nn.Sequential(
        NFLinear(s.fold(g), CHANNELS, 4), Activation(nn.SiLU()), NFLinear(s.fold(g), 4, 2)
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("network", "symmetry"), PERMUTED)
@pytest.mark.parametrize("layer", FOLDED_LAYERS)
def test_layers_after_the_fold(layer, network, symmetry, dtype):
    spec = NAMED_SPECS[network]
    module = FOLDED_LAYERS[layer](spec, symmetry).to(dtype)
    assert_equivariant(module, mixed_batch(spec, dtype), symmetry)


def test_no_permutation_is_refused():
    graph = random_graph(NAMED_SPECS["one layer"])
    with pytest.raises(ValueError, match="at least two neurons that 'hnp' permutes"):
        assert_equivariant(lambda f: f, graph, "hnp")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("network", NAMED_SPECS)
def test_layers_before_the_fold(network, dtype):
    spec = NAMED_SPECS[network]
    batch = mixed_batch(spec, dtype)
    symmetry = "np" if network == "one layer" else "hnp"
    standardize = Standardize(spec, CHANNELS).to(dtype).fit([batch])
    for module in (FourierFeatures(CHANNELS, 4, scale=1.0).to(dtype), standardize):
        assert_equivariant(module, batch, symmetry, folded=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["learned", "sinusoidal"])
@pytest.mark.parametrize("network", [n for n, group in PERMUTED if group == "hnp"])
def test_io_encodings(network, kind, dtype):
    spec = NAMED_SPECS[network]
    encoding = IOEncoding(spec, CHANNELS, kind, encode_layers=True).to(dtype)
    assert_equivariant(encoding, mixed_batch(spec, dtype), "hnp", folded=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduce", ["mean", "sum", "max"])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("network", "symmetry"), PERMUTED)
def test_pools_are_invariant(network, full, reduce, symmetry, dtype):
    spec = NAMED_SPECS[network]
    pool = Pool(spec.fold(symmetry), reduce, full)
    assert_invariant(pool, mixed_batch(spec, dtype), symmetry)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetry", SYMMETRIES)
@pytest.mark.parametrize("options", MODEL_OPTIONS)
def test_models(options, symmetry, dtype):
    spec = NAMED_SPECS["mlp"]
    batch = mixed_batch(spec, dtype)
    group = "hnp" if "io_encoding" in options else symmetry
    common = {"in_channels": CHANNELS, **options}
    model = NFN(spec, (4, 4), symmetry, out_features=2, head=(8,), **common).to(dtype).eval()
    if model.standardize is not None:
        model.standardize.fit(batch)
    assert_invariant(model, batch, group)
    editor = NFN(spec, (4, 4, 1), symmetry, **common).to(dtype).eval()
    if editor.standardize is not None:
        editor.standardize.fit(batch)
    assert_equivariant(editor, batch, group)
    assert_equivariant(lambda graph: editor(graph).to_graph(), batch, group)


def test_dropout_per_channel_commutes_with_permutations_for_every_draw():
    spec = NAMED_SPECS["self"]
    batch = mixed_batch(spec, torch.float64)

    def seeded(features: WeightFeatures) -> WeightFeatures:
        torch.manual_seed(3)
        return Dropout(0.5, per_channel=True)(features)

    dropped = seeded(batch.features("hnp"))
    zeros = sum(int((x == 0).sum()) for _, x in dropped.tensors())
    assert zeros > 0
    assert_equivariant(_resampled(seeded), batch, "hnp", folded=True)


def _resampled(function: Callable[[WeightFeatures], WeightFeatures]):
    """Keeps the random permutations of the checker independent of the seed of the function."""

    def run(features: WeightFeatures) -> WeightFeatures:
        state = torch.get_rng_state()
        out = function(features)
        torch.set_rng_state(state)
        return out

    return run


def permute_only(graph: WeightGraph, name: str, stores: list) -> WeightGraph:
    """Permutes one layer in some of its tensors only, which is not a symmetry of the network."""
    full = sample(graph, "np")
    while torch.equal(full.index[name], torch.arange(len(full.index[name]))):
        full = sample(graph, "np")
    moved = Permutation({name: full.index[name]}).apply(graph).features()
    raw = graph.features()
    pick = {key: (moved if key in stores else raw) for key, _ in raw.tensors()}
    return graph.with_features({key: pick[key][key] for key, _ in raw.tensors()})


@pytest.mark.parametrize("symmetry", SYMMETRIES)
@pytest.mark.parametrize(
    "stores",
    [
        [("input", "weight", "hidden1")],
        ["hidden1"],
        [("hidden1", "weight", "hidden2")],
        [("input", "weight", "hidden1"), "hidden1"],
    ],
)
def test_breaking_a_tie_between_layers_changes_the_result(stores, symmetry):
    graph = chain((2, 4, 5, 2))
    model = NFN(graph.spec, (4, 4), symmetry, out_features=1, head=(8,)).double()
    broken = permute_only(graph, "hidden1", stores)
    assert (model(graph) - model(broken)).abs().max() > 1e-6


@pytest.mark.parametrize("name", ["input", "output"])
def test_hnp_sees_the_order_of_inputs_and_outputs_and_np_does_not(name):
    graph = chain((3, 4, 5, 3))
    swapped = Permutation({name: torch.tensor([1, 0, 2])}).apply(graph)
    hnp = NFN(graph.spec, (4, 4), "hnp", out_features=1, head=(8,)).double()
    assert (hnp(graph) - hnp(swapped)).abs().max() > 1e-6
    np = NFN(graph.spec, (4, 4), "np", out_features=1, head=(8,)).double()
    assert (np(graph) - np(swapped)).abs().max() < 1e-12
    for kind in ("learned", "sinusoidal"):
        encoded = NFN(
            graph.spec, (4, 4), "np", out_features=1, head=(8,), io_encoding=kind
        ).double()
        assert (encoded(graph) - encoded(swapped)).abs().max() > 1e-6


def test_the_checkers_reject_a_broken_layer_and_name_the_field():
    graph = chain((2, 4, 5, 2), channels=CHANNELS)

    class PerPosition(nn.Module):
        """A mistake of other packages: a scale for every neuron."""

        def forward(self, features: WeightFeatures) -> WeightFeatures:
            def scale(key, x):
                ramp = torch.arange(1.0, len(x) + 1).to(x).reshape(-1, 1, 1)
                return x * ramp if key == "hidden2" else x

            return features.map_types(scale)

    with pytest.raises(AssertionError, match=r"f\(σU\) and σf\(U\) at 'hidden2' to agree"):
        assert_equivariant(PerPosition(), graph, "hnp", folded=False)
    with pytest.raises(AssertionError, match=r"f\(σU\) and f\(U\) to agree"):
        assert_invariant(lambda f: f.neurons["hidden1"], graph, "hnp", folded=False)


@settings(max_examples=40)
@given(spec=nested_specs(), symmetry=st.sampled_from(SYMMETRIES))
def test_random_nested_networks(spec, symmetry):
    sizes = {n.name: 3 for n in spec.neurons if n.size is None}
    graph = random_graph(spec, sizes, channels=2)
    folded = spec.fold(symmetry)
    assert_equivariant(NFLinear(folded, 2, 3).double(), graph, symmetry)
    assert_invariant(Pool(folded), graph, symmetry)
    assert_equivariant(NFN(spec, (3, 2), symmetry, in_channels=2).double(), graph, symmetry, False)


@pytest.mark.parametrize(("network", "child"), [("attention", "qk"), ("group norm", "c")])
def test_children_move_inside_their_parent_only(network, child):
    """Exchanging dimensions of two heads, or channels of two groups, is not a symmetry."""
    spec = NESTED_SPECS[network]
    graph = random_graph(spec, dict.fromkeys(spec.neuron, 3))
    layer = NFLinear(spec.fold("np"), 1, 2).double()
    for other, is_symmetry in ((1, True), (3, False)):
        index = torch.arange(9)
        index[[0, other]] = index[[other, 0]]
        swap = Permutation({child: index})
        expected = swap.apply(layer(graph.features("np")).to_graph()).features()
        found = layer(swap.apply(graph).features("np")).unfold()
        assert same(found, expected, 1e-9) is is_symmetry


def test_a_parent_takes_its_children_along():
    graph = random_graph(NESTED_SPECS["attention"], {"r": 2, "head": 3, "qk": 2, "v": 4})
    moved = from_places(graph, {"head": torch.tensor([2, 0, 1])})
    assert moved.index["head"].tolist() == [2, 0, 1]
    assert moved.index["qk"].tolist() == [4, 5, 0, 1, 2, 3]
    assert moved.index["v"].tolist() == [8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7]
    assert "r" not in moved.index


def test_permutations_act_as_a_group():
    batch = mixed_batch(NAMED_SPECS["self"], torch.float64)
    permutation = sample(batch, "np")
    back = permutation.inverse().apply(permutation.apply(batch))
    for (key, x), (_, y) in zip(back.features().tensors(), batch.features().tensors(), strict=True):
        assert torch.equal(x, y), key
    assert not permutation.is_identity
    with pytest.raises(ValueError, match="'np' or 'hnp'"):
        sample(batch, "all")


def test_the_action_is_the_papers_equation():
    graph = chain((2, 3, 4, 2))
    permutation = sample(graph, "np")
    moved = permutation.apply(graph).to_tensors()
    before = graph.to_tensors()
    index = permutation.index
    for i, (source, target) in enumerate([("input", "hidden1"), ("hidden1", "hidden2")]):
        expected = before[f"{i}.weight"][index[target]][:, index[source]]
        assert torch.equal(moved[f"{i}.weight"], expected)
        assert torch.equal(moved[f"{i}.bias"], before[f"{i}.bias"][index[target]])


def test_a_permuted_network_computes_the_same_function():
    graph = chain((2, 7, 5, 3))
    x = torch.randn(10, 2).double()

    def run(tensors: dict) -> torch.Tensor:
        y = x
        for i in range(3):
            y = torch.tanh(y @ tensors[f"{i}.weight"].t() + tensors[f"{i}.bias"])
        return y

    moved = sample(graph, "hnp").apply(graph)
    assert (run(graph.to_tensors()) - run(moved.to_tensors())).abs().max() < 1e-12


def inferred(spec: NetworkSpec, symmetry: str) -> list[nn.Module]:
    """Functions of graphs and of features, each with the input that it takes."""
    layer = NFLinear(spec.fold(symmetry), CHANNELS, CHANNELS)
    standardize = Standardize(spec, CHANNELS).double().fit(mixed_batch(spec, torch.float64))
    union = NetworkSpec.union([spec, chain((2, 3, 3, 4)).spec])
    return [
        layer,
        Residual(nn.Sequential(Activation("tanh"), layer)),
        nn.Sequential(Activation("tanh"), layer),
        nn.Sequential(Fold(symmetry), layer),
        nn.Sequential(standardize, Fold(symmetry), layer),
        NFN(spec, (4, 1), symmetry, in_channels=CHANNELS),
        NFN(union, (4, 1), symmetry, in_channels=CHANNELS),
    ]


@pytest.mark.parametrize("symmetry", SYMMETRIES)
def test_laws_infer_what_a_function_takes(symmetry):
    spec = chain((2, 3, 4)).spec
    graph = random_graph(spec, {"hidden1": 5}, CHANNELS)
    for module in inferred(spec, symmetry):
        assert_equivariant(module.double(), graph)
    folded = spec.fold(symmetry)
    pools = [
        Pool(folded),
        nn.Sequential(Fold(symmetry), Pool(folded)),
        NFN(spec, (4,), symmetry, in_channels=CHANNELS, out_features=2, head=(4,)),
    ]
    for pool in pools:
        assert_invariant(pool.double(), graph)
        assert_invariant(pool, Batch.from_data_list([graph, graph]))


def test_laws_infer_the_group_that_all_layers_keep():
    spec = chain((2, 3, 4)).spec
    graph = random_graph(spec, {"hidden1": 5}, CHANNELS)
    options = {"in_channels": CHANNELS, "out_features": 2, "head": (4,)}
    encoded = NFN(spec, (4,), "np", io_encoding="sinusoidal", **options).double()
    assert_invariant(encoded, graph)  # Positions of inputs and outputs leave "hnp".
    with pytest.raises(AssertionError, match="to agree"):
        assert_invariant(encoded, graph, "np")
    with pytest.raises(AssertionError, match="to agree"):
        assert_invariant(NFN(spec, (4,), "hnp", **options).double(), graph, "np")
    ramp = Activation(lambda x: x * torch.arange(len(x)).to(x).view(-1, 1, 1))
    broken = nn.Sequential(NFLinear(spec.fold("np"), CHANNELS, 2).double(), ramp)
    with pytest.raises(AssertionError, match="to agree"):
        assert_equivariant(broken, graph)
    with pytest.raises(ValueError, match=r"with a known symmetry .*symmetry='np'"):
        assert_equivariant(lambda graph: graph, graph)


@pytest.mark.parametrize("view", [None, "np", "hnp"])
def test_laws_accept_features_like_the_model_itself(view):
    graph = chain((3, 5, 4, 2), dtype=torch.float64)
    features = graph.features(view)
    fold = graph.spec.fold(view or "hnp")
    pooled = nn.Sequential(NFLinear(fold, 1, 3), Pool(fold)).double()
    layer = NFLinear(fold, 1, 3).double()
    if view is None:
        pooled, layer = nn.Sequential(Fold("hnp"), pooled), nn.Sequential(Fold("hnp"), layer)
        assert_invariant(NFN(graph.spec, (4,), "np", out_features=2).double(), features)
    pooled(features)
    assert_invariant(pooled, features)
    assert_equivariant(layer, features)
    with pytest.raises(AssertionError, match="to agree"):
        # The first entry of a layer is not invariant.
        assert_invariant(lambda f: f.neurons["hidden1"][0], graph.features(), "hnp", folded=False)
