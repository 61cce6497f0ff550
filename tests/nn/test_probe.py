"""Probes: inputs that networks are run on."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from nfn_graph import (
    Batch,
    NetworkSpec,
    NeuronType,
    Probe,
    ProbeEncoding,
    ProbeNet,
    WeightGraph,
    WeightType,
    symmetry,
)
from nfn_graph.converters import from_module
from nfn_graph.testing import assert_equivariant, assert_invariant


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


def image_graph(width: int) -> WeightGraph:
    layers = nn.Sequential(
        nn.Conv2d(1, width, 3), nn.ReLU(), nn.Conv2d(width, 3, 2, bias=False), nn.Tanh(),
        nn.Flatten(), nn.Linear(3, 2),
    )  # fmt: skip
    return from_module(layers.double(), torch.zeros(1, 1, 4, 4, dtype=torch.float64))


def mixed_batches() -> list[tuple[Batch, tuple[int, ...] | None]]:
    chains = [graph(2, 6, 3), graph(2, 4, 5, 3), graph(2, 9, 3)]
    images = [image_graph(4), image_graph(6)]
    return [(Batch.from_data_list(chains), None), (Batch.from_data_list(images), (1, 4, 4))]


@pytest.mark.parametrize("number", [0, 1])
def test_permuted_networks_have_the_same_outputs_and_permuted_activations(number: int) -> None:
    batch, shape = mixed_batches()[number]
    probe = Probe(batch.spec, 5, input_shape=shape).double()
    assert_invariant(probe, batch, "hnp", tolerance=1e-10)
    element = symmetry.sample(batch, "hnp", torch.Generator().manual_seed(1))
    assert not element.is_identity
    moved, own = probe.activations(element.apply(batch)), probe.activations(batch)
    assert moved.keys() == own.keys() > element.index.keys()
    for name, x in own.items():
        expected = x[element.index[name]] if name in element.index else x
        assert torch.allclose(moved[name], expected, rtol=0, atol=1e-10)
    assert not torch.allclose(moved["hidden1"], own["hidden1"])


@pytest.mark.parametrize("number", [0, 1])
def test_channels_of_activations_follow_the_neurons(number: int) -> None:
    batch, shape = mixed_batches()[number]
    probe = Probe(batch.spec, 5, input_shape=shape)
    encoding = ProbeEncoding(probe, 4).double().fit([batch])
    assert_equivariant(encoding, batch, "hnp", tolerance=1e-10)
    features = encoding(batch)
    assert features.channels == 5
    for key, x in batch.features().tensors():
        assert torch.equal(features[key][..., :1], x)
    # The result of a network in a batch is that of the network alone.
    alone = encoding(batch[1], batch[1].features(spec=batch.spec))
    for key, x in alone.tensors():
        rows = features.graph_of(key) == 1
        assert torch.allclose(features[key][rows], x, rtol=0, atol=1e-10)


def test_channels_are_maps_of_standardized_activations() -> None:
    """The activations of a weight are the sum of those of its two neurons, except inputs."""
    batch = Batch.from_data_list([graph(2, 6, 3), graph(2, 4, 3)])
    encoding = ProbeEncoding(Probe(batch.spec, 5), 4).double().fit([batch])
    features, codes = encoding(batch), {}
    for name, x in encoding.probe.activations(batch).items():
        scaled = (x - x.mean()) / x.std(correction=0)
        codes[name] = encoding.maps[name](scaled)
        assert torch.allclose(features[name][:, 0, 1:], codes[name])
    for key in (("input", "weight", "hidden1"), ("hidden1", "weight", "output")):
        rows = features.rows(key)
        expected = codes[key[2]][rows.targets.index.long()]
        if key[0] in codes:
            expected = expected + codes[key[0]][rows.sources.index.long()]
        assert torch.allclose(features[key][:, 0, 1:], expected)


def test_appended_channels_have_the_dtype_of_the_features() -> None:
    network = graph(2, 4, 3)
    encoding = ProbeEncoding(Probe(network.spec, 5), 4).double()
    features = encoding(network, network.features().to(torch.bfloat16))
    assert {x.dtype for _, x in features.tensors()} == {torch.bfloat16}


def test_an_activation_that_does_not_vary_is_only_centred() -> None:
    network = graph(2, 4, 3)
    network["output"].x.zero_()
    network["hidden1", "weight", "output"].edge_attr.zero_()
    encoding = ProbeEncoding(Probe(network.spec, 5), 4).double().fit([network])
    assert float(encoding.std.output) == 1.0  # type: ignore[arg-type]
    assert all(x.isfinite().all() for _, x in encoding(network).tensors())


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
    with pytest.raises(ValueError, match=r"with 2 neurons of type 'input'.*got 3"):
        model(graph(3, 4, 3))
    with pytest.raises(ValueError, match="got several sizes"):
        model(Batch.from_data_list([graph(2, 4, 3), graph(3, 4, 3)]))
    with pytest.raises(ValueError, match=r"with 2 neurons of type 'input'.*got 3"):
        ProbeEncoding(model.probe, 4).double()(graph(3, 4, 3))


def test_probes_of_images() -> None:
    network = from_module(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)),
        torch.zeros(1, 1, 4, 4),
    )
    model = ProbeNet(Probe(network.spec, 5, input_shape=(1, 4, 4)), 2)
    assert model(network).shape == (1, 2)


def test_a_hidden_type_whose_name_begins_like_an_input_is_no_input() -> None:
    spec = NetworkSpec(
        (NeuronType("input", 0, size=2), NeuronType("input_proj"), NeuronType("output", size=3)),
        (WeightType("input", "input_proj"), WeightType("input_proj", "output")),
    )
    probe = Probe(spec, 5)
    assert probe.input_shape == (2,)
    assert list(ProbeEncoding(probe, 4).maps) == ["input_proj", "output"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"probes": 0}, "at least 1"), ({"probes": 8, "start": "grid"}, "fills a grid of 2 axes")],
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


def test_entropies_say_how_sure_classifiers_are() -> None:
    batch = Batch.from_data_list([graph(2, 4, 3), graph(2, 7, 3)])
    model = ProbeNet(Probe(batch.spec, 6), 1, entropy=True).double().fit([batch])
    logits = model.probe(batch)
    assert model(batch).shape == (2, 1)
    found = model.features(batch)
    assert found.shape == (2, 6 * 3 + 6)
    expected = torch.distributions.Categorical(logits=logits).entropy()
    assert torch.allclose(found[:, 18:], expected)


def test_a_model_learns_from_networks_of_all_widths() -> None:
    """The class of a network is the sign of the number that it adds to its outputs."""
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
