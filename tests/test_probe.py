"""Probes: inputs that networks are run on."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from nfn_graph import Batch, Probe, ProbeNet, WeightGraph, symmetry
from nfn_graph.converters import from_module


def graph(*sizes: int) -> WeightGraph:
    layers: list[nn.Module] = []
    for first, second in pairwise(sizes):
        layers += [nn.Linear(first, second), nn.Tanh()]
    return from_module(nn.Sequential(*layers[:-1]).double())


def test_the_outputs_are_those_of_the_networks() -> None:
    batch = Batch.from_data_list([graph(2, 4, 3), graph(2, 7, 3), graph(2, 5, 5, 3)])
    probe = Probe(batch.spec, 6).double()
    outputs = probe(batch)
    assert outputs.shape == (3, 6, 3)
    assert torch.allclose(outputs[2], batch[2].run(probe.inputs), atol=1e-12)
    assert probe(batch[2]).shape == (1, 6, 3)


def test_permuted_networks_have_the_same_outputs_and_permuted_activations() -> None:
    network = graph(2, 6, 3)
    probe = Probe(network.spec, 5).double()
    element = symmetry.sample(network, "hnp", torch.Generator().manual_seed(1))
    moved = element.apply(network)
    assert torch.allclose(probe(moved), probe(network), atol=1e-10)
    rows, own = probe.activations(moved)["hidden1"], probe.activations(network)["hidden1"]
    assert not torch.allclose(rows, own)
    assert torch.allclose(rows.sort(0).values, own.sort(0).values, atol=1e-10)


def test_inputs_are_trained_unless_they_are_fixed() -> None:
    network = graph(2, 4, 3)
    learned = Probe(network.spec, 9, start="grid")
    fixed = Probe(network.spec, 9, start="grid", learned=False)
    assert torch.equal(learned.inputs, fixed.inputs)
    assert learned.inputs[:3].tolist() == [[-1, -1], [-1, 0], [-1, 1]]
    model = ProbeNet(learned, 1, (8,)).double()
    model(network).sum().backward()
    assert learned.inputs.grad is not None
    assert learned.inputs.grad.abs().max() > 0
    assert not fixed.inputs.requires_grad


def test_inputs_come_from_data() -> None:
    probe = Probe(graph(2, 4, 3).spec, 3)
    data = torch.randn(5, 2)
    assert torch.equal(probe.fit(data).inputs, data[:3])
    with pytest.raises(ValueError, match="at least 3 inputs"):
        probe.fit(data[:2])


def test_a_network_with_other_inputs_is_refused() -> None:
    model = ProbeNet(Probe(graph(2, 4, 3).spec, 5), 1).double()
    with pytest.raises(ValueError, match="inputs that the networks take"):
        model(graph(3, 4, 3))


def test_probes_of_images() -> None:
    network = from_module(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)),
        torch.zeros(1, 1, 4, 4),
    )
    model = ProbeNet(Probe(network.spec, 5, input_shape=(1, 4, 4)), 2)
    assert model(network).shape == (1, 2)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"probes": 0}, "at least one"), ({"probes": 8, "start": "grid"}, "fills a grid of 2 axes")],
)
def test_wrong_numbers_of_probes_are_refused(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Probe(graph(2, 4, 3).spec, **options)  # type: ignore[arg-type]


def test_outputs_are_standardized() -> None:
    batch = Batch.from_data_list([graph(2, 4, 3), graph(2, 7, 3)])
    model = ProbeNet(Probe(batch.spec, 6), 1).double().fit([batch])
    outputs = model.probe(batch)
    assert torch.allclose(model.mean, outputs.mean())
    assert torch.allclose(model.std, outputs.std(correction=0))


def test_a_model_learns_from_networks_of_all_widths() -> None:
    """The class of a network is the sign of what it adds to its outputs."""
    graphs, labels = [], []
    for i in range(60):
        layers = nn.Sequential(nn.Linear(2, 3 + i % 5), nn.Tanh(), nn.Linear(3 + i % 5, 1))
        nn.init.constant_(layers[2].bias, 1.0 if i % 2 else -1.0)
        graphs.append(from_module(layers))
        labels.append(float(i % 2))
    seen, unseen = Batch.from_data_list(graphs[:40]), Batch.from_data_list(graphs[40:])
    target = torch.tensor(labels)
    model = ProbeNet(Probe(seen.spec, 4), 1, (16,)).fit([seen])
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    before = model.probe.inputs.clone()
    for _ in range(60):
        optimiser.zero_grad()
        binary_cross_entropy_with_logits(model(seen)[:, 0], target[:40]).backward()
        optimiser.step()
    assert not torch.equal(model.probe.inputs, before)
    assert torch.equal((model(unseen)[:, 0] > 0).float(), target[40:])
