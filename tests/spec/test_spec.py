"""Specs: immutable values that describe themselves and refuse impossible contents."""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys

import pytest

from networks import chain, parallel_spec, residual_spec, self_chain_spec
from nfn_graph import NetworkSpec, NeuronType, WeightType


def test_specs_are_values():
    first, second = chain((2, 3, 4)).spec, chain((2, 5, 4)).spec
    assert first == second
    assert hash(first) == hash(second)
    assert first != chain((2, 3, 5)).spec
    assert pickle.loads(pickle.dumps(first)) == first
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.neurons = ()


def test_specs_print_their_types():
    spec = NetworkSpec.chain(2, taps=(9, 1), biases=(True, False), input_size=3)
    assert str(spec) == (
        "NetworkSpec(input[3]:0, hidden1:1, output[*]:0 | input->hidden1:9, hidden1->output:1)"
    )
    assert str(residual_spec().fold("hnp")) == (
        "FoldedSpec(hnp)\n"
        "  {h, r} [r->h(up):2]\n"
        "  {r} [r->h(up) at r:2, r:4]\n"
        "  {h} [r->h(up) at h:2, h:1]\n"
        "  {} [r->h(up) at network:2, r at network:4, h at network:1]"
    )


def test_sites_are_printed_with_the_names_of_their_tensors():
    site = parallel_spec().fold("np").site["a", "first", "b"]
    assert str(site) == "{b, a} [a->b(first):4]"


def test_np_forgets_sizes_and_hnp_keeps_them():
    first, second = chain((2, 3, 4)).spec, chain((5, 3, 4)).spec
    assert first.fold("np") == second.fold("np")
    assert first.fold("hnp") != second.fold("hnp")


def test_the_fold_turns_fixed_axes_into_taps():
    folded = chain((2, 3, 4, 5), kernels=[(3, 3), (1, 1), ()]).spec.fold("hnp")
    middle = ("hidden1", "weight", "hidden2")
    assert folded.taps == {middle: 1, "hidden1": 1 + 2 * 9, "hidden2": 1 + 5, "network": 5}


def test_tensors_over_one_pair_of_layers_are_bundled():
    joint = parallel_spec().fold("np").site["a", "first", "b"]
    assert [(p.store[1], p.taps) for p in joint.pieces] == [
        ("first", 1),
        ("second", 2),
        ("back", 1),
    ]
    assert joint.indices == ("b", "a")
    assert joint.taps == 4


def test_self_weights_split_into_diagonal_and_edges():
    folded = self_chain_spec().fold("np")
    loop = next(site for site in folded.sites if site.is_self)
    assert loop.read_taps == 2 * loop.taps == 4
    pieces = folded.site["h"].pieces
    assert [(p.store, p.taps, p.diagonal) for p in pieces] == [
        ("h", 1, False),
        (("h", "loop", "h"), 2, True),
    ]


def test_union_holds_every_type():
    shallow, deep = chain((2, 3, 4)).spec, chain((2, 3, 3, 4)).spec
    union = NetworkSpec.union([shallow, deep, shallow])
    assert set(union.neuron) == {"input", "hidden1", "hidden2", "output"}
    assert len(union.weights) == 4
    assert union.neuron["input"].size == 2
    assert NetworkSpec.union([shallow]) is shallow


def test_the_order_of_a_union_does_not_depend_on_the_order_of_specs():
    parts = [chain((2, *[3] * depth, 4)).spec for depth in (0, 1, 2, 10)]
    union = NetworkSpec.union(parts)
    assert union == NetworkSpec.union(parts[::-1])
    hidden = [f"hidden{i}" for i in range(1, 11)]
    assert list(union.neuron) == ["input", *hidden, "output"]


def test_pickled_specs_are_found_among_fresh_ones_in_another_process():
    """Hashes of strings differ between processes, so a stored hash would not be found."""
    spec = chain((2, 3, 4)).spec
    assert hash(spec) == hash(spec.fold("hnp").unfolded)
    hash(spec.fold("hnp"))
    payload = pickle.dumps([spec, spec.fold("hnp")]).hex()
    code = (
        "import pickle, torch; from nfn_graph import NetworkSpec;"
        f"spec, folded = pickle.loads(bytes.fromhex('{payload}'));"
        "fresh = NetworkSpec.chain(2, input_size=2, output_size=4);"
        "print(fresh in {spec}, fresh.fold('hnp') in {folded})"
    )
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONWARNINGS": "ignore"}
        out = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env=environment,
            check=True,
        )
        assert out.stdout.split() == ["True", "True"]


def test_union_leaves_sizes_open_where_they_differ():
    union = NetworkSpec.union([chain((2, 3, 4)).spec, chain((5, 3, 4)).spec])
    assert union.neuron["input"].size is None
    assert union.neuron["input"].fixed
    with pytest.raises(ValueError, match="one size of the fixed neuron type 'input'"):
        union.fold("hnp")
    assert union.fold("np") == chain((2, 3, 4)).spec.fold("np")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (NetworkSpec.chain(2, taps=(9, 1), input_size=2, output_size=4), "GrowKernels"),
        (NetworkSpec.chain(2, biases=False, input_size=2, output_size=4), "FillBiases"),
        (chain((2, 3, 4)).spec.free, "fixed=True and fixed=False"),
    ],
)
def test_union_refuses_types_that_differ(other, message):
    with pytest.raises(ValueError, match=message):
        NetworkSpec.union([chain((2, 3, 4)).spec, other])


def test_differences_are_told_in_words():
    first = chain((2, 3, 4)).spec
    assert first.difference(first) == ""
    assert "expected input[2]:0 (got input[5]:0)" in first.difference(chain((5, 3, 4)).spec)
    deeper = first.difference(chain((2, 3, 3, 4)).spec)
    assert "hidden2 is not known" in deeper
    assert "('hidden1', 'weight', 'output') is missing" in deeper
    turned = NetworkSpec(first.neurons[::-1], first.weights)
    assert first.difference(turned) == "the types are in another order"


# Dimensions that keep their order in every head `kv`, and a bias for each of them and every `q`.
NESTED = (
    NeuronType("h", 0),
    NeuronType("q", 0),
    NeuronType("kv", 0),
    NeuronType("d", 0, 2, parents=("kv",)),
)
PAIRS = NeuronType("p", 1, parents=("q", "d"))


def test_pairs_with_a_fixed_parent_fold_onto_the_weights_between_free_parents():
    spec = NetworkSpec((*NESTED, PAIRS), (WeightType("h", "p"), WeightType("q", "kv")))
    assert spec.fold("hnp").site["q", "weight", "kv"].taps == 3


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: NeuronType("a b"), "Python identifier"),
        (lambda: NeuronType("keys"), "or an attribute of torch.nn.ModuleDict"),
        (lambda: NeuronType("network"), "not 'y', 'layout', 'network'"),
        (lambda: NeuronType("y"), "not 'y', 'layout', 'network'"),
        (lambda: NeuronType("training"), "or an attribute of torch.nn.ModuleDict"),
        (lambda: NeuronType("a__b"), "without '__'"),
        (lambda: NeuronType("a", taps=-1), r"at least 0 \(got -1\)"),
        (lambda: NeuronType("a", size=0), r"at least 1 \(got 0\)"),
        (lambda: WeightType("a", "b", taps=0), r"at least 1 \(got 0\)"),
        (lambda: NetworkSpec((NeuronType("a"),), ()), "at least one weight type"),
        (lambda: NetworkSpec((NeuronType("a"),), (WeightType("a", "b"),)), "got 'b'"),
        (
            lambda: NetworkSpec((NeuronType("a"), NeuronType("a")), (WeightType("a", "a"),)),
            r"to differ \(got 'a' twice\)",
        ),
        (lambda: NetworkSpec.chain(2, taps=(1, 1, 1)), r"2 values of 'taps' \(got 3\)"),
        (lambda: NetworkSpec.chain(0), "at least 1"),
        (lambda: NetworkSpec.union([]), "at least one spec"),
        (
            lambda: NetworkSpec(
                (*NESTED, NeuronType("r", role=True)), (WeightType("q", "kv"), WeightType("r", "d"))
            ),
            "to connect role types or nested types",
        ),
        (
            lambda: NetworkSpec((*NESTED, PAIRS), (WeightType("h", "p"),)).fold("hnp"),
            r"types \('q', 'kv'\) to be the parents of pairs .* Use 'np'",
        ),
        (lambda: NetworkSpec.chain(2).fold("sn"), r"'np' or 'hnp' \(got 'sn'\)"),
    ],
)
def test_what_cannot_be_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
