"""The models of the tasks: what they compute, and which symmetry they have."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
import torch
from torch import Tensor

from nfn_graph import Batch, NetworkSpec, WeightGraph
from nfn_graph.converters import from_state_dict
from nfn_graph.symmetry import sample
from nfn_graph.tasks.models import (
    ModelName,
    ModelSettings,
    build_model,
    fit_inputs,
    sizes_of,
)
from nfn_graph.tasks.models.baselines import NUM_STATISTICS, FlatMLP, StatNN, tensor_statistics

SETTINGS = ModelSettings((8, 8), (16,), io_encoding=True)
NAMES = get_args(ModelName)


def chain(*sizes: int, seed: int = 0) -> WeightGraph:
    generator = torch.Generator().manual_seed(seed)
    pairs = list(itertools.pairwise(sizes))
    weights = [torch.randn(o, i, generator=generator, dtype=torch.float64) for i, o in pairs]
    biases = [torch.randn(o, generator=generator, dtype=torch.float64) for _, o in pairs]
    layers = enumerate(zip(weights, biases, strict=True))
    tensors = {f"{i}.{k}": x for i, (w, b) in layers for k, x in (("weight", w), ("bias", b))}
    # Models that run networks need to know what the networks compute.
    return from_state_dict(tensors, activation="tanh")


GRAPHS = [chain(2, 5, 4, 3, seed=0), chain(2, 6, 3, 3, seed=1), chain(2, 4, 4, 3, seed=2)]


def made(name: str, graphs: list[WeightGraph] = GRAPHS) -> torch.nn.Module:
    torch.manual_seed(0)
    spec = NetworkSpec.union(g.spec for g in graphs)
    model = build_model(name, SETTINGS, spec, sizes_of(graphs), 4).double()  # type: ignore[arg-type]
    fit_inputs(model, graphs)
    return model.eval()


@pytest.mark.parametrize("name", NAMES)
def test_batch_equals_singles(name: str) -> None:
    model = made(name)
    together = model(Batch.from_data_list(GRAPHS))
    assert together.shape == (3, 4)
    alone = torch.cat([model(Batch.from_data_list([g])) for g in GRAPHS])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-10)
    assert together.std(0).min() > 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_invariance(name: str) -> None:
    model, graph = made(name), GRAPHS[0]
    moved = sample(graph, "hnp", torch.Generator().manual_seed(3)).apply(graph)
    assert not torch.equal(graph["hidden1"].x, moved["hidden1"].x)
    difference = (model(graph) - model(moved)).abs().max()
    # The MLP is the model that must learn the symmetry.
    assert (difference > 1e-3) if name.startswith("mlp") else (difference < 1e-10)


def test_statistics() -> None:
    found = tensor_statistics(Batch.from_data_list(GRAPHS).features())
    places = torch.tensor([0, 0.25, 0.5, 0.75, 1], dtype=torch.float64)
    for graph, row in zip(GRAPHS, found, strict=True):
        wanted: list[Tensor] = []
        for _, x in graph.features().tensors():
            if x.shape[1]:
                values = x.flatten()
                wanted += [values.mean(), values.var(correction=0)]
                wanted += torch.quantile(values, places).unbind()
        torch.testing.assert_close(row, torch.stack(wanted), rtol=0, atol=1e-12)


def test_statistics_of_a_missing_layer_are_zero() -> None:
    graphs = [chain(2, 5, 3, seed=0), chain(2, 5, 4, 3, seed=1)]
    batch = Batch.from_data_list(graphs)
    found = tensor_statistics(batch.features()).unflatten(1, (-1, NUM_STATISTICS))
    kinds = [k for k, taps in batch.spec.taps.items() if taps]
    own = graphs[0].spec.taps
    for i, kind in enumerate(kinds):
        assert bool(found[0, i].any()) == (kind in own)
        assert found[1, i].any() == (kind in graphs[1].spec.taps)


def test_statnn_standardizes() -> None:
    model = made("statnn")
    assert isinstance(model, StatNN)
    statistics = tensor_statistics(Batch.from_data_list(GRAPHS).features())
    scaled = (statistics - model.statistics.mean) / model.statistics.std
    torch.testing.assert_close(scaled.mean(0), torch.zeros_like(scaled[0]), rtol=0, atol=1e-5)
    assert (scaled.std(0, correction=0) - 1).abs().max() < 1e-4


def test_mlp_sees_every_weight_at_its_place() -> None:
    model = made("mlp")
    assert isinstance(model, FlatMLP)
    first = model.flatten(GRAPHS[0].features())
    assert first.count_nonzero() == sum(x.numel() for _, x in GRAPHS[0].features().tensors())
    tensors = GRAPHS[0].to_tensors()
    # [hidden1, input] is stored in 6 x 2 entries, then [hidden2, hidden1] in 4 x 6 entries.
    places = first[0, :12].view(6, 2)
    assert torch.equal(places[:5], tensors["0.weight"]) and not places[5].any()
    places = first[0, 12:36].view(4, 6)
    assert torch.equal(places[:, :5], tensors["1.weight"]) and not places[:, 5].any()


def test_mlp_refuses_larger_networks() -> None:
    with pytest.raises(ValueError, match=r"at most 6 neurons of type 'hidden1'.*got 9"):
        made("mlp")(chain(2, 9, 4, 3))


def test_unknown_model() -> None:
    with pytest.raises(ValueError, match=r"name of a model.*nfn-np.*got 'cnn'"):
        made("cnn")
