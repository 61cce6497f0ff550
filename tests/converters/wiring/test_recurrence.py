"""Recurrent networks: their symmetry is real and complete for every file format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from architectures import One, Two
from onnx_models import node, run, weights, write
from torch import Tensor, nn

from nfn_graph import NFLinear, symmetry
from nfn_graph.converters import (
    ConversionError,
    from_module,
    from_state_dict,
    load,
    save,
    to_state_dict,
)
from nfn_graph.converters.io import read_tensors
from nfn_graph.testing import completeness

Case = tuple[Callable[[], nn.Module], tuple[int, ...]]
RNNS = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


def last(after: int = 4, **modules: nn.Module) -> nn.Module:
    """A recurrent network, and a linear layer of its last output."""
    return One(lambda m, x: m.b(m.r(x)[0][:, -1]), b=nn.Linear(after, 2), **modules)


def states(m: nn.Module, x: Tensor) -> Tensor:
    """Some of the last states of all layers and directions."""
    _, (h, c) = m.r(x)
    return m.b(torch.cat([h[-2], h[-1], c[0]], -1))


def from_zeros(m: nn.Module, x: Tensor) -> Tensor:
    """States of zeros for every entry of the batch."""
    zeros = torch.zeros(2, x.size(0), 4, device=x.device).to(x)
    return m.b(m.r(x, (zeros, zeros))[0])


def by_steps(m: nn.Module, x: Tensor) -> Tensor:
    """A cell that runs over time."""
    state = None
    for time in range(x.shape[1]):
        state = m.r(x[:, time], state)
    return m.b(state if isinstance(state, Tensor) else state[0])  # type: ignore[index]


def by_hand(m: nn.Module, x: Tensor) -> Tensor:
    """A GRU without modules of torch, from a state of zeros."""
    h = x.new_zeros(x.shape[0], 4)
    for time in range(x.shape[1]):
        r, z = torch.sigmoid(m.x(x[:, time]) + m.h(h)).chunk(2, -1)
        h = z * h + (1 - z) * torch.tanh(m.n(x[:, time]) + m.r(r * h))
    return m.b(h)


CASES: dict[str, Case] = {
    **{kind: (lambda r=r: last(r=r(3, 4, batch_first=True)), (4,)) for kind, r in RNNS.items()},
    **{
        f"{kind} in layers and directions": (
            lambda r=r: last(8, r=r(3, 4, 2, batch_first=True, bidirectional=True)),
            (4, 4, 4, 4),
        )
        for kind, r in RNNS.items()
    },
    "relu without bias": (
        lambda: last(r=nn.RNN(3, 4, 2, "relu", bias=False, batch_first=True)),
        (4, 4),
    ),
    "projection": (
        lambda: last(r=nn.LSTM(3, 6, 2, proj_size=4, batch_first=True)),
        (6, 4, 6, 4),
    ),
    "two ways projected": (
        lambda: last(8, r=nn.LSTM(3, 5, proj_size=4, bidirectional=True, batch_first=True)),
        (5, 4, 5, 4),
    ),
    "time first": (lambda: One(lambda m, x: m.b(m.r(x)[0]), r=nn.GRU(3, 4), b=nn.Linear(4, 2)),
                   (4,)),
    "states": (
        lambda: One(states, r=nn.LSTM(3, 4, 2, bidirectional=True), b=nn.Linear(12, 2)),
        (4, 4, 4, 4),
    ),
    "states side by side": (
        lambda: One(
            lambda m, x: m.b(m.r(x)[1].permute(1, 0, 2).flatten(1)),
            r=nn.GRU(3, 4, 2), b=nn.Linear(8, 2),
        ),
        (4, 4),
    ),
    "a sequence without a batch": (
        lambda: One(lambda m, x: m.b(m.r(x[0])[1][0]), r=nn.GRU(3, 4), b=nn.Linear(4, 2)),
        (4,),
    ),
    "from zeros": (
        lambda: One(from_zeros, r=nn.LSTM(3, 4, 2, batch_first=True), b=nn.Linear(4, 2)),
        (4, 4),
    ),
    "learned first state": (
        lambda: One(
            lambda m, x: m.b(m.r(x, m.h.expand(-1, 5, -1))[0]),
            r=nn.GRU(3, 4, 2), h=nn.Parameter(torch.rand(2, 1, 4)), b=nn.Linear(4, 2),
        ),
        (4, 4),
    ),
    "a state from one network to the next": (
        lambda: One(
            lambda m, x: m.b(m.s(x, m.r(x)[1])[0]), r=nn.GRU(3, 4), s=nn.GRU(3, 4),
            b=nn.Linear(4, 2),
        ),
        (4,),
    ),
    **{
        f"{kind} cell": (
            lambda cell=cell: One(by_steps, r=cell(3, 4), b=nn.Linear(4, 2)),
            (4,),
        )
        for kind, cell in (("rnn", nn.RNNCell), ("gru", nn.GRUCell), ("lstm", nn.LSTMCell))
    },
    "by hand": (
        lambda: One(
            by_hand, x=nn.Linear(3, 8), h=nn.Linear(4, 8), n=nn.Linear(3, 4), r=nn.Linear(4, 4),
            b=nn.Linear(4, 2),
        ),
        (4,),
    ),
    "after a convolution": (
        lambda: One(
            lambda m, x: m.b(m.r(m.a(x.mT).mT)[0]),
            a=nn.Conv1d(3, 5, 1), r=nn.LSTM(5, 4), b=nn.Linear(4, 2),
        ),
        (5, 4),
    ),
}  # fmt: skip
# torch.fx can follow these without an example; the others look at shapes.
WITHOUT_EXAMPLE = [name for name in CASES if "cell" not in name and name != "by hand"]
X = (2, 5, 3)


@pytest.mark.parametrize("name", CASES)
def test_hidden_neurons_may_be_permuted_and_nothing_else(name: str) -> None:
    torch.manual_seed(0)
    build, free = CASES[name]
    module, x = build().double(), torch.randn(X, dtype=torch.float64)
    graph = from_module(module, x, verify=True)
    sizes = dict(zip(graph.spec.neuron, graph.layout.shape.sizes, strict=True))
    assert tuple(sizes[n.name][0] for n in graph.spec.neurons if not n.fixed) == free
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    back = to_state_dict(graph)
    assert list(back) == list(before)
    assert all(torch.equal(back[key], before[key]) for key in before)
    with torch.no_grad():
        expected = module(x)
        permuted = to_state_dict(symmetry.sample(graph, "hnp").apply(graph))
        module.load_state_dict(permuted)
        assert (module(x) - expected).abs().max() < 1e-9
    assert any(not torch.equal(permuted[key], before[key]) for key in before)


@pytest.mark.parametrize("name", WITHOUT_EXAMPLE)
def test_no_example_is_needed(name: str) -> None:
    module = CASES[name][0]()
    assert from_module(module).spec == from_module(module, torch.randn(X)).spec


@pytest.mark.parametrize("kind", RNNS)
def test_the_recurrent_weight_must_not_be_permuted_at_one_end(kind: str) -> None:
    torch.manual_seed(0)
    module, x = CASES[kind][0]().double(), torch.randn(X, dtype=torch.float64)
    order = torch.tensor([1, 0, 3, 2])
    with torch.no_grad():
        expected = module(x)
        weight = module.r.weight_hh_l0  # type: ignore[union-attr]
        gates = weight.reshape(-1, 4, 4)
        weight.copy_(gates[:, order].reshape(weight.shape))
        assert (module(x) - expected).abs().max() > 1e-4
        weight.copy_(gates[:, :, order].reshape(weight.shape))
        assert (module(x) - expected).abs().max() > 1e-4


@pytest.mark.parametrize("kind", RNNS)
@pytest.mark.parametrize("group", ["np", "hnp"])
def test_the_layer_is_complete(kind: str, group: Any) -> None:
    """Checks networks that the converter made; self weights need four neurons."""
    network = RNNS[kind](2, 4, bias=kind == "rnn", batch_first=True)
    module = One(lambda m, x: m.b(m.r(x)[0]), r=network, b=nn.Linear(4, 2, bias=False))
    folded = from_module(module, torch.randn(1, 3, 2)).spec.fold(group)
    layer = NFLinear(folded, 1, 1, bias=False)
    found = completeness(layer, folded, sizes={"input": 2, "hidden1": 4, "output": 2})
    parameters = sum(p.numel() for p in layer.parameters())
    assert parameters == found.parameters == found.rank == found.orbits


def test_gates_are_taps_and_recurrent_weights_lead_to_their_own_neurons() -> None:
    spec = from_module(last(r=nn.LSTM(3, 4, batch_first=True))).spec
    assert {key: w.taps for key, w in spec.weight.items()} == {
        ("input", "weight", "hidden1"): 4,
        ("hidden1", "weight", "hidden1"): 4,
        ("hidden1", "weight", "output"): 1,
    }
    assert spec.neuron["hidden1"].taps == 8


def test_outputs_and_given_states_keep_their_order() -> None:
    module = nn.Sequential(nn.LSTM(3, 4))
    assert all(n.fixed for n in from_module(module, torch.randn(X)).spec.neurons)
    given = Two(lambda m, x, h: m.b(m.r(x, h)[0]), r=nn.GRU(3, 4), b=nn.Linear(4, 2))
    graph = from_module(given, (torch.randn(X), torch.randn(1, 5, 4)))
    assert all(n.fixed for n in graph.spec.neurons)


def written(m: nn.Module, x: Tensor) -> Tensor:
    """Zeros but for one, written through a view."""
    state = torch.zeros(1, x.size(0), 4)
    state[..., 0].fill_(1.0)
    return m.b(m.r(x, state)[0])


def test_zeros_that_are_written_into_keep_the_order() -> None:
    module = One(written, r=nn.GRU(3, 4, batch_first=True), b=nn.Linear(4, 2))
    graph = from_module(module, torch.randn(X))
    assert all(n.fixed for n in graph.spec.neurons)


def test_packed_sequences_are_refused() -> None:
    def packed(m: nn.Module, x: Tensor) -> Tensor:
        return m.b(m.r(nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 5]), True))[1])

    module = One(packed, r=nn.GRU(3, 4, batch_first=True), b=nn.Linear(4, 2))
    with pytest.raises(ConversionError, match=r"packed one.*padded sequence"):
        from_module(module, torch.randn(X))


@pytest.mark.parametrize("name", WITHOUT_EXAMPLE)
def test_graphs_run(name: str) -> None:
    torch.manual_seed(0)
    module, x = CASES[name][0]().double(), torch.randn(X, dtype=torch.float64)
    graph = from_module(module, x)
    reason = graph.layout.computation.reason
    if name == "from zeros":
        assert reason == "it uses 'getattr', which cannot be run from a graph"
        return
    assert reason is None
    assert (graph.run(x) - module(x)).abs().max() < 1e-10


# -- ONNX -------------------------------------------------------------------------------------

#: The gates of torch in the order of ONNX, and the gates of ONNX in the order of torch.
TO_ONNX = {"LSTM": [0, 3, 1, 2], "GRU": [1, 0, 2], "RNN": [0]}
FROM_ONNX = {"LSTM": [0, 2, 3, 1], "GRU": [1, 0, 2], "RNN": [0]}


def reordered(tensor: Tensor, order: list[int]) -> Tensor:
    """The same tensor with its gates in another order."""
    return torch.cat([tensor.chunk(len(order))[i] for i in order])


def onnx_tensors(module: Any, kind: str) -> dict[str, Tensor]:
    """The tensors of a recurrent network of one layer as ONNX stores them."""
    order = TO_ONNX[kind]
    ends = [""] + ["_reverse"] * module.bidirectional

    def stacked(*names: str) -> Tensor:
        rows = [
            torch.cat([reordered(getattr(module, f"{n}_l0{end}").detach(), order) for n in names])
            for end in ends
        ]
        return torch.stack(rows)

    return {
        "w": stacked("weight_ih"),
        "r": stacked("weight_hh"),
        "b": stacked("bias_ih", "bias_hh"),
    }


def put_onnx(module: Any, tensors: dict[str, Tensor], kind: str) -> None:
    """The reverse."""
    order, size = FROM_ONNX[kind], len(FROM_ONNX[kind]) * module.hidden_size
    for i, end in enumerate([""] + ["_reverse"] * module.bidirectional):
        values = {
            "weight_ih": tensors["w"][i], "weight_hh": tensors["r"][i],
            "bias_ih": tensors["b"][i, :size], "bias_hh": tensors["b"][i, size:],
        }  # fmt: skip
        for name, value in values.items():
            getattr(module, f"{name}_l0{end}").data = reordered(value, order)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_onnx(kind: str, bidirectional: bool, tmp_path: Path) -> None:
    """Both directions lie in one tensor; the outputs of both are joined in the way of exporters."""
    torch.manual_seed(0)
    module = RNNS[kind.lower()](3, 4, bidirectional=bidirectional).double()
    count = 2 if bidirectional else 1
    tensors = {
        **{key: t.float() for key, t in onnx_tensors(module, kind).items()},
        **weights(c=(4 * count, 2)), "s": torch.tensor([0, 0, -1]),
    }  # fmt: skip
    options = {"hidden_size": 4, "direction": "bidirectional" if bidirectional else "forward"}
    if kind == "GRU":
        options["linear_before_reset"] = 1
    nodes = [
        node(kind, "x w r b", "h", **options),
        node("Transpose", "h", "t", perm=[0, 2, 1, 3]),
        node("Reshape", "t s", "f"),
        node("MatMul", "f c", "y"),
    ]
    path = write(tmp_path / "x.onnx", nodes, tensors, (5, 2, 3))
    graph = load(path)
    assert [n.size for n in graph.spec.neurons] == [3, *[None] * count, 2]
    back = to_state_dict(graph)
    assert all(torch.equal(back[key], tensors[key]) for key in tensors)
    permuted = to_state_dict(symmetry.sample(graph, "hnp").apply(graph))
    assert not torch.equal(permuted["r"], tensors["r"])
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    outputs = []
    for values in (back, permuted):
        put_onnx(module, {key: t.double() for key, t in values.items()}, kind)
        outputs.append((module(x)[0] @ values["c"].double()).detach())
    assert (outputs[1] - outputs[0]).abs().max() < 1e-9
    if not bidirectional:
        # ONNX's own evaluator only supports one direction.
        found = run(path, x.float())
        assert (found[0] - outputs[0]).abs().max() < 1e-5


def test_onnx_directions_one_by_one(tmp_path: Path) -> None:
    """Exporters also write slices of the outputs, from initial states of one stored number."""
    module = nn.LSTM(3, 4, bidirectional=True)
    tensors = {
        **onnx_tensors(module, "LSTM"), **weights(c=(8, 2)), "none": torch.tensor(0.0),
        "shape": torch.tensor([2, 2, 4]), "0": torch.tensor([0]), "1": torch.tensor([1]),
        "2": torch.tensor([2]),
    }  # fmt: skip
    nodes = [
        node("Expand", "none shape", "zeros"),
        node("LSTM", "x w r b  zeros zeros", "h", hidden_size=4, direction="bidirectional"),
        node("Slice", "h 0 1 1", "a"),
        node("Slice", "h 1 2 1", "d"),
        node("Squeeze", "a 1", "e"),
        node("Squeeze", "d 1", "f"),
        node("Concat", "e f", "g", axis=2),
        node("MatMul", "g c", "y"),
    ]
    graph = load(write(tmp_path / "x.onnx", nodes, tensors, (5, 2, 3)))
    free = [n.name for n in graph.spec.neurons if not n.fixed]
    assert free == ["hidden1", "hidden2"]
    assert ("hidden2", "weight", "output") in graph.spec.weight


# -- Keras ------------------------------------------------------------------------------------

FROM_KERAS = {"LSTM": [0, 1, 2, 3], "GRU": [1, 0, 2], "SimpleRNN": [0]}


def keras_tensors(kind: str, inputs: int = 3, hidden: int = 4) -> dict[str, Tensor]:
    """Random tensors of a recurrent layer."""
    gates = len(FROM_KERAS[kind]) * hidden
    bias = (2, gates) if kind == "GRU" else (gates,)
    return {
        "kernel": torch.randn(inputs, gates),
        "recurrent_kernel": torch.randn(hidden, gates),
        "bias": torch.randn(bias),
    }


def keras_outputs(kind: str, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
    """Computes the outputs of Keras with a torch network that has its tensors."""
    kernel, recurrent, bias = (tensors[n].double() for n in ("kernel", "recurrent_kernel", "bias"))
    module = RNNS[kind.removeprefix("Simple").lower()](*(kernel.shape[0], recurrent.shape[0]))
    first, second = bias if bias.dim() == 2 else (bias, torch.zeros_like(bias))
    values = (kernel.T, recurrent.T, first, second)
    for name, value in zip(("weight_ih", "weight_hh", "bias_ih", "bias_hh"), values, strict=True):
        getattr(module, f"{name}_l0").data = reordered(value, FROM_KERAS[kind])
    return module(x)[0].detach()


@pytest.mark.parametrize("kind", FROM_KERAS)
@pytest.mark.parametrize("form", ["h5", "keras", "only weights"])
def test_keras(kind: str, form: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = {"r": keras_tensors(kind), "d": {"kernel": torch.randn(4, 2)}}
    config = checkpoints.sequential(
        (kind, "r", {"return_sequences": True}), ("Dense", "d", {"use_bias": False})
    )
    path = tmp_path / ("x.keras" if form == "keras" else "x.h5")
    if form == "keras":
        checkpoints.write_keras_archive(path, layers, config)
    else:
        checkpoints.write_keras(path, layers, config if form == "h5" else None)
    graph = load(path)
    assert [n.size for n in graph.spec.neurons] == [3, None, 2]
    again = tmp_path / f"again{path.suffix}"
    save(graph, again, template=path)
    back = to_state_dict(graph)
    assert all(torch.equal(t, back[key]) for key, t in read_tensors(again).items())
    permuted = to_state_dict(symmetry.sample(graph, "hnp").apply(graph))
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    outputs = []
    for values in (back, permuted):
        dense, *tensors = sorted(values.values(), key=lambda t: t.shape != (4, 2))
        own = dict(zip(layers["r"], tensors, strict=True))
        outputs.append(keras_outputs(kind, own, x) @ dense.double())
        assert torch.equal(own["kernel"], layers["r"]["kernel"]) == (values is back)
    assert (outputs[1] - outputs[0]).abs().max() < 1e-9


def both_ways(mode: str | None, **options: Any) -> dict[str, Any]:
    """The options of a Bidirectional layer."""
    inner = {"class_name": "LSTM", "config": {"name": "lstm", **options}}
    return {"layer": inner, "merge_mode": mode}


@pytest.mark.parametrize(("mode", "free"), [("concat", 2), ("sum", 1), ("ave", 1)])
def test_keras_in_both_directions(mode: str, free: int, tmp_path: Path) -> None:
    one = {
        f"{direction}_lstm/{key}": tensor
        for direction in ("forward", "backward")
        for key, tensor in keras_tensors("LSTM").items()
    }
    layers = {"b": one, "d": {"kernel": torch.randn(8 if mode == "concat" else 4, 2)}}
    config = checkpoints.sequential(
        ("Bidirectional", "b", both_ways(mode)), ("Dense", "d", {"use_bias": False})
    )
    checkpoints.write_keras(tmp_path / "x.h5", layers, config)
    graph = load(tmp_path / "x.h5")
    assert [n.size for n in graph.spec.neurons if not n.fixed] == [None] * free
    back = to_state_dict(graph)
    assert all(
        torch.equal(t, e) for t, e in zip(back.values(), [*one.values(), layers["d"]["kernel"]],
                                          strict=True)
    )  # fmt: skip
    checkpoints.write_keras(tmp_path / "w.h5", layers)
    with pytest.raises(ConversionError, match=r"recurrence over time in two directions"):
        load(tmp_path / "w.h5")


def test_keras_options(tmp_path: Path) -> None:
    """A sequence, its last step, and a dense layer of every step."""
    layers = {
        "a": keras_tensors("LSTM"),
        "t": {"kernel": torch.randn(4, 3)},
        "b": keras_tensors("GRU"),
        "d": {"kernel": torch.randn(4, 2)},
    }
    dense = {"class_name": "Dense", "config": {"name": "inner", "use_bias": False}}
    config = checkpoints.sequential(
        ("LSTM", "a", {"return_sequences": True, "recurrent_activation": "hard_sigmoid"}),
        ("TimeDistributed", "t", {"layer": dense}),
        ("GRU", "b", {"return_sequences": False}),
        ("Dense", "d", {"use_bias": False}),
    )
    checkpoints.write_keras(tmp_path / "x.h5", layers, config)
    graph = load(tmp_path / "x.h5")
    sizes = [n.size for n in graph.spec.neurons]
    assert sizes == [3, None, None, None, 2]
    config["config"]["layers"][0]["config"]["activation"] = "mine"
    checkpoints.write_keras(tmp_path / "y.h5", layers, config)
    with pytest.raises(ConversionError, match=r"'a' \(LSTM\).*'mine', which may do anything"):
        load(tmp_path / "y.h5")


def test_state_dicts_of_recurrent_networks_need_their_network() -> None:
    module = last(r=nn.GRU(3, 4, batch_first=True))
    with pytest.raises(ConversionError, match=r"weight_.h_l0.*not part of a chain.*arch"):
        from_state_dict(module.state_dict())
    assert from_state_dict(module.state_dict(), arch=module).spec == from_module(module).spec
