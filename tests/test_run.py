"""`WeightGraph.run`: what the graph computes is what the network computes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from architectures import ARCHITECTURES, One
from torch import Tensor, nn

from nfn_graph import Batch, WeightGraph, symmetry
from nfn_graph.converters import from_module, from_state_dict, load, save
from nfn_graph.data import Computation, Range, Ref, Step
from nfn_graph.transforms import FillBiases, GrowKernels, RoleTypes

S = nn.Sequential
# What no graph can run, and why.
NOT_RUN = {"control flow by shape": "looks at shapes"}
RUN = [name for name in ARCHITECTURES if name not in NOT_RUN]


def tensors_in(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs]
    items = outputs.values() if isinstance(outputs, dict) else outputs
    return [tensor for item in items for tensor in tensors_in(item)]


def close(actual: Any, expected: Any, tolerance: float = 1e-10) -> bool:
    pairs = list(zip(tensors_in(actual), tensors_in(expected), strict=True))
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pairs)


def mlp(*sizes: int, activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), activation()]
    return S(*layers[:-1]).double()


@pytest.mark.parametrize("name", RUN)
def test_a_graph_computes_what_its_network_computes(name: str) -> None:
    architecture = ARCHITECTURES[name]
    module, inputs = architecture.module(), architecture.inputs()
    graph = from_module(module, inputs)
    assert close(graph.run(inputs), module(*inputs))
    more = tuple(torch.cat([x, 2 * x, -x]) for x in inputs)
    assert close(graph.run(more), module(*more))


@pytest.mark.parametrize("name", RUN)
def test_a_batch_computes_what_its_networks_compute(name: str) -> None:
    architecture = ARCHITECTURES[name]
    modules = [architecture.module() for _ in range(3)]
    inputs = architecture.inputs()
    batch = Batch.from_data_list([from_module(module, inputs) for module in modules])
    outputs = tensors_in(batch.run(inputs))
    for i, module in enumerate(modules):
        assert close([x[i] for x in outputs], module(*inputs))


@pytest.mark.parametrize(("name", "reason"), NOT_RUN.items())
def test_what_cannot_run_says_why(name: str, reason: str) -> None:
    architecture = ARCHITECTURES[name]
    graph = from_module(architecture.module(), architecture.inputs())
    with pytest.raises(ValueError, match=reason):
        graph.run(architecture.inputs())


@pytest.mark.parametrize("name", RUN)
def test_gradients_are_those_of_the_network(name: str) -> None:
    architecture = ARCHITECTURES[name]
    module = architecture.module()
    inputs = tuple(x.requires_grad_() for x in architecture.inputs())
    graph = from_module(module, inputs)
    features = {
        key: graph[key]["x" if isinstance(key, str) else "edge_attr"].requires_grad_()
        for key in (*graph.spec.neuron, *graph.spec.weight)
    }
    run = graph.with_features(features)
    own = sum(x.sin().sum() for x in tensors_in(run.run(inputs)))
    stored = torch.autograd.grad(own, [*features.values(), *inputs], allow_unused=True)
    theirs = sum(x.sin().sum() for x in tensors_in(module(*inputs)))
    for x, gradient in zip(inputs, stored[len(features) :], strict=True):
        assert close(gradient, torch.autograd.grad(theirs, x, retain_graph=True))
    zeros = [
        torch.zeros_like(x) if g is None else g
        for g, x in zip(stored, features.values(), strict=False)
    ]
    found = graph.with_features(dict(zip(features, zeros, strict=True))).to_tensors()
    parameters = dict(module.named_parameters())
    expected = torch.autograd.grad(theirs, list(parameters.values()), allow_unused=True)
    for key, gradient in zip(parameters, expected, strict=True):
        if key in found and gradient is not None:
            assert close(found[key], gradient), key


def test_depths_and_widths_and_kernels_are_mixed() -> None:
    x = torch.randn(5, 3, dtype=torch.float64)
    modules = [mlp(3, 4, 2), mlp(3, 7, 2), mlp(3, 5, 6, 2), mlp(3, 2, 2, 2), mlp(3, 4, 2)]
    outputs = Batch.from_data_list([from_module(m) for m in modules]).run(x)
    assert outputs.shape == (5, 5, 2)
    for output, module in zip(outputs, modules, strict=True):
        assert close(output, module(x))


def test_grown_kernels_are_left_out() -> None:
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    modules = [
        S(nn.Conv2d(3, w, k, padding=p), nn.ReLU(), nn.Conv2d(w, 2, k, 2)).double()
        for w, k, p in ((4, 3, 1), (5, 5, 2), (6, 3, 1))
    ]
    graphs = [from_module(module) for module in modules]
    grow = GrowKernels.to_largest(graphs)
    for graph, module in zip(graphs, modules, strict=True):
        assert close(grow(graph).run(x), module(x))


@pytest.mark.parametrize("transform", [FillBiases(), RoleTypes()])
def test_transformed_graphs_run(transform: Any) -> None:
    x = torch.randn(5, 3, dtype=torch.float64)
    bias = isinstance(transform, RoleTypes)
    module = S(nn.Linear(3, 4, bias), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2)).double()
    assert close(transform(from_module(module)).run(x), module(x))


def test_every_network_may_have_its_own_inputs() -> None:
    modules = [mlp(3, 4, 2), mlp(3, 7, 2), mlp(3, 5, 6, 2), mlp(3, 4, 2)]
    x = torch.randn(4, 5, 3, dtype=torch.float64)
    outputs = Batch.from_data_list([from_module(m) for m in modules]).run(x, per_network=True)
    for output, module, own in zip(outputs, modules, x, strict=True):
        assert close(output, module(own))


def test_activations_lie_at_the_neurons() -> None:
    modules = [mlp(3, 4, 2), mlp(3, 7, 5, 2), mlp(3, 6, 2)]
    x = torch.randn(5, 3, dtype=torch.float64)
    batch = Batch.from_data_list([from_module(m) for m in modules])
    outputs, activations = batch.run(x, return_activations=True)
    assert list(activations) == ["hidden1", "output", "hidden2"]
    for name, rows in activations.items():
        assert rows.shape == (batch[name].x.shape[0], 5)
    first = activations["hidden1"].split([4, 7, 6])
    for rows, module in zip(first, modules, strict=True):
        assert close(rows, module[:2](x).t())
    assert close(activations["hidden2"], modules[1][:4](x).t())
    assert close(activations["output"].reshape(3, 2, 5), outputs.transpose(1, 2))


def test_permuted_networks_have_permuted_activations() -> None:
    module = S(
        nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(20, 6), nn.SiLU(), nn.Linear(6, 3),
    ).double().eval()  # fmt: skip
    x = torch.randn(4, 2, 6, 6, dtype=torch.float64)
    graph = from_module(module, x)
    element = symmetry.sample(graph, "hnp", torch.Generator().manual_seed(3))
    outputs, activations = graph.run(x, return_activations=True)
    permuted, moved = element.apply(graph).run(x, return_activations=True)
    assert close(permuted, outputs)
    changed = 0
    for name in ("hidden1", "hidden2"):
        order = [
            next(j for j in range(len(rows)) if close(rows[j], row, 1e-12))
            for row in moved[name]
            for rows in [activations[name]]
        ]
        assert sorted(order) == list(range(len(order)))
        changed += order != sorted(order)
    assert changed


def test_shared_neurons_do_not_depend_on_the_rest_of_the_batch() -> None:
    x = torch.randn(5, 3, dtype=torch.float64)
    graphs = [from_module(mlp(3, w, w + 1, 2)) for w in (4, 7, 5)]
    whole = Batch.from_data_list(graphs).run(x)
    alone = torch.stack([graph.run(x) for graph in graphs])
    assert close(whole, alone, 1e-12)


def test_a_bare_state_dict_runs_once_its_activation_is_known() -> None:
    module = mlp(3, 4, 5, 2, activation=nn.ReLU)
    x = torch.randn(5, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="activation="):
        from_state_dict(module.state_dict()).run(x)
    assert close(from_state_dict(module.state_dict(), activation="relu").run(x), module(x))
    turned = {k: v.t().contiguous() if v.dim() == 2 else v for k, v in module.state_dict().items()}
    graph = from_state_dict(turned, orientation="in_out", activation="relu")
    assert close(graph.run(x), module(x))
    assert close(from_state_dict(module.state_dict(), arch=module).run(x), module(x))
    prefixed = {f"module.{key}": tensor for key, tensor in module.state_dict().items()}
    assert close(from_state_dict(prefixed, arch=module).run(x), module(x))


def test_an_activation_is_one_that_is_known() -> None:
    with pytest.raises(ValueError, match="such as 'relu'"):
        from_state_dict(mlp(3, 4, 2).state_dict(), activation="rellu")
    convolution = S(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    with pytest.raises(ValueError, match="linear layers and nothing else"):
        from_state_dict(convolution.state_dict(), activation="relu")


def test_a_graph_of_tensors_alone_says_that_it_cannot_run() -> None:
    graph = WeightGraph.from_tensors([torch.randn(4, 3), torch.randn(2, 4)])
    with pytest.raises(ValueError, match="do not say how they are used"):
        graph.run(torch.randn(5, 3))


def test_inputs_of_another_size_are_refused() -> None:
    graph = from_module(mlp(3, 4, 2))
    with pytest.raises(ValueError, match=r"got \[\[5, 4\]\]"):
        graph.run(torch.randn(5, 4))
    with pytest.raises(ValueError, match="inputs"):
        graph.run([torch.randn(5, 3), torch.randn(5, 3)])
    batch = Batch.from_data_list([graph, graph])
    with pytest.raises(ValueError, match=r"\[2, ...\]"):
        batch.run(torch.randn(3, 5, 3), per_network=True)
    mixed = Batch.from_data_list([graph, from_module(mlp(3, 6, 2))])
    with pytest.raises(ValueError, match=r"got \[\[5, 4\]\]"):
        mixed.run(torch.randn(5, 4))


def test_half_precision_is_run_in_single_precision() -> None:
    module = mlp(3, 4, 2)
    graph = from_module(module.bfloat16())
    x = torch.randn(5, 3)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = graph.run(x)
    assert outputs.dtype == torch.float32
    assert close(outputs, module.float()(x), 1e-5)


def test_computations_are_values() -> None:
    one, other = (from_module(mlp(3, w, 2)).layout.computation for w in (4, 7))
    assert one == other
    assert hash(one) == hash(other)
    assert str(one).splitlines()[3:5] == ["%3 = linear(%0, %1, %2)", "%4 = tanh(%3)"]
    assert one != from_module(mlp(3, 4, 2, activation=nn.ReLU)).layout.computation


def test_computations_refer_to_what_came_before() -> None:
    with pytest.raises(ValueError, match="earlier steps"):
        Computation((Step("relu", (Ref(0),)),), (Ref(0),))
    with pytest.raises(ValueError, match="1 steps"):
        Computation((Step("input", (0,)),), (Ref(1),))
    with pytest.raises(ValueError, match="or the reason"):
        Computation()


@pytest.mark.parametrize("name", ["slices", "siren", "cnn with permute and flatten", "depthwise"])
def test_files_keep_the_computation(name: str, tmp_path: Path) -> None:
    architecture = ARCHITECTURES[name]
    module, inputs = architecture.module(), architecture.inputs()
    graph = from_module(module, inputs)
    save(graph, tmp_path / "graph.safetensors", as_graph=True)
    again = load(tmp_path / "graph.safetensors")
    assert again.layout.computation == graph.layout.computation
    assert close(again.run(inputs), module(*inputs))


def test_slices_are_printed_as_slices() -> None:
    step = Step("getitem", (Ref(0), (Range(), Range(1, None, 2), ...)))
    assert str(step) == "getitem(%0, (::, 1::2, ...))"


def one(function: Callable[[Any, Tensor], Any], **modules: nn.Module) -> nn.Module:
    return One(function, **modules).double()


def _reused(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    y = m.relu(h)
    return m.b(y + h)


def _added(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    y = h
    y += 1
    return m.b(h)


def _viewed(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.view(-1).relu_()
    return m.b(h)


@pytest.mark.parametrize("function", [_reused, _added, _viewed])
def test_operations_in_place_change_what_they_are_applied_to(
    function: Callable[[Any, Tensor], Any],
) -> None:
    """They are run as they are, or not at all."""
    module = one(function, a=nn.Linear(3, 4), relu=nn.ReLU(inplace=True), b=nn.Linear(4, 2))
    x = torch.randn(5, 3, dtype=torch.float64)
    graph = from_module(module, x)
    if graph.layout.computation.reason is None:
        assert close(graph.run(x), module(x))
    else:
        assert function is _viewed
        assert "in place" in graph.layout.computation.reason


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda m, x: m.b(F.dropout(m.a(x))), "random"),
        (lambda m, x: m.b(m.a(x).float().double()), "casts"),
        (
            lambda m, x: (
                m.b(torch.special.bessel_j0(m.a(x))) if False else m.b(m.a(x).half().double())
            ),
            "casts",
        ),
    ],
)
def test_what_has_no_words_converts_all_the_same(
    function: Callable[[Any, Tensor], Any], reason: str
) -> None:
    module = one(function, a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    graph = from_module(module)
    with pytest.raises(ValueError, match=reason):
        graph.run(torch.randn(5, 3))
