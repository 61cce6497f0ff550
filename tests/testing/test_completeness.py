"""One parameter per orbit: the layer expresses every equivariant linear map exactly once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from networks import (
    NESTED_SPECS,
    attention_spec,
    group_norm_spec,
    grouped_query_spec,
    grouped_spec,
    heads_spec,
    nested_specs,
    no_bias_spec,
    parallel_spec,
    residual_spec,
    rotary_spec,
    self_chain_spec,
    self_spec,
    sizes_of,
    skip_spec,
    specs,
)
from nfn_graph import NetworkSpec, NFLinear, WeightFeatures
from nfn_graph.testing import assert_complete, completeness, orbit_labels, random_graph


def mlp(sizes: tuple[int, ...], taps: int | tuple[int, ...] = 1) -> NetworkSpec:
    return NetworkSpec.chain(len(sizes) - 1, taps=taps, input_size=sizes[0], output_size=sizes[-1])


def measured(spec: NetworkSpec, symmetry: str, sizes: dict[str, int]) -> tuple[int, int, int]:
    folded = spec.fold(symmetry)
    layer = NFLinear(folded, 1, 1, bias=False)
    found = completeness(layer, folded, sizes=sizes)
    # Parameters are counted on the module itself, so that unused ones would show.
    return sum(p.numel() for p in layer.parameters()), found.rank, found.orbits


TABLE = [
    ((2, 3, 4, 2), 1, 62, 114),
    ((2, 4, 3), 1, None, 117),
    ((2, 3, 2), 1, None, 74),
    ((2, 2), 1, None, 36),
    ((2, 3, 4, 3, 2), 1, 100, 164),
    ((2, 3, 3), (2, 1), 54, 185),
]


@pytest.mark.parametrize("symmetry", ["np", "hnp"])
@pytest.mark.parametrize(("sizes", "taps", "np", "hnp"), TABLE)
def test_chains_of_the_design_table(sizes, taps, np, hnp, symmetry):
    expected = {"np": np, "hnp": hnp}[symmetry]
    spec = mlp(sizes, taps)
    named = dict(zip(spec.neuron, sizes, strict=True))
    parameters, rank, orbits = measured(spec, symmetry, named)
    assert parameters == rank == orbits == spec.fold(symmetry).num_orbits
    assert expected in (None, orbits)


@pytest.mark.parametrize(("symmetry", "expected"), [("np", 58), ("hnp", 98)])
def test_residual_network_of_the_design_table(symmetry, expected):
    sizes = {"x": 2, "r": 3, "h": 4, "out": 2}
    assert measured(residual_spec(), symmetry, sizes) == (expected,) * 3


@pytest.mark.parametrize("symmetry", ["np", "hnp"])
@pytest.mark.parametrize("spec", [skip_spec(), heads_spec(), no_bias_spec(), parallel_spec()])
def test_other_networks_of_the_design_table(spec, symmetry):
    sizes = {n.name: n.size or 2 + i % 2 for i, n in enumerate(spec.neurons)}
    parameters, rank, orbits = measured(spec, symmetry, sizes)
    assert parameters == rank == orbits


def test_self_weights_have_15_parameters_from_4_neurons_on():
    for size in (4, 5):
        assert measured(self_spec(), "np", {"h": size}) == (15, 15, 15)
    parameters, rank, orbits = measured(self_spec(), "np", {"h": 3})
    assert parameters == 15
    assert rank == orbits == 14


@pytest.mark.parametrize("symmetry", ["np", "hnp"])
@pytest.mark.parametrize("spec", [self_chain_spec(), self_spec(2, 1)])
def test_self_weights_inside_other_networks(spec, symmetry):
    sizes = {name: 4 if name == "h" else 2 for name in spec.neuron}
    parameters, rank, orbits = measured(spec, symmetry, sizes)
    assert parameters == rank == orbits


@pytest.mark.parametrize("symmetry", ["np", "hnp"])
@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (attention_spec(), 187),
        (rotary_spec(), 363),
        (grouped_spec(), 75),
        (grouped_query_spec(), 92),
        (group_norm_spec(), 123),
    ],
)
def test_nested_networks_of_the_design_table(spec, expected, symmetry):
    """No type of these specs is fixed, so both groups are the same."""
    assert measured(spec, symmetry, {}) == (expected,) * 3


@pytest.mark.parametrize("symmetry", ["np", "hnp"])
@pytest.mark.parametrize("network", NESTED_SPECS)
def test_nested_networks_with_fixed_layers(network, symmetry):
    spec = NESTED_SPECS[network]
    parameters, rank, orbits = measured(spec, symmetry, {})
    assert parameters == rank == orbits == spec.fold(symmetry).num_orbits


@settings(max_examples=60)
@given(spec=nested_specs(), symmetry=st.sampled_from(["np", "hnp"]))
def test_random_nested_specs(spec, symmetry):
    assume(spec.fold(symmetry).num_orbits <= 350)
    sizes = {neuron.name: 2 for neuron in spec.neurons}
    assume(random_graph_entries(spec, sizes) <= 80)
    parameters, rank, orbits = measured(spec, symmetry, sizes)
    assert parameters == rank == orbits


@settings(max_examples=100)
@given(data=st.data(), symmetry=st.sampled_from(["np", "hnp"]))
def test_random_specs(data, symmetry):
    spec = data.draw(specs())
    assume(spec.fold(symmetry).num_orbits <= 350)
    # NP permutes the fixed layers as well, so they need two neurons there.
    spec = spec.free if symmetry == "np" else spec
    sizes = data.draw(sizes_of(spec))
    assume(random_graph_entries(spec, sizes) <= 60)
    parameters, rank, orbits = measured(spec, symmetry, sizes)
    assert parameters == rank == orbits


@settings(max_examples=60)
@given(data=st.data(), symmetry=st.sampled_from(["np", "hnp"]))
def test_layers_of_one_neuron_merge_orbits(data, symmetry):
    spec = data.draw(specs(max_taps=2))
    assume(spec.fold(symmetry).num_orbits <= 300)
    spec = spec.free if symmetry == "np" else spec
    sizes = data.draw(sizes_of(spec, least=1))
    assume(random_graph_entries(spec, sizes) <= 60)
    parameters, rank, orbits = measured(spec, symmetry, sizes)
    assert rank == orbits
    assert parameters >= rank


def random_graph_entries(spec: NetworkSpec, sizes: dict[str, int]) -> int:
    return sum(x.shape[0] * x.shape[1] for _, x in random_graph(spec, sizes).features().tensors())


def test_several_channels_span_all_pairs_of_channels():
    spec = mlp((2, 3, 2)).fold("hnp")
    assert_complete(NFLinear(spec, 2, 3), spec, channels=(2, 3))


def test_the_checker_rejects_an_incomplete_layer():
    spec = mlp((2, 3, 2)).fold("np")
    with pytest.raises(AssertionError, match=r"all 32 equivariant maps \(got a span of rank 4 "):
        assert_complete(NFLinear(spec, 1, 1, pointwise=True), spec)


def test_the_checker_rejects_a_layer_that_is_not_equivariant():
    class Biased(NFLinear):
        def forward(self, features: WeightFeatures) -> WeightFeatures:
            ramp = torch.arange(len(features.neurons["hidden1"])).reshape(-1, 1, 1)
            out = super().forward(features)
            return out.replace({"hidden1": out["hidden1"] * ramp})

    spec = mlp((2, 3, 2)).fold("np")
    with pytest.raises(AssertionError, match="to be equivariant"):
        assert_complete(Biased(spec, 1, 1), spec)


def test_the_checker_refuses_a_layer_that_is_not_linear():
    class Squared(NFLinear):
        def forward(self, features: WeightFeatures) -> WeightFeatures:
            out = super().forward(features)
            return out * out

    spec = mlp((2, 3, 2)).fold("np")
    with pytest.raises(ValueError, match="linear in its parameters"):
        assert_complete(Squared(spec, 1, 1), spec)


def test_orbits_are_counted_by_brute_force_alone():
    """Burnside's lemma gives the same number from fixed points of all group elements."""
    graph = random_graph(mlp((2, 2, 2)), {"hidden1": 2})
    labels = orbit_labels(graph, "hnp")
    # The group is S_2 on the hidden layer: (12^2 + 2^2) / 2, with 12 entries, 2 of them fixed.
    entries = labels.shape[0]
    assert entries == 12
    assert int(labels.max()) + 1 == (entries**2 + 2**2) // 2
