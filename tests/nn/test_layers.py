"""All layers except the NF-Layer, compared with formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from networks import NAMED_SPECS, chain, same
from nfn_graph import (
    NFN,
    Activation,
    Batch,
    ChannelNorm,
    Dropout,
    EquivariantNFN,
    Fold,
    FourierFeatures,
    IOEncoding,
    NFLinear,
    Pool,
    Residual,
    Standardize,
)
from nfn_graph.nn._fused import average, bag_sums
from nfn_graph.nn._message_passing import up
from nfn_graph.testing import random_graph

FIRST, LAST = ("input", "weight", "hidden1"), ("hidden1", "weight", "output")


def batch_of(channels: int = 2) -> Batch:
    return Batch.from_data_list([chain((3, w, 4), channels=channels) for w in (2, 5)])


@pytest.mark.parametrize("symmetry", ["np", "hnp"])
@pytest.mark.parametrize("pointwise", [False, True])
def test_initialisation_is_uniform_by_fan_in(pointwise, symmetry):
    spec = chain((3, 5, 6, 4), kernels=[(3,), (), ()]).spec.fold(symmetry)
    layer = NFLinear(spec, 7, 64, pointwise=pointwise)
    for site in spec.sites:
        if site.name not in layer.maps:
            continue
        matrix = layer.maps[site.name].detach()
        parts = site.parts[-1:] if pointwise else site.parts
        for part, rows in zip(parts, matrix.split([64 * p.taps for p in parts]), strict=True):
            if part.taps:
                # The messages of a site have a third of the variance of its own entries.
                share = 1 if part.below is None else 1 / 3
                assert rows.var() == pytest.approx(share / matrix.shape[1], rel=0.15), (site, part)
                largest = (3 * share / matrix.shape[1]) ** 0.5
                assert 0.9 * largest < rows.abs().max() <= largest


def test_a_pointwise_bias_is_initialised_by_the_fan_in_of_its_own_map():
    spec = chain((3, 5, 4), kernels=[(3,), ()]).spec.fold("hnp")
    layer = NFLinear(spec, 7, 512, pointwise=True)
    for key, bias in layer.constants().items():
        variance = (1 if key == "network" else 1 / 3) / (7 * spec.taps[key])
        assert float(bias.detach().var()) == pytest.approx(variance, rel=0.15), key


@torch.no_grad()
def share_fan_in(layer: NFLinear) -> None:
    """Samples all maps that add into an entry with the number of all their inputs together."""
    sites = layer.spec.sites
    for site in (site for site in sites if site.name in layer.maps):
        rows = layer.maps[site.name].split([p.taps * layer.out_channels for p in site.parts])
        for part, block in zip(site.parts, rows, strict=True):
            inputs = sum(s.read_taps for s in sites for p in s.parts if p.key == part.key)
            bound = (layer.in_channels * inputs) ** -0.5
            block.uniform_(-bound, bound)


def test_a_fresh_model_keeps_what_a_weight_says_about_itself():
    """An entry is not lost among means: it weighs several times more than with a common fan-in."""
    graph, key = chain((2, 32, 32, 1)), ("hidden1", "weight", "hidden2")
    raw = graph.features()
    moved = raw[key].clone()
    moved[0] += raw[key].std()

    @torch.no_grad()
    def response(model: EquivariantNFN) -> float:
        before, after = model(raw)[key], model(raw.replace({key: moved}))[key]
        return float((after - before)[0].abs().mean() / before.std())

    torch.manual_seed(0)
    models = [NFN(graph.spec, (6, 6, 6), act="SiLU").double() for _ in range(8)]
    ours = [response(model) for model in models]
    for model in models:
        for layer in (m for m in model.modules() if isinstance(m, NFLinear)):
            share_fan_in(layer)
    shared = [response(model) for model in models]
    assert sum(ours) > 3 * sum(shared)


def test_the_outputs_of_a_fresh_layer_have_a_sensible_scale():
    graph = chain((2, 32, 32, 1))
    features = graph.features("np").map(lambda x: torch.randn(*x.shape[:2], 64).double())
    out = NFLinear(features.spec, 64, 64).double()(features)
    for key, x in out.tensors():
        if x.numel() > 1000:
            assert 0.1 < x.std() < 2, key


def test_constants_are_shared_over_neurons_and_can_be_left_out():
    features = chain((3, 5, 4)).features("hnp") * 0
    layer = NFLinear(features.spec, 1, 2).double()
    for key, x in layer(features).tensors():
        assert torch.equal(x, x[:1].expand_as(x)), key
        assert x.abs().max() > 0
    bare = NFLinear(features.spec, 1, 2, bias=False).double()
    assert all(x.abs().max() == 0 for _, x in bare(features).tensors())


def test_pointwise_reads_only_the_entry_itself():
    batch = batch_of(2)
    layer = NFLinear(batch.spec.fold("np"), 2, 3, pointwise=True).double()
    features = batch.features("np")
    out = layer(features)
    changed = features.map_types(
        lambda k, x: (
            x.index_add(0, torch.tensor([0]), torch.ones(1, *x.shape[1:]).double())
            if k == FIRST
            else x
        )
    )
    moved = layer(changed).combine(out, torch.sub)
    assert moved.weights[FIRST][0].abs().max() > 0
    assert moved.weights[FIRST][1:].abs().max() == 0
    assert all(x.abs().max() == 0 for k, x in moved.tensors() if k != FIRST and x.numel())
    full = sum(p.numel() for p in NFLinear(batch.spec.fold("np"), 2, 3).parameters())
    assert sum(p.numel() for p in layer.parameters()) < full


@pytest.mark.parametrize("symmetry", ["np", "hnp"])
def test_layers_with_sums_are_layers_with_means_of_scaled_maps(symmetry):
    graph = chain((3, 5, 6, 4))
    features = graph.features(symmetry)
    spec, incidence = features.spec, features.incidence
    means = NFLinear(spec, 1, 2).double()
    sums = NFLinear(spec, 1, 2, aggr="sum").double()
    sums.load_state_dict(means.state_dict())
    with torch.no_grad():
        for site, rows in zip(spec.sites, incidence.sites[symmetry], strict=True):
            counts = []
            for part in site.parts:
                # The number of entries of a kind that are combined in one row of the site.
                entries = graph.features(symmetry)[part.key].shape[0]
                counts += [1.0 if part.below is None else entries / rows.num_rows] * part.taps
            if counts:
                sums.maps[site.name].div_(torch.tensor(counts).double())
    assert same(sums(features), means(features), 1e-12)


@pytest.mark.parametrize("symmetry", ["np", "hnp"])
@pytest.mark.parametrize("network", NAMED_SPECS)
def test_the_mean_of_equal_entries_is_that_entry(network, symmetry):
    """This holds at every site and for every kind of entry, whichever way it reaches the site."""
    spec = NAMED_SPECS[network]
    sizes = {n.name: 3 + i for i, n in enumerate(spec.neurons) if n.size is None}
    features = random_graph(spec, sizes).features(symmetry).map(torch.ones_like)
    layer = NFLinear(features.spec, 1, 1, bias=False).double()
    folded, incidence = features.spec, features.incidence
    sums = bag_sums(incidence.sites[symmetry], torch.float64)
    summaries = up(folded, layer.values(features), sums)
    average(folded, incidence, summaries)
    for site, rows, summary in zip(folded.sites, incidence.sites[symmetry], summaries, strict=True):
        torch.testing.assert_close(summary, torch.ones_like(summary), msg=str(site))
        assert summary.shape == (rows.num_rows, site.summary_taps)


def test_sums_and_maxima_of_the_pool():
    features = chain((3, 5, 4)).features("np")
    pool = {r: Pool(features.spec, r)(features) for r in ("mean", "sum")}
    counts = torch.tensor([15.0, 20.0, 5.0, 4.0]).reshape(1, -1, 1)
    assert torch.allclose(pool["mean"] * counts, pool["sum"])
    maxima = [x.max() for _, x in features.tensors() if x.numel()]
    assert torch.equal(Pool(features.spec, "max")(features).flatten(), torch.stack(maxima))


def test_the_maximum_over_nothing_is_zero():
    deep, shallow = chain((2, 3, 3, 4)), chain((2, 3, 4))
    batch = Batch.from_data_list([deep, shallow])
    features = batch.features("np").map(lambda x: x - 100)
    pooled = Pool(features.spec, "max")(features)
    present = pooled[1] != 0
    missing = {("hidden1", "weight", "hidden2"), ("hidden2", "weight", "output"), "hidden2"}
    entries = [name for name, taps in features.spec.taps.items() for _ in range(taps)]
    assert {e for e, there in zip(entries, present.flatten(), strict=True) if not there} == missing
    assert (pooled[0].flatten() != 0).sum() == len(entries) - 1


def test_learned_io_encoding_marks_first_columns_last_rows_and_last_bias():
    batch = batch_of(2)
    encoding = IOEncoding(batch.spec, 2, "learned").double()
    shapes = {name: tuple(p.shape) for name, p in encoding.positions.items()}
    assert shapes == {
        "output": (4, 1, 2),
        "input__weight__hidden1__source": (3, 1, 2),
        "hidden1__weight__output__target": (4, 1, 2),
    }
    raw = batch.features()
    added = encoding(raw) - raw
    first = added.weights[FIRST].reshape(-1, 3, 1, 2)
    assert torch.allclose(
        first, encoding.positions["input__weight__hidden1__source"].expand_as(first)
    )
    second = added.weights[LAST][4 * 2 :].reshape(4, 5, 1, 2)
    expected = encoding.positions["hidden1__weight__output__target"].unsqueeze(1).expand_as(second)
    assert torch.allclose(second, expected)
    assert torch.allclose(added.neurons["output"][4:], encoding.positions["output"])
    assert added.neurons["hidden1"].abs().max() == 0


def test_sinusoidal_io_encoding_is_the_formula():
    batch = batch_of(2)
    encoding = IOEncoding(batch.spec, 2)
    assert encoding.out_channels == 2 + 13
    raw, out = batch.features(), encoding(batch.features())
    assert all(
        torch.equal(x[..., :2], y)
        for (_, x), (_, y) in zip(out.tensors(), raw.tensors(), strict=True)
    )
    scales = torch.linspace(1, 5, 6).double()
    code = []
    for x in (-1.0, 0.0, 1.0):
        angles = math.pi * x * scales
        code.append(torch.cat([angles.sin(), angles.cos(), torch.tensor([x]).double()]))
    first = out.weights[FIRST][..., 2:].reshape(7, 3, 13)
    assert torch.allclose(first, torch.stack(code).expand_as(first), atol=1e-12)
    assert out.neurons["hidden1"][..., 2:].abs().max() == 0
    last = out.weights[LAST][:8, 0, 2:].reshape(4, 2, 13)
    assert torch.allclose(last[:, 0, -1], torch.linspace(-1, 1, 4).double())
    assert torch.equal(out.neurons["output"][:4, 0, 2:], last[:, 0])
    layers = IOEncoding(batch.spec, 2, encode_layers=True)(raw)
    assert torch.allclose(layers.neurons["hidden1"][..., -1], torch.tensor(-1.0).double())


def test_sinusoidal_io_encoding_follows_each_networks_own_size():
    batch = Batch.from_data_list([chain((3, 2, 4)), chain((5, 2, 1))])
    out = IOEncoding(batch.spec, 1)(batch.features())
    places = out.weights[FIRST][:, 0, -1].tolist()
    assert places[:3] == [-1, 0, 1]
    assert places[6:11] == [-1, -0.5, 0, 0.5, 1]
    assert out.neurons["output"][-1, 0, -1] == -1


def test_fourier_features_are_the_formula():
    features = batch_of(2).features()
    layer = FourierFeatures(2, 5, scale=0.5).double()
    out = layer(features)
    x = features.neurons["hidden1"]
    angles = 2 * math.pi * torch.einsum("ntc,cf->ntf", x, layer.frequencies)
    expected = torch.cat([angles.sin(), angles.cos()], -1)
    assert out.channels == layer.out_channels == 10
    assert torch.allclose(out.neurons["hidden1"], expected)
    torch.manual_seed(0)
    small = FourierFeatures(2, 5, scale=0.5).frequencies
    torch.manual_seed(0)
    assert torch.allclose(FourierFeatures(2, 5, scale=2.0).frequencies, 4 * small)
    assert "frequencies" in layer.state_dict()
    assert list(layer.parameters()) == []


def test_channel_norm_normalises_channels_and_is_finite_for_one():
    features = batch_of(8).features("hnp") * 3 + 1
    layer = ChannelNorm(features.spec, 8).double()
    for _, x in layer(features).tensors():
        assert x.mean(-1).abs().max() < 1e-12
        assert (x.var(-1, unbiased=False) - 1).abs().max() < 1e-3
    wide = ChannelNorm(features.spec, 8, eps=1e6).double()
    assert all(x.abs().max() < 0.1 for _, x in wide(features).tensors())
    one = batch_of(1).features("hnp")
    layer = ChannelNorm(one.spec, 1).double()
    nn.init.constant_(layer.shift["hidden1"], 0.5)
    out = layer(one.map(lambda x: x.requires_grad_()))
    assert torch.equal(out.neurons["hidden1"], torch.full_like(out.neurons["hidden1"], 0.5))
    sum(x.sum() for _, x in out.tensors()).backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_dropout_is_random_scaled_and_off_in_eval():
    features = chain((2, 50, 50, 2)).features("np").map(torch.ones_like)
    layer = Dropout(0.25)
    dropped = layer(features)
    values = dropped.weights["hidden1", "weight", "hidden2"]
    assert set(values.flatten().tolist()) == {0.0, 1 / 0.75}
    assert 0.15 < (values == 0).double().mean() < 0.35
    assert not torch.equal(values, layer(features).weights["hidden1", "weight", "hidden2"])
    assert layer.eval()(features) is features


def test_dropout_per_channel_takes_whole_channels_of_one_network():
    batch = Batch.from_data_list([chain((2, 4, 2), channels=64) for _ in range(2)])
    ones = batch.features("hnp").map(torch.ones_like)
    assert ones.network["network"].shape == (2, 2, 64)
    for _, x in Dropout(0.5, per_channel=True)(ones).tensors():
        if x.numel() and x.shape[1]:
            x = x[:, :1]
            halves = x.reshape(2, -1, 64)
            assert torch.equal(halves, halves[:, :1].expand_as(halves))
            assert not torch.equal(halves[0, 0], halves[1, 0])
            assert 0 < (halves[:, 0] == 0).sum() < 128


def test_standardize_is_fitted_per_type_and_tap_in_one_pass():
    graphs = [chain((2, w, 4), kernels=[(3,), ()], channels=2) for w in (3, 8, 5)]
    layer = (
        Standardize(graphs[0].spec, 2).double().fit([*graphs[:1], Batch.from_data_list(graphs[1:])])
    )
    every = torch.cat([g[FIRST].edge_attr for g in graphs])
    name = "__".join(FIRST)
    assert layer.state_dict()[f"mean.{name}"].shape == (3, 2)
    assert torch.allclose(getattr(layer.mean, name), every.mean(0))
    assert torch.allclose(getattr(layer.std, name), every.std(0, unbiased=False))
    batch = Batch.from_data_list(graphs)
    out = layer(batch.features())
    for _, x in out.tensors():
        if x.numel():
            assert x.mean(0).abs().max() < 1e-12
            assert (x.std(0, unbiased=False) - 1).abs().max() < 1e-9
    back = layer.inverse(out)
    assert all(
        torch.allclose(x, y)
        for (_, x), (_, y) in zip(back.tensors(), batch.features().tensors(), strict=True)
    )
    again = Standardize(graphs[0].spec, 2).double()
    again.load_state_dict(layer.state_dict())
    assert torch.equal(getattr(again.mean, name), getattr(layer.mean, name))


def test_standardize_leaves_constant_entries_finite():
    graph = chain((2, 3, 4))
    graph["hidden1"].x = torch.full((3, 1, 1), 2.0).double()
    out = Standardize(graph.spec, 1).double().fit([graph])(graph.features())
    assert torch.equal(out.neurons["hidden1"], torch.zeros(3, 1, 1).double())


def test_standardize_is_not_fooled_by_rounding():
    graph, other = chain((2, 3, 4)), chain((2, 3, 4))
    graph["hidden1"].x = torch.full((3, 1, 1), 0.1).double()
    other["hidden1"].x = torch.full((3, 1, 1), 0.2).double()
    out = Standardize(graph.spec, 1).double().fit(graph)(other.features())
    assert torch.allclose(out.neurons["hidden1"], torch.full((3, 1, 1), 0.1).double())


def test_residual_and_activation():
    features = batch_of(2).features("np")
    inner = NFLinear(features.spec, 2, 2).double()
    out = Residual(nn.Sequential(inner, Activation(nn.ReLU())))(features)
    expected = features + inner(features).map(torch.relu)
    assert same(out, expected)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("relu", nn.ReLU()),
        ("ReLU", nn.ReLU()),
        ("leaky_relu", nn.LeakyReLU()),
        ("Leaky-ReLU", nn.LeakyReLU()),
        ("swish", nn.SiLU()),
        (torch.tanh, nn.Tanh()),
    ],
)
def test_activations_by_name_are_those_of_torch(name, function):
    features = chain((2, 3, 4)).features()
    assert same(Activation(name)(features), features.map(function))


def test_a_fold_begins_a_chain_of_layers():
    graph = chain((2, 3, 4))
    spec = graph.spec.fold("hnp")
    layers = nn.Sequential(NFLinear(spec, 1, 2), Activation("relu"), Pool(spec)).double()
    model = nn.Sequential(Fold("hnp"), layers)
    expected = layers(graph.features("hnp"))
    assert torch.equal(model(graph), expected)
    assert torch.equal(model(graph.features()), expected)
    assert torch.equal(model(graph.features("np")), expected)
    assert same(Fold(None)(graph.features("np")), graph.features())


def test_an_unfitted_standardize_warns_once():
    graph = chain((2, 3, 4))
    features = graph.features()
    layer = Standardize(graph.spec, 1).double()
    with pytest.warns(UserWarning, match=r"not fitted, so it changes nothing\. Call fit"):
        assert same(layer(features), features)
    layer(features)  # Warnings are errors here.
    loaded = Standardize(graph.spec, 1).double()
    loaded.load_state_dict(layer.state_dict())
    with pytest.warns(UserWarning, match="not fitted"):
        loaded(features)
    layer.fit(graph)
    fresh = nn.Sequential(Standardize(graph.spec, 1)).double()
    fresh.load_state_dict(nn.Sequential(layer).state_dict())
    assert fresh[0].is_fitted
    assert same(fresh(features), layer(features))


def test_an_unfitted_standardize_compiles():
    graph = chain((2, 3, 4))
    layer = Standardize(graph.spec, 1).double()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert same(compiled(graph.features()), graph.features())
    layer.fit(graph)
    assert same(compiled(graph.features()), layer(graph.features()))


def test_add_is_another_name_for_a_sum():
    spec = chain((3, 4, 2)).spec.fold("np")
    assert NFLinear(spec, 1, 2, aggr="add").aggr == NFLinear(spec, 1, 2, aggr="sum").aggr
    features = chain((3, 4, 2)).features("np")
    assert torch.equal(Pool(spec, aggr="add")(features), Pool(spec, aggr="sum")(features))
