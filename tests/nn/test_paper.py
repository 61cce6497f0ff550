"""The layer against the paper's parameter-sharing tables, entry by entry."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from networks import chain
from nfn_graph import Batch, NFLinear, Pool, WeightFeatures
from paper_reference import dense_layer, invariant, parameter_table, unflatten_chain

SIZES = [(2, 2), (2, 3, 2), (2, 4, 3), (2, 3, 4, 2), (3, 2, 4, 3, 2), (2, 2, 3, 2, 2, 3)]
IN, OUT, NETWORKS = 2, 3, 3


def batch_of(u: Tensor, sizes: tuple[int, ...]) -> Batch:
    """Vectors `[networks, D, channels]` in the paper's order as a batch of graphs."""
    return Batch.from_data_list([graph_of(row, sizes) for row in u])


def graph_of(u: Tensor, sizes: tuple[int, ...]):
    """One vector `[D, channels]` as a graph: weights, then biases, as the graph has them."""
    raw = chain(sizes).features()
    rows = iter(u.split([x.shape[0] * x.shape[1] for _, x in raw.tensors()]))
    values = {key: next(rows) for key, _ in raw.tensors()}
    grown = raw.map(lambda x: x.expand(*x.shape[:2], u.shape[-1]))
    return grown.map_types(lambda key, x: values[key].unsqueeze(1)).to_graph()


def vectors_of(features: WeightFeatures) -> Tensor:
    """The inverse of :func:`batch_of`."""
    graphs = features.num_graphs
    parts = [x.reshape(graphs, -1, x.shape[-1]) for _, x in features.unfold().tensors()]
    return torch.cat(parts, 1)


def change_of_basis(sizes: tuple[int, ...], symmetry: str, index: Tensor) -> Tensor:
    """`[paper's parameters, ours]`: the parameters of the table if one of ours is 1.

    They are read from the layer with one channel; a matrix that breaks the sharing fails.
    """
    spec = chain(sizes).spec.fold(symmetry)
    layer = NFLinear(spec, 1, 1, bias=False).double()
    entries = len(index)
    features = batch_of(torch.eye(entries).double().unsqueeze(-1), sizes).features(symmetry)
    columns = []
    for parameter in layer.parameters():
        for i in range(parameter.numel()):
            with torch.no_grad():
                for other in layer.parameters():
                    other.zero_()
                parameter.view(-1)[i] = 1
                matrix = vectors_of(layer(features)).squeeze(-1).t()
            shared = torch.zeros(int(index.max()) + 1).double()
            shared[index.flatten()] = matrix.flatten()
            assert torch.allclose(shared[index], matrix, rtol=0, atol=1e-14)
            columns.append(shared)
    return torch.stack(columns, 1)


@pytest.mark.parametrize("symmetry", ["np", "hnp"])
@pytest.mark.parametrize("sizes", SIZES)
def test_outputs_and_gradients_equal_the_tables(sizes, symmetry):
    _, table = parameter_table(sizes, symmetry)
    index = torch.as_tensor(table)
    basis = change_of_basis(sizes, symmetry, index)
    theta = torch.randn(len(basis), OUT, IN).double().requires_grad_()
    u = torch.randn(NETWORKS, len(index), IN).double().requires_grad_()

    spec = chain(sizes).spec.fold(symmetry)
    layer = NFLinear(spec, IN, OUT, bias=False).double()
    ours = torch.linalg.solve(basis, theta.detach().flatten(1)).reshape(-1, OUT, IN)
    start = 0
    with torch.no_grad():
        for parameter in layer.parameters():
            taps_out, taps_in = parameter.shape[0] // OUT, parameter.shape[1] // IN
            part = ours[start : start + taps_out * taps_in]
            start += len(part)
            blocks = part.reshape(taps_out, taps_in, OUT, IN).permute(0, 2, 1, 3)
            parameter.copy_(blocks.reshape(parameter.shape))

    expected = dense_layer(theta, index, u)
    actual = vectors_of(layer(batch_of(u, sizes).features(symmetry)))
    assert (actual - expected).abs().max() < 1e-10

    probe = torch.randn_like(expected)
    expected_u, expected_theta = torch.autograd.grad((expected * probe).sum(), (u, theta))
    actual_u, *actual_ours = torch.autograd.grad((actual * probe).sum(), (u, *layer.parameters()))
    assert (actual_u - expected_u).abs().max() < 1e-10
    # theta = basis @ ours, so the gradients transform by the transpose.
    flat = [
        g.reshape(g.shape[0] // OUT, OUT, g.shape[1] // IN, IN)
        .permute(0, 2, 1, 3)
        .reshape(-1, OUT, IN)
        for g in actual_ours
    ]
    moved = torch.einsum("po,pij->oij", basis, expected_theta)
    assert (torch.cat(flat) - moved).abs().max() < 1e-10


@pytest.mark.parametrize("sizes", SIZES)
def test_np_pool_is_the_papers(sizes):
    u = torch.randn(NETWORKS, sum_entries(sizes), IN).double()
    features = batch_of(u, sizes).features("np")
    expected = invariant(*unflatten_chain(u, sizes), "np")
    pool = Pool(features.spec)
    assert expected.shape[1] == pool.num_entries == 2 * (len(sizes) - 1)
    assert (pool(features) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("sizes", SIZES[1:])
def test_full_hnp_pool_is_the_papers(sizes):
    u = torch.randn(NETWORKS, sum_entries(sizes), IN).double()
    features = batch_of(u, sizes).features("hnp")
    expected = invariant(*unflatten_chain(u, sizes), "hnp")
    pool = Pool(features.spec, full=True)
    depth = len(sizes) - 1
    assert expected.shape[1] == pool.num_entries == 2 * depth + sizes[0] + 2 * sizes[-1]
    assert (pool(features) - expected).abs().max() < 1e-12
    # The pool without `full` drops three entries, which are means of others, and nothing else.
    full, lean = pool(features), Pool(features.spec)(features)
    inputs, outputs = sizes[0], sizes[-1]
    columns, rows, last = full[:, 2 * depth :].split([inputs, outputs, outputs], 1)
    means = torch.stack([columns.mean(1), rows.mean(1), last.mean(1)], 1)
    assert (full[:, [0, depth - 1, 2 * depth - 1]] - means).abs().max() < 1e-12
    kept = [i for i in range(full.shape[1]) if i not in (0, depth - 1, 2 * depth - 1)]
    nearest = torch.cdist(
        lean.mT.flatten(0, 1).unsqueeze(-1), full[:, kept].mT.flatten(0, 1).unsqueeze(-1)
    )
    assert lean.shape[1] == len(kept)
    assert nearest.amin(2).max() < 1e-12
    assert nearest.amin(1).max() < 1e-12


def sum_entries(sizes: tuple[int, ...]) -> int:
    return sum(o * i + o for i, o in itertools.pairwise(sizes))
