"""The paper's parameter-sharing tables against orbits of the group they are derived from."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from paper_reference import (
    chain_entries,
    dense_layer,
    flatten_chain,
    invariant,
    orbit_table,
    parameter_table,
    unflatten_chain,
)

SIZES = [
    (2, 3, 4, 2),
    (2, 4, 3),
    (2, 3, 2),
    (2, 2),
    (2, 3, 4, 3, 2),
    (3, 2, 2, 2, 2, 2),
    (2, 2, 2, 2),
]
SYMMETRIES = ["np", "hnp"]
EDGE_SIZES = [(3, 2), (1, 3, 1), (2, 1, 3), (1, 2, 1, 2), (1, 1)]


def random_chain(sizes, channels=2, batch=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, len(chain_entries(sizes)), channels)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def random_params(labels, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(labels), 3, 2, generator=generator, dtype=torch.float64)


def permute_chain(u, sizes, symmetry, seed=0):
    """Eq. action: W(i)[s_i(j), s_{i-1}(k)] and v(i)[s_i(j)], for a random group element."""
    generator = np.random.default_rng(seed)
    orders = [torch.as_tensor(generator.permutation(n)) for n in sizes]
    if symmetry == "hnp":
        orders[0], orders[-1] = torch.arange(sizes[0]), torch.arange(sizes[-1])
    weights, biases = unflatten_chain(u, sizes)
    weights = [w[:, orders[i + 1]][:, :, orders[i]] for i, w in enumerate(weights)]
    return flatten_chain(weights, [v[:, orders[i + 1]] for i, v in enumerate(biases)])


def layer_full_labels(depth: int) -> list[tuple]:
    """Keys (block, letter, i, s) of Eq. layer-full's parameters, in that equation's naming."""
    layers = range(1, depth + 1)
    keys = [
        (n, "a", i, s) for n in ("vartheta", "phi", "varphi", "psi") for i in layers for s in layers
    ]
    for i in layers:
        keys += [("vartheta", letter, i, i) for letter in "bcd"]
        keys += [(block, "b", i, i) for block in ("phi", "varphi", "psi")]
        if i > 1:
            keys += [("vartheta", "b", i, i - 1), ("phi", "c", i, i - 1)]
        if i < depth:
            keys += [("vartheta", "c", i, i + 1), ("varphi", "b", i, i + 1)]
    return keys


def layer_full(
    params: Mapping[tuple, Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Eq. layer-full (NP), stars being sums; ``params`` holds [c_out, c_in] per key.

    Terms that name W(0), v(0) or W(L+1) are absent.
    """
    depth = len(weights)

    def term(block: str, letter: str, i: int, s: int, x: Tensor) -> Tensor:
        return x @ params[block, letter, i, s].T

    rows, columns = [w.sum(2) for w in weights], [w.sum(1) for w in weights]  # W[j, *], W[*, k]
    out_w, out_b = [], []
    for i in range(1, depth + 1):
        w, v = weights[i - 1], biases[i - 1]
        y, z = term("vartheta", "d", i, i, w), term("psi", "b", i, i, v)
        for s in range(1, depth + 1):
            w_sum, v_sum = weights[s - 1].sum((1, 2)), biases[s - 1].sum(1)
            y = y + term("vartheta", "a", i, s, w_sum)[:, None, None]
            y = y + term("phi", "a", i, s, v_sum)[:, None, None]
            z = z + term("varphi", "a", i, s, w_sum)[:, None]
            z = z + term("psi", "a", i, s, v_sum)[:, None]
        y = y + term("vartheta", "b", i, i, columns[i - 1])[:, None]
        y = y + term("vartheta", "c", i, i, rows[i - 1])[:, :, None]
        y = y + term("phi", "b", i, i, v)[:, :, None]
        z = z + term("varphi", "b", i, i, rows[i - 1])
        if i > 1:
            y = y + term("vartheta", "b", i, i - 1, rows[i - 2])[:, None]
            y = y + term("phi", "c", i, i - 1, biases[i - 2])[:, None]
        if i < depth:
            y = y + term("vartheta", "c", i, i + 1, columns[i])[:, :, None]
            z = z + term("varphi", "b", i, i + 1, columns[i])
        out_w.append(y)
        out_b.append(z)
    return out_w, out_b


def canonical(index):
    """Numbers in order of first appearance, so that equal partitions give equal arrays."""
    _, first, inverse = np.unique(index.ravel(), return_index=True, return_inverse=True)
    return first[inverse].reshape(index.shape)


@pytest.mark.parametrize("symmetry", SYMMETRIES)
@pytest.mark.parametrize("sizes", SIZES + EDGE_SIZES, ids=str)
def test_table_partition_is_the_orbit_partition(sizes, symmetry):
    labels, index = parameter_table(sizes, symmetry)
    orbits = orbit_table(sizes, symmetry)
    assert len(labels) == len(set(labels)) == index.max() + 1 == orbits.max() + 1
    np.testing.assert_array_equal(canonical(index), canonical(orbits))


@pytest.mark.parametrize(
    ("sizes", "symmetry", "expected"),
    [
        ((2, 3, 4, 2), "np", 62),
        ((2, 3, 4, 2), "hnp", 114),
        ((2, 4, 3), "hnp", 117),
        ((2, 3, 2), "hnp", 74),
        ((2, 2), "hnp", 36),
        ((2, 3, 4, 3, 2), "np", 100),
        ((2, 3, 4, 3, 2), "hnp", 164),
    ],
)
def test_number_of_parameters(sizes, symmetry, expected):
    labels, index = parameter_table(sizes, symmetry)
    assert len(labels) == len(np.unique(index)) == expected
    assert len(np.unique(orbit_table(sizes, symmetry))) == expected


@pytest.mark.parametrize(
    ("sizes", "symmetry", "alpha", "beta", "expected"),
    [
        ((2, 3, 4, 2), "np", (2, 1, 0), (1, 0, 1), ("vartheta", "b", 2, 1)),
        ((2, 3, 4, 2), "np", (2, 1), (3, 0, 1), ("varphi", "b", 2, 3)),
        ((2, 3, 4, 2), "hnp", (2, 1, 0), (1, 0, 1), ("vartheta", "b", 2, 1, ("q", 1))),
        ((2, 4, 3), "hnp", (1, 3, 1), (2, 2, 3), ("vartheta", "c", 1, 2, ("k", 1), ("p", 2))),
        ((2, 4, 3), "hnp", (2, 2, 3), (1, 0, 1), ("vartheta", "a", 2, 1, ("j", 2), ("q", 1))),
        ((2, 4, 3), "hnp", (1, 3), (2, 0, 3), ("varphi", "b", 1, 2, ("p", 0))),
        ((2, 4, 3), "hnp", (1, 3), (1, 3, 1), ("varphi", "b", 1, 1, ("q", 1))),
        ((2, 3, 4, 3, 2), "hnp", (2, 1, 0), (3, 0, 1), ("vartheta", "c", 2, 3)),
    ],
)
def test_label_of_an_entry(sizes, symmetry, alpha, beta, expected):
    labels, index = parameter_table(sizes, symmetry)
    entries = chain_entries(sizes)
    assert labels[index[entries.index(alpha), entries.index(beta)]] == expected


@pytest.mark.parametrize("symmetry", SYMMETRIES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_dense_layer_is_equivariant(sizes, symmetry):
    labels, index = parameter_table(sizes, symmetry)
    u = random_chain(sizes)
    theta = random_params(labels)
    expected = permute_chain(dense_layer(theta, index, u), sizes, symmetry)
    actual = dense_layer(theta, index, permute_chain(u, sizes, symmetry))
    assert actual.shape == (3, len(index), 3)
    torch.testing.assert_close(actual, expected)


def test_dense_layer_against_loops():
    sizes = (2, 2)
    labels, index = parameter_table(sizes, "np")
    u = random_chain(sizes)
    theta = random_params(labels)
    expected = torch.zeros(3, 6, 3, dtype=torch.float64)
    for b, x, y in itertools.product(range(3), range(6), range(6)):
        expected[b, x] += theta[index[x, y]] @ u[b, y]
    torch.testing.assert_close(dense_layer(theta, index, u), expected)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_layer_full_spans_the_np_table(sizes):
    """Eq. layer-full's maps obey the NP table and are as many, so the two spaces coincide."""
    labels, index = parameter_table(sizes, "np")
    keys = layer_full_labels(len(sizes) - 1)
    probes = torch.eye(len(index), dtype=torch.float64).unsqueeze(-1)
    chain = unflatten_chain(probes, sizes)
    _, first = np.unique(index, return_index=True)
    rows = []
    for key in keys:
        params = {other: torch.full((1, 1), float(other == key)).double() for other in keys}
        theta = flatten_chain(*layer_full(params, *chain)).squeeze(-1).T.numpy()
        shared = theta.ravel()[first]
        np.testing.assert_array_equal(theta, shared[index])
        rows.append(shared)
    assert len(keys) == len(labels) == np.linalg.matrix_rank(np.stack(rows))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_flatten_chain_order_and_round_trip(sizes):
    u = random_chain(sizes)
    weights, biases = unflatten_chain(u, sizes)
    torch.testing.assert_close(flatten_chain(weights, biases), u, rtol=0, atol=0)
    for position, (i, j, *k) in enumerate(chain_entries(sizes)):
        entry = weights[i - 1][:, j, k[0]] if k else biases[i - 1][:, j]
        assert torch.equal(entry, u[:, position])


@pytest.mark.parametrize("symmetry", SYMMETRIES)
@pytest.mark.parametrize("sizes", [s for s in SIZES if len(s) > 2], ids=str)
def test_invariant_layer(sizes, symmetry):
    u, depth = random_chain(sizes), len(sizes) - 1
    pooled = invariant(*unflatten_chain(u, sizes), symmetry)
    fixed = sizes[0] + 2 * sizes[-1] if symmetry == "hnp" else 0
    assert pooled.shape == (3, 2 * depth + fixed, 2)
    moved = invariant(*unflatten_chain(permute_chain(u, sizes, symmetry), sizes), symmetry)
    torch.testing.assert_close(moved, pooled)


def test_invariant_order():
    sizes = (2, 4, 3)
    weights, biases = unflatten_chain(random_chain(sizes), sizes)
    pooled = invariant(weights, biases, "hnp")
    assert torch.equal(pooled[:, :4], invariant(weights, biases, "np"))
    torch.testing.assert_close(pooled[:, 1], weights[1].mean((1, 2)))
    torch.testing.assert_close(pooled[:, 2], biases[0].mean(1))
    torch.testing.assert_close(pooled[:, 4:6], weights[0].mean(1))
    torch.testing.assert_close(pooled[:, 6:9], weights[1].mean(2))
    torch.testing.assert_close(pooled[:, 9:], biases[1])


@pytest.mark.parametrize("function", [parameter_table, orbit_table])
def test_unknown_symmetry_is_refused(function):
    with pytest.raises(KeyError, match="pointwise"):
        function((2, 3, 2), "pointwise")
