"""Canonical forms keep the function and agree for symmetric networks; others are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nfn_graph import Batch, WeightGraph, symmetry
from nfn_graph.converters import from_module
from nfn_graph.transforms import CanonicalForm, CanonicalPhases, GrowKernels, ScaleByFanIn


def graph_of(module: nn.Module, *inputs: Tensor) -> WeightGraph:
    """A network in float64 with random statistics of its norm layers."""
    module = module.double().eval()
    for tensor in module.state_dict().values():
        if tensor.is_floating_point():
            tensor.normal_().abs_() if tensor.min() == tensor.max() == 1 else tensor.normal_()
    return from_module(module, *inputs)


def difference(first: WeightGraph, second: WeightGraph, x: Tensor) -> float:
    """Returns the relative difference between the outputs of two networks."""
    before, after = first.run(x), second.run(x)
    return float((before - after).abs().max() / before.abs().max())


def distance(first: WeightGraph, second: WeightGraph) -> float:
    pairs = zip(first.to_tensors().values(), second.to_tensors().values(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(3.0 * x)


class Residual(nn.Module):
    """Convolutions, batch norm, a learned slope, a stream with a weight to itself, a flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.own, self.slope = nn.Conv2d(4, 4, 3, padding=1), nn.PReLU(4)
        self.up, self.down = nn.Conv2d(4, 7, 1), nn.Conv2d(7, 4, 1)
        self.second, self.head = nn.Conv2d(4, 6, 3), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = x + self.slope(self.own(x))
        x = x + self.down(F.leaky_relu(self.up(x)))
        x = F.max_pool2d(F.relu(self.second(x)), 2)
        return self.head(x.flatten(1))


class ByHand(nn.Module):
    """Products written out, with the positions of images last in the flattened axis."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 5, 2)
        self.weight = nn.Parameter(torch.randn(10, 3))
        self.bias = nn.Parameter(torch.randn(3))
        self.out = nn.Parameter(torch.randn(1, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(x)).transpose(1, 2)
        x = torch.tanh(x.reshape(x.size(0), -1) @ self.weight + self.bias)
        return x @ self.out.T


def mlp(*widths: int, act: Callable[[], nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.Conv2d(4, 5, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(5, 3),
    )


IMAGE = torch.randn(2, 1, 6, 6, generator=torch.Generator().manual_seed(0)).double()
POINTS = torch.randn(7, 3, generator=torch.Generator().manual_seed(1)).double()
ROWS = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(2)).double()
NORMED = lambda: nn.Sequential(  # noqa: E731
    nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4), nn.LayerNorm(4), nn.Tanh(),
    nn.Linear(4, 2),
)  # fmt: skip
NETWORKS = {
    "relu": (
        lambda: mlp(3, 5, 4, 2, act=nn.ReLU),
        POINTS,
        {"hidden1": "scale", "hidden2": "scale"},
    ),
    "tanh": (lambda: mlp(3, 5, 4, 2, act=nn.Tanh), POINTS, {"hidden1": "sign", "hidden2": "sign"}),
    "hardtanh": (lambda: mlp(3, 5, 2, act=nn.Hardtanh), POINTS, {"hidden1": "sign"}),
    "sine": (lambda: mlp(3, 5, 4, 2, act=Sine), POINTS, {"hidden1": "phase", "hidden2": "phase"}),
    "cnn": (cnn, IMAGE, {"hidden1": "scale", "hidden2": "scale"}),
    "norms": (NORMED, POINTS, {"hidden1": "scale", "hidden2": "sign"}),
    "residual": (Residual, IMAGE, {"hidden1": "scale", "hidden2": "scale", "hidden3": "scale"}),
    "by hand": (ByHand, ROWS, {"hidden1": "sign", "hidden2": "sign"}),
}


def random_twin(graph: WeightGraph, seed: int) -> WeightGraph:
    """Returns a network that computes the same, with every neuron rescaled at random."""
    generator = torch.Generator().manual_seed(seed)
    canonical = CanonicalForm()
    moved = canonical.moved(graph)
    for name, own in moved.items():
        count = len(own.incoming)
        sign = torch.randint(0, 2, (count,), generator=generator).double() * 2 - 1
        factor = torch.exp(torch.randn(count, generator=generator).double())
        incoming = factor if own.kind == "scale" else sign
        moved[name] = type(own)(own.kind, incoming, 1 / incoming, torch.zeros(count).double())
    return canonical.undo(graph, moved)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_function_stays_and_twins_meet(name: str) -> None:
    make, x, kinds = NETWORKS[name]
    torch.manual_seed(0)
    graph = graph_of(make(), x)
    canonical = CanonicalForm()
    form, moved = canonical(graph), canonical.moved(graph)
    assert {n: m.kind for n, m in moved.items()} == kinds
    assert difference(graph, form, x) < 1e-9
    assert distance(graph, form) > 0.1
    assert distance(canonical(form), form) < 1e-9
    assert distance(canonical.undo(form, moved), graph) < 1e-9
    twin = random_twin(graph, 1)
    assert difference(graph, twin, x) < 1e-9
    assert distance(graph, twin) > 0.1
    assert distance(canonical(twin), form) < 1e-9


@pytest.mark.parametrize("name", NETWORKS)
def test_permutations_pass_through(name: str) -> None:
    make, x, _ = NETWORKS[name]
    graph = graph_of(make(), x)
    permutation = symmetry.sample(graph, "hnp", generator=torch.Generator().manual_seed(3))
    canonical = CanonicalForm()
    first, second = canonical(permutation.apply(graph)), permutation.apply(canonical(graph))
    assert distance(first, second) < 1e-9


def test_incoming_weights_have_norm_one() -> None:
    graph = CanonicalForm()(graph_of(mlp(3, 5, 4, 2, act=nn.ReLU)))
    tensors = graph.to_tensors()
    for i in (0, 2):
        rows = torch.cat([tensors[f"{i}.weight"], tensors[f"{i}.bias"][:, None]], 1)
        torch.testing.assert_close(rows.norm(dim=1), torch.ones(len(rows)).double())


def test_biases_behind_odd_functions_are_not_negative_and_phases_within_a_quarter() -> None:
    form = CanonicalForm()(graph_of(mlp(3, 5, 4, 2, act=nn.Tanh)))
    assert min(form[name].x.min() for name in ("hidden1", "hidden2")) >= 0
    form = CanonicalForm()(graph_of(mlp(3, 5, 4, 2, act=Sine)))
    for name in ("hidden1", "hidden2"):
        assert form[name].x.min() >= 0 and form[name].x.max() * 3 <= math.pi / 2


def test_without_biases_the_sum_of_the_weights_decides() -> None:
    module = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Tanh(), nn.Linear(5, 2))
    form = CanonicalForm()(graph_of(module))
    assert form.to_tensors()["0.weight"].sum(1).min() >= 0


def test_dead_neurons_stay() -> None:
    module = mlp(3, 4, 2, act=nn.ReLU).double()
    with torch.no_grad():
        module[0].weight[1] = 0
        module[0].bias[1] = 0
    graph = from_module(module)
    form = CanonicalForm()(graph)
    assert form.to_tensors()["2.weight"][:, 1].equal(graph.to_tensors()["2.weight"][:, 1])
    assert all(x.isfinite().all() for x in form.to_tensors().values())


def test_kernels_that_were_grown() -> None:
    graph = GrowKernels((5, 5))(graph_of(cnn(), IMAGE))
    form = CanonicalForm()(graph)
    assert difference(graph, form, IMAGE) < 1e-9 and distance(graph, form) > 0.1


def test_batches_of_other_widths() -> None:
    graphs = [graph_of(mlp(3, n, n + 1, 2, act=nn.ReLU)) for n in (4, 6, 3)]
    batch = CanonicalForm()(Batch.from_data_list(graphs))
    for i, graph in enumerate(graphs):
        assert distance(batch[i], CanonicalForm()(graph)) < 1e-12
    mixed = Batch.from_data_list([graphs[0], graph_of(mlp(3, 4, 5, 2, act=nn.Tanh))])
    with pytest.raises(ValueError, match="with one computation"):
        CanonicalForm()(mixed)


class Concatenated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(3, 5), nn.Linear(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.cat([F.relu(self.a(x)), F.relu(self.b(x))], 1))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.relu(self.a(x)) * torch.tanh(self.b(x)))


class Returned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.a(x))
        return self.c(x), x.sum(-1)


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.relu(self.a(x)) + 1)


@pytest.mark.parametrize(
    ("module", "x", "reason"),
    [
        (mlp(3, 4, 2, act=nn.GELU), POINTS, "gelu is not known to be"),
        (mlp(3, 4, 2, act=nn.Sigmoid), POINTS, "sigmoid is not known to be"),
        (mlp(3, 4, 2, act=nn.ReLU6), POINTS, "relu6 is not known to be"),
        (nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4, elementwise_affine=False), nn.ReLU(),
                       nn.Linear(4, 2)), POINTS, "depends on the scale"),
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(),
                       nn.Linear(16, 2)), IMAGE, "maximum"),
        (Concatenated(), POINTS, "several types|laid out|not known"),
        (Gated(), POINTS, "tanh is not known|relu is not known"),
        (Returned(), POINTS, "summed up"),
        (Shifted(), POINTS, "added to values"),
    ],
    ids=["gelu", "sigmoid", "relu6", "layer norm", "max of signs", "concatenation", "gate",
         "returned", "shifted"],
)  # fmt: skip
def test_refused_with_the_reason(module: nn.Module, x: Tensor, reason: str) -> None:
    graph = graph_of(module, x)
    with pytest.raises(ValueError, match=reason):
        CanonicalForm()(graph)
    assert set(CanonicalForm().reasons(graph)) == {
        n.name for n in graph.spec.neurons if not n.fixed
    }


def test_some_types_stay_and_chosen_ones_must_not() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 2))
    graph = graph_of(module)
    form = CanonicalForm()(graph)
    assert difference(graph, form, POINTS) < 1e-9
    assert list(CanonicalForm().moved(graph)) == ["hidden1"]
    assert list(CanonicalForm().reasons(graph)) == ["hidden2"]
    assert (
        CanonicalForm(["hidden1"])(graph)
        .to_tensors()["2.weight"]
        .equal(form.to_tensors()["2.weight"])
    )
    with pytest.raises(ValueError, match="'hidden2': gelu"):
        CanonicalForm(["hidden1", "hidden2"])(graph)
    with pytest.raises(ValueError, match="not known"):
        CanonicalForm()(WeightGraph.from_tensors([torch.ones(3, 2), torch.ones(1, 3)]))
    with pytest.raises(TypeError, match="WeightGraph"):
        CanonicalForm()(torch.ones(2))


class SineAndMore(nn.Module):
    """Neurons whose sums are read beside the sine, which allows no shift."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 2)
        self.c = nn.Linear(3, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        sines = torch.sin(3.0 * self.a(x))
        if self.kind == "twice":
            return self.b(sines + self.a(x))
        return self.b(sines + self.c(x))


@pytest.mark.parametrize("kind", ["twice", "beside"])
def test_sines_beside_other_sums_keep_their_phase(kind: str) -> None:
    """A layer that is called again, or another one added behind the sine, may change signs only."""
    torch.manual_seed(0)
    graph = graph_of(SineAndMore(kind), POINTS)
    form = CanonicalForm()(graph)
    assert difference(graph, form, POINTS) < 1e-9
    assert {n: m.kind for n, m in CanonicalForm().moved(graph).items()} == {"hidden1": "sign"}


def test_phases_by_hand_are_refused_where_the_record_says_otherwise() -> None:
    """ReLU and tanh have no phases, and sines have those of their recorded frequency."""
    sines, wide = (graph_of(mlp(3, n, 4, 2, act=Sine)) for n in (5, 6))
    form = CanonicalPhases(3.0)(sines)
    assert difference(sines, form, POINTS) < 1e-9
    batch = CanonicalPhases(torch.tensor([3.0, 3.0]))(Batch.from_data_list([sines, wide]))
    assert distance(batch[0], form) < 1e-12
    for w0 in (30.0, torch.tensor([30.0])):
        with pytest.raises(ValueError, match=r"w0 of 3 for .hidden1., as recorded .got 30"):
            CanonicalPhases(w0)(sines)
    with pytest.raises(ValueError, match=r"w0 of 3 for .hidden1., as recorded .got 30"):
        CanonicalPhases(torch.tensor([3.0, 30.0]))(Batch.from_data_list([sines, wide]))
    for act in (nn.ReLU, nn.Tanh):
        with pytest.raises(ValueError, match=r"sines behind .hidden1.*CanonicalForm"):
            CanonicalPhases(3.0)(graph_of(mlp(3, 5, 2, act=act)))


def test_phases_behind_scaled_weights() -> None:
    """The computation divides what the transform multiplied, and the phase is still known."""
    torch.manual_seed(0)
    graph = ScaleByFanIn()(graph_of(mlp(3, 5, 4, 2, act=Sine)))
    form = CanonicalForm()(graph)
    assert difference(graph, form, POINTS) < 1e-9
    assert {m.kind for m in CanonicalForm().moved(graph).values()} == {"phase"}


ACTIVATIONS = {"relu": nn.ReLU, "leaky": nn.LeakyReLU, "tanh": nn.Tanh, "softsign": nn.Softsign,
               "sine": Sine}  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.sampled_from(sorted(ACTIVATIONS)), st.booleans(),
                       st.booleans()), min_size=1, max_size=4),
    st.integers(0, 10**6),
)  # fmt: skip
def test_any_network(layers: list[tuple[int, str, bool, bool]], seed: int) -> None:
    """Random widths, functions, biases and norms."""
    torch.manual_seed(seed)
    modules: list[nn.Module] = []
    width = 3
    for out, name, bias, norm in layers:
        modules += [nn.Linear(width, out, bias=bias), *([nn.BatchNorm1d(out)] if norm else [])]
        modules.append(ACTIVATIONS[name]())
        width = out
    graph = graph_of(nn.Sequential(*modules, nn.Linear(width, 2)))
    canonical = CanonicalForm()
    form = canonical(graph)
    assert difference(graph, form, POINTS) < 1e-9
    assert distance(canonical(form), form) < 1e-9
    assert distance(canonical(random_twin(graph, seed)), form) < 1e-8
    assert len(canonical.moved(graph)) == len(layers)
