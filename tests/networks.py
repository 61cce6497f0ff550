"""Networks for the tests: named cases, and strategies that generate specs and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from hypothesis import strategies as st

from nfn_graph import Batch, NetworkSpec, NeuronType, WeightFeatures, WeightGraph, WeightType
from nfn_graph.features import Grouping
from nfn_graph.testing import random_graph


def chain(
    sizes: Sequence[int],
    kernels: Sequence[tuple[int, ...]] | None = None,
    biases: bool | Sequence[bool] = True,
    dtype: torch.dtype = torch.float64,
    channels: int = 1,
) -> WeightGraph:
    """An MLP or CNN with normal random weights."""
    depth = len(sizes) - 1
    kernels = [()] * depth if kernels is None else kernels
    flags = [biases] * depth if isinstance(biases, bool) else biases
    weights = [
        torch.randn(out, in_, *kernel, dtype=dtype)
        for in_, out, kernel in zip(sizes[:-1], sizes[1:], kernels, strict=True)
    ]
    vectors = [
        torch.randn(n, dtype=dtype) if flag else None
        for n, flag in zip(sizes[1:], flags, strict=True)
    ]
    graph = WeightGraph.from_tensors(weights, vectors)
    if channels == 1:
        return graph
    return graph.features().map(lambda x: torch.randn(*x.shape[:2], channels).to(x)).to_graph()


def same(first: WeightFeatures, second: WeightFeatures, tolerance: float = 0.0) -> bool:
    """Whether features agree in every type, in its order."""
    pairs = zip(first.tensors(), second.tensors(), strict=True)
    return all(k == j and torch.allclose(x, y, 0, tolerance) for (k, x), (j, y) in pairs)


def residual_spec(input_size: int = 2, output_size: int = 2) -> NetworkSpec:
    """x -> r, r -> h, h -> r, r -> y with a bias on h only: `up` and `down` are a bundle."""
    return NetworkSpec(
        (
            NeuronType("x", 0, size=input_size),
            NeuronType("r", 0),
            NeuronType("h", 1),
            NeuronType("out", 0, size=output_size),
        ),
        (
            WeightType("x", "r"),
            WeightType("r", "h", name="up"),
            WeightType("h", "r", name="down"),
            WeightType("r", "out"),
        ),
    )


def skip_spec() -> NetworkSpec:
    """The input leads into two layers, and past both of them into the output."""
    return NetworkSpec(
        (
            NeuronType("x", 0, size=2),
            NeuronType("a", 1),
            NeuronType("b", 2),
            NeuronType("out", 1, size=2),
        ),
        (
            WeightType("x", "a"),
            WeightType("x", "b"),
            WeightType("a", "b"),
            WeightType("b", "out"),
            WeightType("x", "out", name="skip"),
        ),
    )


def heads_spec() -> NetworkSpec:
    """Two outputs of one layer."""
    return NetworkSpec(
        (
            NeuronType("x", 0, size=2),
            NeuronType("h", 1),
            NeuronType("out", 1, size=2),
            NeuronType("z", 0, size=3),
        ),
        (WeightType("x", "h", 2), WeightType("h", "out"), WeightType("h", "z")),
    )


def parallel_spec() -> NetworkSpec:
    """Two tensors over the same pair of layers in the same direction, and one reversed."""
    return NetworkSpec(
        (NeuronType("x", 0, size=2), NeuronType("a", 1), NeuronType("b", 0), NeuronType("out", 1)),
        (
            WeightType("x", "a"),
            WeightType("a", "b", name="first"),
            WeightType("a", "b", 2, name="second"),
            WeightType("b", "a", name="back"),
            WeightType("b", "out"),
        ),
    )


def no_bias_spec() -> NetworkSpec:
    """A chain without biases."""
    return NetworkSpec.chain(3, biases=False, input_size=2, output_size=3)


def self_spec(taps: int = 1, neuron_taps: int = 0) -> NetworkSpec:
    """One layer with a weight tensor to itself."""
    return NetworkSpec((NeuronType("h", neuron_taps),), (WeightType("h", "h", taps),))


def self_chain_spec() -> NetworkSpec:
    """A layer with a weight tensor to itself inside a chain."""
    return NetworkSpec(
        (NeuronType("x", 0, size=2), NeuronType("h", 1), NeuronType("out", 1, size=2)),
        (WeightType("x", "h"), WeightType("h", "h", 2, name="loop"), WeightType("h", "out")),
    )


def attention_spec() -> NetworkSpec:
    """Heads whose queries and keys share their dimensions, as values and outputs do."""
    return NetworkSpec(
        (
            NeuronType("r", 1),
            NeuronType("head", 0),
            NeuronType("qk", 2, parents=("head",)),
            NeuronType("v", 1, parents=("head",)),
        ),
        (WeightType("r", "qk", 2), WeightType("r", "v"), WeightType("v", "r")),
    )


def rotary_spec() -> NetworkSpec:
    """The same with rotary positions: the two dimensions of queries and keys are taps."""
    return NetworkSpec(
        (NeuronType("r", 1), NeuronType("head", 4), NeuronType("v", 1, parents=("head",))),
        (WeightType("r", "head", 4), WeightType("r", "v"), WeightType("v", "r")),
    )


def grouped_spec(input_size: int | None = None, output_size: int | None = None) -> NetworkSpec:
    """A grouped convolution between two dense ones."""
    return NetworkSpec(
        (
            NeuronType("x", 0, size=input_size),
            NeuronType("g", 0),
            NeuronType("a", 1, parents=("g",)),
            NeuronType("b", 1, parents=("g",)),
            NeuronType("out", 0, size=output_size),
        ),
        (WeightType("x", "a"), WeightType("a", "b"), WeightType("b", "out")),
    )


def grouped_query_spec() -> NetworkSpec:
    """Query heads that share the keys and values of their group."""
    return NetworkSpec(
        (
            NeuronType("r", 0),
            NeuronType("kv", 0),
            NeuronType("qh", 0, parents=("kv",)),
            NeuronType("k", 0, parents=("kv",)),
            NeuronType("q", 0, parents=("qh", "k")),
            NeuronType("v", 0, parents=("kv",)),
            NeuronType("o", 0, parents=("qh", "v")),
        ),
        (WeightType("r", "q"), WeightType("r", "k"), WeightType("r", "v"), WeightType("o", "r")),
    )


def group_norm_spec() -> NetworkSpec:
    """GroupNorm between two convolutions."""
    return NetworkSpec(
        (
            NeuronType("x", 0),
            NeuronType("g", 0),
            NeuronType("c", 3, parents=("g",)),
            NeuronType("out", 0),
        ),
        (WeightType("x", "c", 2), WeightType("c", "out")),
    )


def fixed_inside_spec() -> NetworkSpec:
    """Dimensions that keep their order inside heads that do not."""
    return NetworkSpec(
        (
            NeuronType("r", 1),
            NeuronType("head", 0),
            NeuronType("d", 1, size=2, parents=("head",)),
            NeuronType("v", 1, parents=("head",)),
        ),
        (WeightType("r", "d"), WeightType("r", "v"), WeightType("v", "r")),
    )


NESTED_SPECS = {
    "attention": attention_spec(),
    "rotary": rotary_spec(),
    "grouped": grouped_spec(2, 2),
    "grouped query": grouped_query_spec(),
    "group norm": group_norm_spec(),
    "fixed inside": fixed_inside_spec(),
}
NAMED_SPECS = {
    **NESTED_SPECS,
    "mlp": NetworkSpec.chain(3, input_size=2, output_size=2),
    "cnn": NetworkSpec.chain(2, taps=(3, 1), input_size=2, output_size=2),
    "one layer": NetworkSpec.chain(1, input_size=2, output_size=3),
    "no biases": no_bias_spec(),
    "residual": residual_spec(),
    "skip": skip_spec(),
    "heads": heads_spec(),
    "parallel": parallel_spec(),
    "self": self_chain_spec(),
}


def batch_of(spec: NetworkSpec, widths: tuple[int, ...] = (3, 5, 1), channels: int = 3) -> Batch:
    """Networks of one spec, in each of which all free layers have one width."""
    return Batch.from_data_list(
        [
            random_graph(spec, {n.name: w for n in spec.neurons if n.size is None}, channels)
            for w in widths
        ]
    )


def all_groupings() -> list[Grouping]:
    """Contiguous and strided features, and features with empty groups (a type that is missing)."""
    mixed = Batch.from_data_list([chain((2, 5, 3)), chain((2, 3, 4, 3)), chain((2, 2, 3))])
    incidence = mixed.features().incidence
    found = [rows.groupings[0] for rows in incidence.neurons.values()]
    for edges in incidence.weights.values():
        found += [edges.targets, edges.sources]
    return found


@st.composite
def specs(draw: st.DrawFn, max_taps: int = 4) -> NetworkSpec:
    """Chains of 1 to 5 layers, with residual blocks, skips, heads, parallel and self weights.

    Small enough for brute force: at most two tensors have several taps. Every free layer may
    have any size.
    """
    depth = draw(st.integers(1, 5))
    taps = [1] * depth
    for place in draw(st.sets(st.integers(0, depth - 1), max_size=2)):
        taps[place] = draw(st.integers(1, max_taps))
    own = st.integers(0, 2)
    fixed = st.integers(1, 2)
    chain_ = ["input", *(f"hidden{i}" for i in range(1, depth)), "output"]
    neurons = [NeuronType("input", 0, size=draw(fixed))]
    neurons += [NeuronType(name, draw(own)) for name in chain_[1:-1]]
    neurons.append(NeuronType("output", draw(own), size=draw(fixed)))
    weights = [WeightType(s, t, k) for (s, t), k in zip(pairwise(chain_), taps, strict=True)]
    kinds = ["none", "residual", "skip", "head", "parallel", "back", "self"]
    extra = draw(st.sampled_from(kinds))
    if extra == "residual" and depth >= 2:
        neurons.append(NeuronType("inner", draw(own)))
        weights += [
            WeightType("hidden1", "inner", name="up"),
            WeightType("inner", "hidden1", name="down"),
        ]
    elif extra == "skip" and depth >= 2:
        weights.append(WeightType("input", "output", name="skip"))
        if depth >= 3:
            weights.append(WeightType("input", "hidden2", name="skip"))
    elif extra == "head":
        neurons.append(NeuronType("head", draw(own), size=draw(fixed)))
        weights.append(WeightType(chain_[-2], "head"))
    elif extra == "parallel":
        weights.append(WeightType(chain_[-2], chain_[-1], name="second"))
    elif extra == "back" and depth >= 3:
        weights.append(WeightType("hidden2", "hidden1", name="back"))
    elif extra == "self" and depth >= 2:
        weights.append(WeightType("hidden1", "hidden1", name="loop"))
    return NetworkSpec(tuple(neurons), tuple(weights))


@st.composite
def sizes_of(draw: st.DrawFn, spec: NetworkSpec, least: int = 2, most: int = 3) -> dict[str, int]:
    """Sizes of the free layers of a spec; of those with self weights 4, if others have 2."""
    loops = {w.source for w in spec.weights if spec.is_self(w)} if least > 1 else set()
    return {
        n.name: 4 if n.name in loops else draw(st.integers(least, most))
        for n in spec.neurons
        if n.size is None
    }


@st.composite
def nested_specs(draw: st.DrawFn) -> NetworkSpec:
    """A layer, nested layers of up to two kinds of parents, and weights among them all.

    Nested layers are joined with flat ones, inside their common parent, or across parents; some
    are the pairs of two others, some keep their order inside the parent.
    """
    own = st.integers(0, 1)
    neurons = [NeuronType("x", draw(own), size=draw(st.sampled_from([None, 2])))]
    children: list[str] = []
    for name in ["g", "h"][: draw(st.integers(1, 2))]:
        neurons.append(NeuronType(name, draw(own)))
        for child in [f"{name}a", f"{name}b"][: draw(st.integers(1, 2))]:
            fixed = draw(st.sampled_from([None, None, 2]))
            neurons.append(NeuronType(child, draw(own), size=fixed, parents=(name,)))
            children.append(child)
    together = [(a, b) for a in children for b in children if a < b]
    if together and draw(st.booleans()):
        pair = draw(st.sampled_from(together))
        neurons.append(NeuronType("pairs", draw(own), parents=pair))
        children.append("pairs")
    weights = [WeightType("x", children[0])]
    for i in range(draw(st.integers(0, 2))):
        source, target = draw(st.permutations(["x", "g", *children]))[:2]
        weights.append(WeightType(source, target, draw(st.integers(1, 2)), name=f"w{i}"))
    return NetworkSpec(tuple(neurons), tuple(weights))
