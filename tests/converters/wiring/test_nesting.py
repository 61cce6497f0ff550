"""Heads and groups: the symmetry of converted networks is complete, and not too large."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from architectures import S
from nested_networks import Attention, CrossCovariance
from permuting import distance, outputs_of
from torch import Tensor, nn

from nfn_graph import Batch, NFLinear, WeightGraph, symmetry
from nfn_graph.converters import ConversionError, draw, from_module, summary, to_module
from nfn_graph.testing import completeness

Build = Callable[[], nn.Module]
COMPLETE: dict[str, tuple[Build, tuple[int, ...], int]] = {
    "attention": (lambda: Attention(4, ends=(1, 1)), (1, 2, 1), 2),
    "rotary": (lambda: Attention(4, time=2, ends=(1, 1)), (1, 2, 1), 1),
    "grouped query": (lambda: Attention(8, 4, ends=(1, 1)), (1, 2, 1), 3),
    "tiled keys": (lambda: Attention(8, 4, copies="tile", ends=(1, 1)), (1, 2, 1), 2),
    "cross-covariance": (lambda: CrossCovariance(4, ends=(1, 1)), (1, 2, 1), 2),
    "multi query": (lambda: Attention(4, shared=1, ends=(1, 1)), (1, 2, 1), 0),
    "grouped convolution": (
        lambda: S(nn.Conv1d(1, 4, 1), nn.Conv1d(4, 4, 1, groups=2), nn.Conv1d(4, 1, 1)),
        (1, 1, 3),
        2,
    ),
    "group norm": (
        lambda: S(nn.Conv1d(1, 4, 1), nn.GroupNorm(2, 4), nn.Conv1d(4, 1, 1)),
        (1, 1, 3),
        1,
    ),
}


@pytest.mark.parametrize(("build", "shape", "nested"), COMPLETE.values(), ids=COMPLETE.keys())
def test_layers_on_converted_networks_are_complete(
    build: Build, shape: tuple[int, ...], nested: int
) -> None:
    """One parameter per orbit, on the spec that the converter made."""
    graph = from_module(build(), torch.randn(shape))
    assert sum(len(n.parents) == 1 for n in graph.spec.neurons) == nested
    folded = graph.spec.fold("hnp")
    layer = NFLinear(folded, 1, 1, bias=False)
    # Two neurons in each layer or parent are enough to tell all orbits apart.
    free = [n.name for n in graph.spec.neurons if not n.fixed and len(n.parents) < 2]
    found = completeness(layer, folded, sizes=dict.fromkeys(free, 2))
    assert sum(p.numel() for p in layer.parameters()) == found.rank == found.orbits


@pytest.mark.parametrize("copies", ["expand", "axis", "flag"])
def test_keys_are_shared_alike_however_it_is_written(copies: str) -> None:
    x = torch.randn(1, 2, 3)
    expected = from_module(Attention(heads=4), x).spec
    assert from_module(Attention(heads=4, copies=copies), x).spec == expected


def changed(module: nn.Module, inputs: Tensor, *rows: tuple[str, int, list[int]]) -> float:
    """Returns the change of the outputs if tensors are indexed in another order along an axis."""
    before = outputs_of(module, (inputs,))
    state = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    for key, axis, order in rows:
        module.state_dict()[key].copy_(state[key].index_select(axis, torch.tensor(order)))
    after = outputs_of(module, (inputs,))
    module.load_state_dict(state)
    return distance(after, before)


def test_what_is_tied_in_attention_is_tied() -> None:
    module, x = Attention().double(), torch.randn(2, 5, 3).double()
    dims = [1, 0, 2, 3, 4, 5, 6, 7]
    heads = [4, 5, 6, 7, 0, 1, 2, 3]
    q, k = ("q.weight", 0, dims), ("k.weight", 0, dims)
    assert changed(module, x, q) > 1e-6
    assert changed(module, x, q, ("q.bias", 0, dims), k) < 1e-12
    v, o = ("v.weight", 0, heads), ("o.weight", 1, heads)
    assert changed(module, x, v, ("v.bias", 0, heads)) > 1e-6
    # Heads of values and outputs are permuted together with those of queries and keys.
    assert changed(module, x, v, ("v.bias", 0, heads), o) > 1e-6
    across = [4, 1, 2, 3, 0, 5, 6, 7]
    both = (("q.weight", 0, across), ("q.bias", 0, across), ("k.weight", 0, across))
    assert changed(module, x, *both) > 1e-6


@pytest.mark.parametrize("middle", [nn.Conv1d(4, 4, 1, groups=2), nn.GroupNorm(2, 4)])
def test_channels_of_different_groups_cannot_be_exchanged(middle: nn.Module) -> None:
    module = S(nn.Conv1d(3, 4, 1), middle, nn.ReLU(), nn.Conv1d(4, 2, 1)).double()
    x = torch.randn(2, 3, 5).double()
    across = [2, 1, 0, 3]
    first = [("0.weight", 0, across), ("0.bias", 0, across)]
    last = [("3.weight", 1, across)]
    own = [] if isinstance(middle, nn.GroupNorm) else [("1.weight", 0, across)]
    own += [("1.bias", 0, across)]
    assert changed(module, x, *first, *own, *last) > 1e-6


def test_mixed_batches_of_transformers_are_their_networks_one_by_one() -> None:
    graphs = [
        from_module(Attention(width, heads, heads).double(), torch.randn(1, 4, 3).double())
        for width, heads in ((8, 2), (12, 3), (8, 4), (6, 1))
        if heads > 1
    ]
    batch = Batch.from_data_list(graphs)
    layer = NFLinear(batch.spec.fold("hnp"), 1, 2).double()
    together = layer(batch.features().fold("hnp")).unfold().to_graph()
    for i, graph in enumerate(graphs):
        alone = layer(graph.features().fold("hnp")).unfold().to_graph()
        for (key, x), (_, y) in zip(
            alone.features().tensors(), together[i].features().tensors(), strict=True
        ):
            assert torch.allclose(x, y, 0, 1e-12), key


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_further_keys_are_refused(option: str) -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 8), nn.MultiheadAttention(8, 2, **{option: True})

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.b(h, h, h)[0]

    with pytest.raises(ConversionError, match=f"{option}|further keys and values"):
        from_module(Network(), torch.randn(2, 5, 3))


def test_groups_that_do_not_fit_are_refused() -> None:
    module = S(nn.Conv1d(3, 12, 1), nn.GroupNorm(2, 12), nn.GroupNorm(3, 12), nn.Conv1d(12, 2, 1))
    with pytest.raises(ConversionError, match=r"2 \(GroupNorm\).*neurons and positions agree"):
        from_module(module, torch.randn(2, 3, 5))


def test_a_nested_layer_with_weights_to_itself_keeps_a_part_of_its_symmetry() -> None:
    """A residual convolution within groups: either groups or channels of all groups are free."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.n = nn.Conv1d(3, 8, 1), nn.GroupNorm(4, 8)
            self.b, self.c = nn.Conv1d(8, 8, 1), nn.Conv1d(8, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            return self.c(x + self.b(self.n(x).relu()))

    graph = from_module(Residual().double(), torch.randn(2, 3, 5).double(), verify=True)
    assert sorted(s[0] for s in graph.layout.shape.sizes) == [2, 3, 4]


def test_tables_and_pictures_show_heads_as_groups() -> None:
    graph = from_module(Attention(), torch.randn(1, 4, 3))
    assert "hidden2 in group1" in str(summary(graph))
    assert "\nin group1" in "".join(text.get_text() for text in draw(graph).axes[0].texts)
    pairs = from_module(Attention(heads=4), torch.randn(1, 4, 3))
    assert "pair1 in group2 x hidden2" in str(summary(pairs))
    grouped = from_module(S(nn.Conv1d(3, 4, 1), nn.Conv1d(4, 6, 2, groups=2), nn.Conv1d(6, 2, 1)))
    assert draw(grouped).axes


class Heads(nn.Module):
    """A value with heads and their dimensions, and a function of it and of a stored tensor."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(3, 12), nn.Linear(12, 2)
        self.stored, self.function = nn.Parameter(torch.randn(shape)), function

    def forward(self, x: Tensor) -> Tensor:
        """The function combines entries of different heads."""
        y = self.function(self.embed(x).unflatten(-1, (3, 4)), self.stored)
        return self.out(y.flatten(2))


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda v, w: (v @ v.transpose(-1, -2)).softmax(-1) @ v * w, (1,)),
        (lambda v, w: (v.unsqueeze(2) + v.unsqueeze(3)).relu().sum(2) * w, (1,)),
        (lambda v, w: v + torch.einsum("gh,bthd->btgd", w, v), (3, 3)),
        (lambda v, w: v * v.argmax(2, keepdim=True) * w, (1,)),
        (lambda v, w: v * w.softmax(0), (3, 4)),
        (lambda v, w: v * (w / w.norm(dim=0, keepdim=True)), (3, 4)),
    ],
    ids=["attention across heads", "pairs of heads", "map of heads", "places", "softmax", "norm"],
)
def test_dimensions_of_heads_that_meet_are_permuted_together(function, shape) -> None:
    torch.manual_seed(0)
    network = Heads(function, *shape).double().eval()
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    _unchanged(network, x)


def _unchanged(network: nn.Module, x: Tensor) -> WeightGraph:
    """Returns the graph of a network that five random elements of its group leave unchanged."""
    graph = from_module(network, x)
    expected = network(x)
    for seed in range(5):
        moved = symmetry.sample(graph, "hnp", torch.Generator().manual_seed(seed)).apply(graph)
        other = to_module(moved, copy.deepcopy(network))
        torch.testing.assert_close(other(x), expected, rtol=1e-9, atol=1e-9)
    return graph


class Square(nn.Module):
    """A function combines heads and dimensions, of which there are equally many."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.out, self.function = nn.Linear(3, 9), nn.Linear(9, 2), function

    def forward(self, x: Tensor) -> Tensor:
        """A function of values with three heads of three dimensions."""
        return self.out(self.function(self.embed(x).unflatten(-1, (3, 3))).flatten(2))


@pytest.mark.parametrize(
    "function",
    [lambda v: v @ v, lambda v: v + v.transpose(-1, -2), lambda v: v @ v @ v.transpose(-1, -2)],
    ids=["product", "sum", "three"],
)
def test_heads_that_meet_dimensions_are_tied_to_them(function: Callable[[Tensor], Tensor]) -> None:
    """A graph cannot represent two axes that are permuted together, so both keep their order."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    graph = _unchanged(Square(function).double(), x)
    assert all(neuron.fixed for neuron in graph.spec.neurons)


@pytest.mark.parametrize("operation", [torch.add, torch.mul], ids=["sum", "product"])
def test_a_stored_tensor_between_heads_and_heads_is_a_self_weight(
    operation: Callable[[Tensor, Tensor], Tensor],
) -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Linear(3, 12), nn.Linear(4, 2)
            self.stored = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            heads = self.embed(x).unflatten(-1, (4, 3))
            scores = operation(heads @ heads.transpose(-1, -2), self.stored)
            return self.out(scores.softmax(-1).sum(-2))

    graph = _unchanged(Scores().double(), torch.randn(2, 5, 3, dtype=torch.float64))
    assert ("group1", "weight", "group1") in graph.spec.weight


def test_what_a_graph_has_no_place_for_is_said_in_the_words_of_the_network() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Linear(3, 12), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            heads = self.embed(x).unflatten(-1, (6, 2))
            one = heads[..., 4, :] * torch.tensor([1.0, 2.0])
            return self.out(heads.select(-1, 0)) * one.sum()

    with pytest.raises(ConversionError, match="splits its layers in several ways"):
        from_module(Cut(), torch.randn(2, 3))


class Copies(nn.Module):
    """Keys that several heads share, and a function of the copies."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.q, self.k, self.out = nn.Linear(3, 12), nn.Linear(3, 6), nn.Linear(12, 2)
        self.function, self.stored = function, nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        """Four heads of queries, two of keys, three dimensions."""
        size, time, _ = x.shape
        q = self.q(x).view(size, time, 4, 3).transpose(1, 2)
        k = self.k(x).view(size, time, 2, 3).transpose(1, 2)
        k = self.function(k[:, :, None].expand(size, 2, 2, time, 3), self.stored)
        k = k.reshape(size, 4, time, 3)
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ k
        return self.out(y.transpose(1, 2).flatten(2))


TWO = torch.tensor([1.0, 2.0], dtype=torch.float64).view(2, 1, 1)


@pytest.mark.parametrize(
    ("function", "shape", "are_copies"),
    [
        (lambda k, w: k, (1,), True),
        (lambda k, w: (k * w).tanh() + k.softmax(2), (1,), True),
        (lambda k, w: k + w, (5, 3), True),
        (lambda k, w: k * TWO, (1,), False),
        (lambda k, w: k * w, (2, 1, 1), False),
        (lambda k, w: k.cumsum(2), (1,), False),
        (lambda k, w: torch.where(TWO > 1, k, k * 2), (1,), False),
        (lambda k, w: torch.einsum("bkgtd,gde->bkgte", k, w), (2, 3, 3), False),
        (lambda k, w: torch.stack([k[:, :, 0], k[:, :, 1] * 2], 2), (1,), False),
        (lambda k, w: F.pad(k[:, :, :1], (0, 0, 0, 0, 0, 1)), (1,), False),
    ],
    ids=[
        "same",
        "pointwise",
        "positions",
        "constant",
        "stored",
        "sum",
        "where",
        "map",
        "stack",
        "pad",
    ],
)
def test_copies_are_in_no_order_until_something_tells_them_apart(
    function: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...], are_copies: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    graph = _unchanged(Copies(function, *shape).double(), x)
    # Heads of queries are nested in those of keys.
    assert any(neuron.name == "group2" for neuron in graph.spec.neurons) == are_copies


def test_copies_along_time_are_told_apart_by_a_recurrence() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.gru = nn.Linear(3, 5), nn.GRU(5, 4, batch_first=True)
            self.out = nn.Linear(12, 2)

        def forward(self, x: Tensor) -> Tensor:
            repeated = self.embed(x).unsqueeze(1).expand(-1, 3, -1)
            return self.out(self.gru(repeated)[0].flatten(1))

    graph = _unchanged(Decoder().double(), torch.randn(2, 3, dtype=torch.float64))
    assert [s[0] for s in graph.layout.shape.sizes] == [3, 5, 4, 2]


class Rows(nn.Module):
    """A stored tensor that is used both as a whole and row by row."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.all, self.some = nn.Linear(3, 6), nn.Linear(12, 2), nn.Linear(4, 2)
        self.weight, self.function = nn.Parameter(torch.randn(12, 6)), function

    def forward(self, x: Tensor) -> Tensor:
        """A function of the modules and of six neurons."""
        return self.function(self, self.embed(x))


@pytest.mark.parametrize(
    ("function", "free"),
    [
        (
            lambda m, u: m.all(F.linear(u, m.weight).relu()) + m.some(F.linear(u, m.weight[:4])),
            [6, 4, 8],
        ),
        (
            lambda m, u: m.some(F.linear(u, m.weight[4:8])) + m.all(F.linear(u, m.weight).relu()),
            [6, 4, 4, 4],
        ),
        (
            # Parts that are added to each other are permuted together.
            lambda m, u: (
                m.all(F.linear(u, m.weight))
                + m.some(F.linear(u, m.weight[:4]) + F.linear(u, m.weight[4:8]))
            ),
            [6, 4, 4],
        ),
    ],
    ids=["first rows", "rows before", "sum of rows"],
)
def test_rows_have_the_neurons_that_they_have_in_the_whole_tensor(
    function: Callable[[nn.Module, Tensor], Tensor], free: list[int]
) -> None:
    x = torch.randn(2, 3, dtype=torch.float64)
    graph = _unchanged(Rows(function).double(), x)
    sizes = zip(graph.spec.neurons, graph.layout.shape.sizes, strict=True)
    assert sorted(size for neuron, (size,) in sizes if not neuron.fixed) == sorted(free)


def test_rows_that_overlap_are_refused() -> None:
    def overlapping(m: nn.Module, u: Tensor) -> Tensor:
        return m.some(F.linear(u, m.weight[2:6])) + m.some(F.linear(u, m.weight[:4]))

    with pytest.raises(ConversionError, match=r"every row of 'weight' to be used in one place"):
        from_module(Rows(overlapping), torch.randn(2, 3))


def test_a_kernel_of_groups_that_is_also_dense_is_refused() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Linear(3, 12), nn.Linear(12, 2)
            self.kernel = nn.Parameter(torch.randn(12, 4, 1))

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x).transpose(1, 2)
            y = F.conv1d(x, self.kernel, groups=3) + F.conv1d(x[:, :4], self.kernel)
            return self.out(y.transpose(1, 2))

    with pytest.raises(ConversionError, match="one way to read 4 neurons"):
        from_module(Shared(), torch.randn(2, 5, 3))
