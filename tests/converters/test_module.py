"""`from_module`: names, taps, ties, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from architectures import ARCHITECTURES, Architecture, One, Two
from torch import Tensor, nn

from nfn_graph import NFLinear, WeightGraph
from nfn_graph.converters import ConversionError, from_module, to_state_dict
from nfn_graph.testing import assert_equivariant

S = nn.Sequential


def test_a_chain_is_the_graph_of_its_tensors() -> None:
    module = S(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 2))
    weights = [module[i].weight.detach() for i in (0, 2, 4)]
    biases = [module[0].bias.detach(), None, module[4].bias.detach()]
    expected = WeightGraph.from_tensors(weights, biases)
    actual = from_module(module)
    assert actual.spec == expected.spec
    for (key, x), (other, y) in zip(
        actual.features().tensors(), expected.features().tensors(), strict=True
    ):
        assert key == other
        assert torch.equal(x, y)


def test_layers_are_named_along_the_computation() -> None:
    """Keys may come in any order; here those of the last layer come first."""
    module = One(
        lambda m, x: m.a(F.relu(m.b(F.relu(m.c(x))))),
        a=nn.Linear(4, 2), b=nn.Linear(5, 4), c=nn.Linear(3, 5),
    )  # fmt: skip
    graph = from_module(module)
    assert list(graph.spec.neuron) == ["input", "hidden1", "hidden2", "output"]
    assert [p.keys[0] for p in graph.layout.placements][::2] == ["c.weight", "b.weight", "a.weight"]
    assert next(iter(to_state_dict(graph))) == "a.weight"


def test_several_inputs_and_outputs_are_counted() -> None:
    module = Two(
        lambda m, x, z: (m.c(h := m.a(x) + m.b(z)), m.d(h)),
        a=nn.Linear(3, 5), b=nn.Linear(2, 5), c=nn.Linear(5, 1), d=nn.Linear(5, 4),
    )  # fmt: skip
    spec = from_module(module).spec
    assert list(spec.neuron) == ["input", "hidden1", "input2", "output", "output2"]


def test_tensors_over_the_same_layers_get_names() -> None:
    module = One(
        lambda m, x: m.c(m.a(x) + m.b(x)),
        a=nn.Linear(3, 5), b=nn.Linear(3, 5), c=nn.Linear(5, 1),
    )  # fmt: skip
    assert list(from_module(module).spec.weight) == [
        ("input", "weight", "hidden1"),
        ("input", "weight2", "hidden1"),
        ("hidden1", "weight", "output"),
    ]


def test_flattening_the_input_gives_a_neuron_per_value() -> None:
    graph = from_module(S(nn.Flatten(), nn.Linear(784, 5), nn.ReLU(), nn.Linear(5, 2)))
    assert graph.spec.neuron["input"].size == 784
    assert graph.spec.weight["input", "weight", "hidden1"].taps == 1


@pytest.mark.parametrize("channels_last", [False, True])
def test_flattening_gives_taps_in_the_order_of_the_network(channels_last: bool) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.conv(x)
        return m.out((x.permute(0, 2, 3, 1) if channels_last else x).flatten(1))

    module = One(run, conv=nn.Conv2d(1, 4, 3), out=nn.Linear(4 * 6, 3))
    graph = from_module(module, torch.randn(1, 1, 4, 5))
    weight = module.out.weight.detach()
    taps = weight.view(3, 6, 4).mT if channels_last else weight.view(3, 4, 6)
    edges = graph["hidden1", "weight", "output"].edge_attr
    assert edges.shape == (12, 6, 1)
    assert torch.equal(edges.view(3, 4, 6), taps)


def test_norms_are_taps_in_their_order() -> None:
    norm = nn.BatchNorm2d(4)
    norm.running_mean = torch.randn(4)
    norm.running_var = torch.rand(4)
    module = S(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Conv2d(4, 2, 3))
    tensors = (module[0].bias, norm.weight, norm.bias, norm.running_mean, norm.running_var)
    expected = torch.stack([t.detach() for t in tensors], 1)
    graph = from_module(module)
    assert torch.equal(graph["hidden1"].x[..., 0], expected)
    assert to_state_dict(graph)["1.num_batches_tracked"].dtype == torch.int64


def test_shared_weights_are_stored_once_and_written_to_all_keys() -> None:
    shared = nn.Linear(5, 5)
    module = S(nn.Linear(3, 5), nn.ReLU(), shared, nn.ReLU(), shared, nn.Linear(5, 2))
    graph = from_module(module)
    assert [p.keys for p in graph.layout.placements if "2.weight" in p.keys] == [
        ("2.weight", "4.weight")
    ]
    assert graph.spec.weight["hidden1", "weight", "hidden1"].taps == 1
    graph["hidden1", "weight", "hidden1"].edge_attr += 1.0
    state_dict = to_state_dict(graph)
    assert torch.equal(state_dict["2.weight"], shared.weight + 1.0)
    assert torch.equal(state_dict["4.weight"], shared.weight + 1.0)


def test_a_layer_tied_to_a_fixed_one_is_fixed() -> None:
    module = One(lambda m, x: m.b(x + m.a(x)), a=nn.Linear(3, 3), b=nn.Linear(3, 2))
    spec = from_module(module).spec
    assert [str(n) for n in spec.neurons] == ["input[3]:1", "output[2]:1"]


def test_stored_statistics_of_the_input_are_its_taps() -> None:
    module = One(lambda m, x: m.a((x - m.mean) / m.std), a=nn.Conv2d(3, 2, 1))
    module.register_buffer("mean", torch.randn(1, 3, 1, 1))
    module.register_buffer("std", torch.rand(1, 3, 1, 1) + 1)
    graph = from_module(module, torch.randn(1, 3, 4, 4), verify=True)
    assert graph.spec.neuron["input"].taps == 2


def test_tensors_without_use_are_carried() -> None:
    module = One(lambda m, x: m.a(x), a=nn.Linear(3, 2), unused=nn.Linear(7, 7))
    graph = from_module(module)
    assert set(graph.layout.carried) == {"unused.weight", "unused.bias"}
    assert torch.equal(to_state_dict(graph)["unused.weight"], module.unused.weight)


def test_an_embedding_is_a_weight_from_its_rows() -> None:
    module = S(nn.Embedding(7, 4), nn.ReLU(), nn.Linear(4, 2))
    graph = from_module(module, torch.tensor([[1, 2]]), verify=True)
    assert [str(n) for n in graph.spec.neurons] == ["input[7]:0", "hidden1:0", "output[2]:1"]
    expected = module[0].weight.detach().t().reshape(-1)
    assert torch.equal(graph["input", "weight", "hidden1"].edge_attr.flatten(), expected)


def test_the_module_and_the_graph_are_apart() -> None:
    module = S(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).train()
    module[1].eval()
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    graph = from_module(module, torch.randn(2, 3), verify=True)
    assert [m.training for m in module] == [True, False, True]
    assert all(torch.equal(t, before[k]) for k, t in module.state_dict().items())
    with torch.no_grad():
        module[0].weight.zero_()
    assert torch.equal(to_state_dict(graph)["0.weight"], before["0.weight"])


def test_gradients_become_a_channel() -> None:
    module = S(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    module(torch.randn(4, 3)).sum().backward()
    gradients = {key: p.grad for key, p in module.named_parameters() if p.grad is not None}
    graph = from_module(module, channels={"grad": gradients})
    assert graph["hidden1"].x.shape == (5, 1, 2)
    back = to_state_dict(graph, channel="grad")
    assert all(torch.equal(back[key], value) for key, value in gradients.items())


@pytest.mark.parametrize("symmetry", ["np", "hnp"])
@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
def test_layers_run_on_every_architecture(architecture: Architecture, symmetry: Any) -> None:
    if architecture is ARCHITECTURES["resnet-18"]:
        architecture = ARCHITECTURES["residual with downsampling"]
    graph = from_module(architecture.module(), architecture.inputs())
    spec = graph.spec.fold(symmetry)
    layer = NFLinear(spec, 1, 1).double()
    assert_equivariant(layer, graph, symmetry, trials=1)
    folded = graph.features(symmetry).to_graph()
    for (_, x), (_, y) in zip(folded.features().tensors(), graph.features().tensors(), strict=True):
        assert torch.equal(x, y)


def test_an_axis_that_may_be_positions_is_not_guessed() -> None:
    """For `[batch, points, features]`, this is a mean over points, not over neurons."""
    module = One(lambda m, x: m.b(m.a(x).mean(1)), a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    with pytest.raises(ConversionError, match="example_input"):
        from_module(module)
    assert list(from_module(module, torch.randn(2, 5, 3)).spec.neuron) == [
        "input",
        "hidden1",
        "output",
    ]


def test_a_maximum_along_a_named_axis_ties_the_neurons() -> None:
    """`max(axis=2)` reduces positions only: the convolution's channels are the linear's."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv1d(2, 5, 3), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.conv(x).max(axis=2)[0])

    graph = from_module(Pooled(), torch.randn(1, 2, 7), verify=True)
    assert graph.spec.weights[1].source == graph.spec.weights[0].target
