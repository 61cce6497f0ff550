"""`WeightGraph.run`: a graph computes the same as its network."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from architectures import ARCHITECTURES, One
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nfn_graph import Batch, WeightGraph, symmetry
from nfn_graph.converters import from_module, from_state_dict, load, save
from nfn_graph.data import Computation, Range, Ref, Step
from nfn_graph.run import OPERATIONS, _plan, _products, _ragged, _run
from nfn_graph.run._plan import Plan
from nfn_graph.run._products import Window, complete_layers, layer_product
from nfn_graph.transforms import FillBiases, GrowKernels, RoleTypes

S = nn.Sequential
# Networks that no graph can run, with the reason.
NOT_RUN = {
    "control flow by shape": "looks at shapes",
    "causal transformer": "uses 'long'",
    "channel shuffle": "ChannelShuffle",
    "grouped-query attention, expand": "looks at shapes",
}
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


def test_depths_and_widths_are_mixed() -> None:
    x = torch.randn(5, 3, dtype=torch.float64)
    modules = [mlp(3, 4, 2), mlp(3, 7, 2), mlp(3, 5, 6, 2), mlp(3, 2, 2, 2), mlp(3, 4, 2)]
    outputs = Batch.from_data_list([from_module(m) for m in modules]).run(x)
    assert outputs.shape == (5, 5, 2)
    for output, module in zip(outputs, modules, strict=True):
        assert close(output, module(x))


def _plain_cnn(width: int) -> nn.Module:
    return S(
        nn.BatchNorm2d(3), nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width), nn.LeakyReLU(0.3),
        nn.Conv2d(width, width + 2, (3, 2), dilation=(1, 2), padding="valid"), nn.PReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear((width + 2) * 4, 2 * width), nn.PReLU(2 * width),
        nn.Linear(2 * width, 4, bias=False),
    )  # fmt: skip


def _pooled_cnn(width: int) -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = F.avg_pool2d(F.pad(torch.sin(3.0 * m.a(x)), (1, 0, 0, 1)), 2)
        x = m.scale * m.b(x) + 0.5 * x
        return m.head(torch.cat([x.mean((2, 3)), x.amax((-2, -1))], 1)).view(x.size(0), -1)

    return One(
        run, a=nn.Conv2d(3, width, 3, padding="same"), b=nn.Conv2d(width, width, 1, bias=False),
        scale=nn.Parameter(torch.randn(width, 1, 1)), head=nn.Linear(2 * width, 4),
    )  # fmt: skip


def _points(width: int) -> nn.Module:
    """A network of signals, with a skip from its input and transposed weights."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = F.gelu(m.a(x)) * m.gain
        y = torch.cat([y, m.b(x), x], 1)
        return m.c(y).mean(-1).squeeze(-1)

    return One(
        run, a=nn.Conv1d(3, width, 3, padding=1), b=nn.Conv1d(3, width + 1, 1),
        c=nn.Conv1d(2 * width + 4, 1, 2, stride=2), gain=nn.Parameter(torch.tensor(1.5)),
    )  # fmt: skip


MIXED = {
    "mlp": (lambda width: mlp(3, width, width + 1, 4), (5, 3)),
    "mlp of tokens": (lambda width: mlp(3, width, width + 1, 4, activation=nn.PReLU), (5, 6, 3)),
    "cnn": (_plain_cnn, (5, 3, 12, 12)),
    "pooled cnn": (_pooled_cnn, (5, 3, 6, 6)),
    "signals": (_points, (5, 3, 8)),
}


@pytest.fixture(params=["as they are", "padded"])
def is_padded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether networks with convolutions are padded with zeros to fewer sizes."""
    chosen: bool = request.param == "padded"
    _choose_padding(monkeypatch, chosen)
    return chosen


def _choose_padding(patch: pytest.MonkeyPatch, is_padded: bool) -> None:
    patch.setattr(_plan, "_MOST_PADDING", math.inf)
    patch.setattr(_run, "_is_worth_padding", lambda task: is_padded)


def mixed(name: str) -> tuple[list[nn.Module], Tensor]:
    build, shape = MIXED[name]
    modules = [build(width).double().eval() for width in (4, 7, 2, 7)]
    for module in modules:
        for tensor in module.state_dict().values():
            if tensor.is_floating_point() and tensor.dim() < 2:
                tensor += 0.2 * torch.rand_like(tensor)
    return modules, torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("per_network", [False, True])
def test_widths_are_mixed_without_a_loop(
    name: str, per_network: bool, is_padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules, x = mixed(name)
    batch = Batch.from_data_list([from_module(module, x) for module in modules])
    x = torch.stack([x, x + 1, x - 1, 2 * x]) if per_network else x
    with monkeypatch.context() as patch:
        patch.setattr(_run, "_run_by_sizes", None)
        outputs, activations = batch.run(x, per_network=per_network, return_activations=True)
    for i, module in enumerate(modules):
        assert close(outputs[i], module(x[i] if per_network else x)), i
    one_by_one = [
        batch[i].run(x[i] if per_network else x, return_activations=True)[1]
        for i in range(len(modules))
    ]
    for key, rows in activations.items():
        assert close(rows, torch.cat([own[key] for own in one_by_one])), key


@pytest.mark.parametrize("name", MIXED)
def test_gradients_of_mixed_widths_are_those_of_the_networks(name: str, is_padded: bool) -> None:
    modules, x = mixed(name)
    x.requires_grad_()
    batch = Batch.from_data_list([from_module(module, x) for module in modules])
    features = {
        key: batch[key]["x" if isinstance(key, str) else "edge_attr"].requires_grad_()
        for key in (*batch.spec.neuron, *batch.spec.weight)
    }
    run = batch.with_features(features)
    own = run.run(x).sin().sum()
    *stored, to_x = torch.autograd.grad(own, [*features.values(), x], allow_unused=True)
    theirs = torch.stack([module(x) for module in modules]).sin().sum()
    assert close(to_x, torch.autograd.grad(theirs, x, retain_graph=True))
    zeros = [
        torch.zeros_like(v) if g is None else g
        for g, v in zip(stored, features.values(), strict=True)
    ]
    found = batch.with_features(dict(zip(features, zeros, strict=True)))
    for i, module in enumerate(modules):
        parameters = dict(module.named_parameters())
        expected = torch.autograd.grad(theirs, list(parameters.values()), retain_graph=True)
        tensors = found[i].to_tensors()
        for key, gradient in zip(parameters, expected, strict=True):
            assert close(tensors[key], gradient), key


@pytest.mark.parametrize("name", ["mlp", "mlp of tokens", "cnn", "signals"])
@pytest.mark.parametrize("per_network", [False, True])
def test_no_inputs_have_no_outputs(name: str, per_network: bool, is_padded: bool) -> None:
    modules, x = mixed(name)
    batch = Batch.from_data_list([from_module(module, x) for module in modules])
    none = x[:0].requires_grad_()
    expected = torch.stack([module(none) for module in modules])
    given = none.expand(len(modules), *none.shape) if per_network else none
    outputs, activations = batch.run(given, per_network=per_network, return_activations=True)
    assert outputs.shape == expected.shape
    for key, rows in activations.items():
        assert rows.shape[:2] == (batch[key].num_nodes, 0), key
    assert torch.autograd.grad(outputs.sum(), none)[0].shape == none.shape
    assert close(batch.run(x), torch.stack([module(x) for module in modules]))


@pytest.mark.parametrize("name", MIXED)
def test_networks_can_be_trained_after_they_ran_in_inference_mode(
    name: str, is_padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_products, "_SHORT_RUN", math.inf)  # Sums over edges need indices, too.
    for cache in (_products._edges, _ragged._turned, _ragged._unpadded):
        cache.cache_clear()
    modules, x = mixed(name)
    batch = Batch.from_data_list([from_module(module, x) for module in modules])
    with torch.inference_mode():
        batch.run(x, return_activations=True)
    expected = torch.stack([module(x) for module in modules])
    x.requires_grad_()
    outputs, activations = batch.run(x, return_activations=True)
    total = outputs.sum() + sum(rows.sum() for rows in activations.values())
    assert torch.autograd.grad(total, x)[0].isfinite().all()
    assert close(outputs, expected)


@pytest.mark.parametrize("name", ["cnn", "pooled cnn"])
def test_networks_are_padded_to_few_sizes(
    name: str, is_padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The networks of the tests above take the path that they are meant to take."""
    modules, x = mixed(name)
    batch = Batch.from_data_list([from_module(module, x) for module in modules])
    batch.run(x)
    (group,) = _plan.plan_of(batch).groups
    # Concatenated neurons would have zeros between them.
    assert (group.padded is not None) == (name == "cnn") and group.is_ragged
    convolutions: list[int] = []
    conv2d = F.conv2d
    monkeypatch.setattr(F, "conv2d", lambda *args: convolutions.append(args[-1]) or conv2d(*args))
    batch.run(x)
    # The widths 2, 4 and twice 7 become 4, 4 with wider layers after it, and 8: two layers each.
    assert convolutions == ([1, 1, 1, 1, 2, 2] if is_padded and name == "cnn" else [])


def test_threads_do_not_wait_for_plans_of_other_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(graph: WeightGraph) -> Plan:
        assert not _plan._lock.locked()
        return Plan(graph)

    monkeypatch.setattr(_plan, "Plan", make)
    graph = from_module(mlp(3, 4, 2))
    assert _plan.plan_of(graph) is _plan.plan_of(graph)


def test_padding_has_to_be_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    modules, _ = mixed("cnn")
    few, many = (torch.randn(n, 3, 12, 12, dtype=torch.float64) for n in (2, 64))
    batch = Batch.from_data_list([from_module(module, few) for module in modules])
    assert _plan.plan_of(batch).groups[0].padded is not None
    padded = []
    ragged = _run._run_ragged
    monkeypatch.setattr(_run, "_run_ragged", lambda *args: padded.append(args[-1]) or ragged(*args))
    for x in (few, many, many.clone().requires_grad_()):
        batch.run(x)
    assert padded == [False, True, False]


def _read_twice(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    return m.b(F.relu(y) + 2 * y)


def _viewed_first(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    flat = y.flatten(2)
    return m.b(F.relu(y)) + flat.mean((1, 2)).reshape(-1, 1, 1, 1)


def _of_the_input(m: Any, x: Tensor) -> Tensor:
    return m.b(F.relu(m.a(F.relu(x)))) + x.mean()


@pytest.mark.parametrize("function", [_read_twice, _viewed_first, _of_the_input])
@pytest.mark.parametrize("activations", [False, True])
def test_nothing_is_overwritten_that_is_read_later(
    function: Callable[[Any, Tensor], Tensor], activations: bool, is_padded: bool
) -> None:
    modules = [
        One(function, a=nn.Conv2d(3, w, 3), b=nn.Conv2d(w, 2, 1)).double() for w in (4, 7, 6)
    ]
    x = torch.randn(5, 3, 6, 6, dtype=torch.float64)
    batch = Batch.from_data_list([from_module(module, x) for module in modules])
    before = x.clone()
    with torch.no_grad():
        found = batch.run(x, return_activations=activations)
        outputs = found[0] if activations else found
        assert close(outputs, torch.stack([module(x) for module in modules]))
    assert torch.equal(x, before)


ALONG_NEURONS: dict[str, Callable[[Tensor], Tensor]] = {
    "a function that is infinite at zero": lambda x: x.abs().log(),
    "a derivative that is infinite at zero": lambda x: x.abs().sqrt(),
    "a division": lambda x: x / x.cos(),
    "a root of sums": lambda x: F.lp_pool2d(x, 2.0, 2),
    "a softmax": lambda x: x.softmax(1),
    "a mean": lambda x: x - x.cos().mean(1, keepdim=True),
    "a concatenation": lambda x: x * torch.cat([x.cos(), x], 1).sum(1, keepdim=True),
    "neurons after positions": lambda x: x.permute(0, 2, 3, 1).flatten(1),
}


@pytest.mark.parametrize("name", ALONG_NEURONS)
def test_neurons_that_were_added_have_no_part_in_results(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing reads them, but they must not be summed or infinite: 0 * inf is NaN."""
    _choose_padding(monkeypatch, True)

    def run(m: Any, x: Tensor) -> Tensor:
        return m.b(ALONG_NEURONS[name](m.a(x))).flatten(1)

    def network(width: int) -> nn.Module:
        is_flat = name == "neurons after positions"
        last = nn.Linear(16 * width, 3) if is_flat else nn.Conv2d(width, 3, 2)
        return One(run, a=nn.Conv2d(2, width, 3), b=last).double()

    x = torch.randn(2, 2, 6, 6, dtype=torch.float64, requires_grad=True)
    modules = [network(width) for width in (13, 14, 15)]
    batch = Batch.from_data_list([from_module(module, x) for module in modules])
    assert _plan.Plan(batch).groups[0].padded is not None
    outputs, expected = batch.run(x), torch.stack([module(x) for module in modules])
    assert close(outputs, expected)
    gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (outputs, expected)]
    assert close(*gradients)


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("short", [0, 10**9])
def test_products_are_differentiable_twice(
    is_shared: bool, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways are used: groups of equal networks, and sums over edges."""
    monkeypatch.setattr(_products, "_SHORT_RUN", short)
    monkeypatch.setattr(_products, "_SHORT_INNER_RUN", short)
    targets, sources = (2, 3, 3, 1), (2, 2, 2, 2) if is_shared else (2, 4, 4, 3)
    layers = complete_layers(targets, sources, is_shared, torch.device("cpu"))
    count = sum(a * b for a, b in zip(targets, sources, strict=True))
    weights = torch.randn(count, dtype=torch.float64, requires_grad=True)
    rows = 2 if is_shared else sum(sources)
    x = torch.randn(rows, 3, dtype=torch.float64, requires_grad=True)
    blocks = [
        w.reshape(t, s)
        for w, t, s in zip(
            weights.split([t * s for t, s in zip(targets, sources, strict=True)]),
            targets,
            sources,
            strict=True,
        )
    ]
    own = [x] * 4 if is_shared else x.split(list(sources))
    expected = torch.cat([w @ v for w, v in zip(blocks, own, strict=True)])
    assert close(layer_product(weights, x, layers), expected, 1e-14)
    assert torch.autograd.gradcheck(lambda w, x: layer_product(w, x, layers), (weights, x))
    assert torch.autograd.gradgradcheck(lambda w, x: layer_product(w, x, layers), (weights, x))


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("most", [1, 100, 10**6])
def test_convolutions_are_differentiable_twice(
    is_shared: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows are unfolded for all networks at once, for one, or for a few of its images."""
    monkeypatch.setattr(_products, "_MOST_COLUMNS", most)
    targets, sources = (2, 2, 1), (2, 2, 2) if is_shared else (1, 1, 2)
    layers = complete_layers(targets, sources, is_shared, torch.device("cpu"))
    window = Window((2, 3), (2, 1), (1, 2), ((1, 0), (2, 1)))
    shapes = [(t, s, 2, 3) for t, s in zip(targets, sources, strict=True)]
    weights = torch.randn(
        sum(torch.Size(shape).numel() for shape in shapes), dtype=torch.float64, requires_grad=True
    )
    rows = 2 if is_shared else sum(sources)
    x = torch.randn(rows, 3, 4, 3, dtype=torch.float64, requires_grad=True)
    blocks = weights.split([torch.Size(shape).numel() for shape in shapes])
    own = [x] * 3 if is_shared else x.split(list(sources))
    expected = [
        F.conv2d(F.pad(v.movedim(-1, 0), (2, 1, 1, 0)), w.reshape(shape), None, (2, 1), 0, (1, 2))
        for v, w, shape in zip(own, blocks, shapes, strict=True)
    ]
    whole = torch.cat([y.movedim(0, -1) for y in expected])
    assert close(layer_product(weights, x, layers, window), whole, 1e-13)
    assert torch.autograd.gradcheck(lambda w, x: layer_product(w, x, layers, window), (weights, x))
    assert torch.autograd.gradgradcheck(
        lambda w, x: layer_product(w, x, layers, window), (weights, x)
    )


def test_runs_are_transformed_by_torch_func() -> None:
    x = torch.randn(3, 3, dtype=torch.float64)
    modules = [mlp(3, 4, 5, 2), mlp(3, 2, 6, 2)]
    batch = Batch.from_data_list([from_module(m) for m in modules])
    rows = torch.func.jacrev(lambda x: batch.run(x))(x)
    expected = [torch.autograd.functional.jacobian(module, x) for module in modules]
    assert close(rows, torch.stack(expected))
    bias = batch["hidden1"].x

    def loss(values: Tensor) -> Tensor:
        tensors = {
            key: batch[key]["x" if isinstance(key, str) else "edge_attr"]
            for key in (*batch.spec.neuron, *batch.spec.weight)
        }
        return batch.with_features(tensors | {"hidden1": values}).run(x).sin().sum()

    plain = bias.detach().clone().requires_grad_()
    assert close(torch.func.grad(loss)(bias), torch.autograd.grad(loss(plain), plain))


class LargestTensor(TorchDispatchMode):
    """Returns the number of entries of the largest tensor that is created."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            # Views of windows have many entries but no memory of their own.
            if isinstance(x, Tensor) and x._base is None and "strided" not in str(func):
                self.entries = max(self.entries, x.numel())
        return out


def test_no_tensor_of_edges_times_inputs_is_made() -> None:
    widths, inputs = (40, 50, 60), 64
    graphs = [from_module(mlp(2, w, w, 1)) for w in widths]
    batch = Batch.from_data_list(graphs)
    edges = sum(w * w for w in widths)
    batch["hidden1"].x.requires_grad_()
    batch["hidden1", "weight", "hidden2"].edge_attr.requires_grad_()
    with LargestTensor() as largest:
        batch.run(torch.randn(inputs, 2, dtype=torch.float64)).sum().backward()
    assert largest.entries <= max(2 * edges, sum(widths) * inputs)


def test_windows_of_convolutions_are_laid_out_for_few_networks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory grows with neurons, positions and inputs, but not with the entries of kernels."""
    monkeypatch.setattr(_products, "_MOST_COLUMNS", 1)
    _choose_padding(monkeypatch, False)
    widths, inputs, positions = [4 + i % 2 for i in range(24)], 2, 36
    modules = [
        S(
            nn.Conv2d(1, w, 3, padding=1), nn.ReLU(), nn.Conv2d(w, w, 3, padding=1), nn.ReLU(),
            nn.Conv2d(w, 1, 1),
        ).double()
        for w in widths
    ]  # fmt: skip
    x = torch.randn(inputs, 1, 6, 6, dtype=torch.float64)
    batch = Batch.from_data_list([from_module(module, x) for module in modules])
    batch["hidden1"].x.requires_grad_()
    with LargestTensor() as largest:
        batch.run(x).sum().backward()
    assert largest.entries <= sum(widths) * inputs * positions


def test_widths_and_depths_and_kernels_are_mixed(is_padded: bool) -> None:
    """In a batch, smaller kernels are padded with zeros; the run leaves these out again."""
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64, requires_grad=True)

    def network(width: int, kernel: int, depth: int) -> nn.Module:
        layers: list[nn.Module] = []
        for inputs in [3, *[width] * (depth - 1)]:
            layers += [nn.Conv2d(inputs, width, kernel, padding=kernel // 2), nn.Tanh()]
        last = nn.Linear(width, 2)
        return S(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), last).double()

    kinds = [(4, 3, 1), (5, 5, 1), (6, 3, 2), (6, 3, 1), (4, 5, 2), (7, 1, 2), (3, 1, 1)]
    modules = [network(*kind) for kind in kinds]
    graphs = [from_module(module) for module in modules]
    grow = GrowKernels.to_largest(graphs)
    batch = Batch.from_data_list([grow(graph) for graph in graphs])
    outputs, expected = batch.run(x), torch.stack([module(x) for module in modules])
    assert close(outputs, expected)
    gradients = [torch.autograd.grad(y.sin().sum(), x)[0] for y in (outputs, expected)]
    assert close(*gradients)


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


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("sin:30", lambda x: torch.sin(30 * x)),
        ("sin", torch.sin),
        ("leaky_relu:0.2", lambda x: F.leaky_relu(x, 0.2)),
        ("elu:0.5", lambda x: F.elu(x, 0.5)),
    ],
)
def test_activations_have_parameters(activation: str, function: Callable[[Tensor], Tensor]) -> None:
    module = mlp(3, 4, 5, 2)
    x = torch.randn(5, 3, dtype=torch.float64)
    expected = module[4](function(module[2](function(module[0](x)))))
    assert close(from_state_dict(module.state_dict(), activation=activation).run(x), expected)


@pytest.mark.parametrize(
    "activation", ["rellu", "add", "sin:x", "sin:nan", "relu:2:3", "relu:1", ""]
)
def test_an_activation_is_one_that_is_known(activation: str) -> None:
    with pytest.raises(ValueError, match="such as 'relu'"):
        from_state_dict(mlp(3, 4, 2).state_dict(), activation=activation)


def test_an_activation_lies_between_linear_layers() -> None:
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
    with pytest.raises(ValueError, match=r": Expected an input of 3 neurons \(got 4\)"):
        mixed.run(torch.randn(5, 4))


def test_outputs_of_different_shapes_are_refused() -> None:
    batch = Batch.from_data_list([from_module(mlp(3, 4, 2)), from_module(mlp(3, 4, 5, 1))])
    with pytest.raises(ValueError, match=r"^Expected outputs of one shape"):
        batch.run(torch.randn(5, 3, dtype=torch.float64))


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


def test_computations_forget_their_hash_on_the_way_to_another_process() -> None:
    computation = from_module(mlp(3, 4, 2)).layout.computation
    hash(computation)
    assert "_hash" not in computation.__getstate__()
    assert "_hash" in vars(computation)


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


def _viewed_twice(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.view(-1).view(2, -1).mul_(2)
    return m.b(h)


def _viewed_before(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    v = h.view(-1, 4)
    h.mul_(2)
    return m.b(v)


VIEWS = (_viewed, _viewed_twice, _viewed_before)


@pytest.mark.parametrize("function", [_reused, _added, *VIEWS])
def test_operations_in_place_change_what_they_are_applied_to(
    function: Callable[[Any, Tensor], Any],
) -> None:
    """They run as they are, or not at all."""
    module = one(function, a=nn.Linear(3, 4), relu=nn.ReLU(inplace=True), b=nn.Linear(4, 2))
    x = torch.randn(4, 3, dtype=torch.float64)
    graph = from_module(module, x)
    if graph.layout.computation.reason is None:
        assert close(graph.run(x), module(x))
    else:
        assert function in VIEWS
        assert "in place" in graph.layout.computation.reason


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda m, x: m.b(F.dropout(m.a(x))), "random"),
        (lambda m, x: m.b(m.a(x).float().double()), "casts"),
        (lambda m, x: m.b(torch.sin(h := m.a(x), out=h)), "into another tensor"),
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


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"mask": True}])
def test_attention_is_that_of_torch(options: dict[str, Any]) -> None:
    """It is written out so that it can be batched and differentiated twice."""
    query, key, value = (
        torch.randn(2, heads, 5, 4, dtype=torch.float64, requires_grad=True) for heads in (6, 3, 3)
    )
    if options.get("mask"):
        options = {"attn_mask": torch.rand(5, 5) > 0.3}
    run = OPERATIONS["scaled_dot_product_attention"]
    expected = F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)
    assert close(
        run(query, key, value, enable_gqa=True, **options).nan_to_num(), expected.nan_to_num()
    )
    assert torch.autograd.gradgradcheck(
        lambda q, k: torch.vmap(run)(q, k, k), (query[:, :3, :2], key[:, :, :2])
    )


ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.SiLU, lambda: nn.LeakyReLU(0.3), nn.GELU)


@st.composite
def random_networks(draw: Any) -> list[nn.Module]:
    """Networks of images that share their kernel sizes and differ in widths, depths and all else.

    To share a batch, layers at the same place must have kernels of one size.
    """
    kernels = [draw(st.tuples(st.integers(1, 3), st.integers(1, 3))) for _ in range(3)]
    biases, norms = [draw(st.booleans()) for _ in range(4)], draw(st.booleans())
    positions = draw(st.integers(1, 2))
    networks: list[nn.Module] = []
    for _ in range(draw(st.integers(1, 3))):
        depth = draw(st.integers(1, 3))
        pool = draw(st.sampled_from([nn.MaxPool2d, nn.AvgPool2d]))
        activation = draw(st.sampled_from(ACTIVATIONS))
        strides = [draw(st.integers(1, 2)) for _ in range(depth)]
        paddings = [draw(st.integers(0, 2)) for _ in range(depth)]
        dilations = [draw(st.integers(1, 2)) if i == 0 else 1 for i in range(depth)]
        # Several of each kind, with different widths.
        for _ in range(draw(st.integers(1, 3))):
            width, layers = 2, []
            for i in range(depth):
                after = draw(st.integers(1, 4))
                layers += [
                    nn.Conv2d(width, after, kernels[i], strides[i], paddings[i] + 1, dilations[i],
                              bias=biases[i]),
                    *([nn.BatchNorm2d(after)] if norms else []), activation(),
                ]  # fmt: skip
                width = after
            layers.append(pool(2, 1, 1))
            layers += [nn.AdaptiveAvgPool2d(positions), nn.Flatten()]
            layers.append(nn.Linear(width * positions**2, 3, bias=biases[3]))
            networks.append(S(*layers).double().eval())
    return networks


@settings(max_examples=25, deadline=None, derandomize=True)
@given(random_networks(), st.booleans(), st.booleans())
def test_random_networks_run_together(
    modules: list[nn.Module], per_network: bool, is_padded: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        _choose_padding(patch, is_padded)
        _check_run_together(modules, per_network)


def _check_run_together(modules: list[nn.Module], per_network: bool) -> None:
    for module in modules:
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor += 0.1 * torch.rand_like(tensor)
    x = torch.randn(len(modules), 2, 2, 6, 6, dtype=torch.float64)
    x = (x if per_network else x[0]).requires_grad_()
    own = x if per_network else x.expand(len(modules), *x.shape)
    graphs = [from_module(module, x[0] if per_network else x) for module in modules]
    expected = torch.stack([module(y) for module, y in zip(modules, own, strict=True)])
    batch = Batch.from_data_list(graphs)
    outputs = batch.run(x, per_network=per_network)
    assert close(outputs, expected)
    assert close(
        torch.autograd.grad(outputs.sin().sum(), x), torch.autograd.grad(expected.sin().sum(), x)
    )
