"""Random networks on the whole way: module, file, graph, batch, model, graph, file, module.

`pytest tests/test_pipeline.py --hypothesis-profile long` tries ten times as many examples.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import checkpoints
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from permuting import distance, free_sizes, moving, outputs_of
from torch import Tensor, nn

from nfn_graph import NFN, Batch, WeightGraph
from nfn_graph.converters import load, save, to_module
from nfn_graph.converters.io import read_tensors

# Every example is a whole pipeline, so there are fewer of them than in other tests.
EXAMPLES = settings(max_examples=settings.default.max_examples // 5)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.GELU, nn.Sigmoid)


class Residual(nn.Module):
    """Blocks `x + up(act(down(x)))` between a first and a last layer."""

    def __init__(self, inputs: int, width: int, inner: list[int], outputs: int, bias: bool) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width, bias)
        self.down = nn.ModuleList(nn.Linear(width, n, bias) for n in inner)
        self.up = nn.ModuleList(nn.Linear(n, width, bias) for n in inner)
        self.last = nn.Linear(width, outputs, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for down, up in zip(self.down, self.up, strict=True):
            x = x + up(torch.tanh(down(x)))
        return self.last(torch.tanh(x))


@dataclass(frozen=True)
class Family:
    """Networks whose graphs share a batch: what they have in common.

    Attributes:
        kind: Kind of the networks.
        inputs: Input neurons or channels.
        outputs: Output neurons.
        bias: Whether all layers but the last have biases.
        norm: Whether norms follow the hidden layers.
        act: The activation.
        kernel: Height and width of convolutions.
        positions: Height and width of what is flattened before the last layer.
    """

    kind: str
    inputs: int
    outputs: int
    bias: bool
    norm: bool
    act: type[nn.Module]
    kernel: tuple[int, int]
    positions: tuple[int, int]

    def member(self, widths: list[int]) -> nn.Module:
        """A network with random weights, of these widths."""
        if self.kind == "residual":
            # A stream of one neuron is equivalent to a number that is added everywhere.
            stream = 1 + widths[0]
            network: nn.Module = Residual(self.inputs, stream, widths[1:], self.outputs, self.bias)
        elif self.kind == "mlp":
            layers: list[nn.Module] = []
            for n, m in pairwise([self.inputs, *widths]):
                layers += [nn.Linear(n, m, self.bias), *self._after(nn.LayerNorm, m)]
            network = nn.Sequential(*layers, nn.Linear((self.inputs, *widths)[-1], self.outputs))
        else:
            layers = []
            for n, m in pairwise([self.inputs, *widths]):
                layers += [nn.Conv2d(n, m, self.kernel, padding=1, bias=self.bias)]
                layers += self._after(nn.BatchNorm2d, m)
            places = self.positions[0] * self.positions[1]
            layers += [nn.AdaptiveAvgPool2d(self.positions), nn.Flatten()]
            network = nn.Sequential(*layers, nn.Linear(widths[-1] * places, self.outputs))
        for tensor in network.state_dict().values():
            # Numbers that use all of their bits; variances stay positive.
            tensor += (0.3 + torch.rand(tensor.shape)).to(tensor.dtype) if tensor.dim() < 2 else 0
        return network.eval()

    def _after(self, norm: Callable[[int], nn.Module], width: int) -> list[nn.Module]:
        return [*([norm(width)] if self.norm else []), self.act()]

    def inputs_of(self, dtype: torch.dtype) -> Tensor:
        """Random inputs."""
        shape = (3, self.inputs) if self.kind != "cnn" else (2, self.inputs, 4, 4)
        return torch.randn(shape).to(dtype)


families = st.builds(
    Family,
    kind=st.sampled_from(["mlp", "cnn", "residual"]),
    inputs=st.integers(1, 4),
    outputs=st.integers(1, 3),
    bias=st.booleans(),
    norm=st.booleans(),
    act=st.sampled_from(ACTIVATIONS),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    positions=st.tuples(st.integers(1, 2), st.integers(1, 2)),
)
widths = st.lists(st.integers(1, 6), min_size=1, max_size=3)


def write_legacy(path: Path, tensors: Mapping[str, Tensor]) -> None:
    torch.save(dict(tensors), path, _use_new_zipfile_serialization=False)


# Files as other programs write them.
WRITERS: dict[str, Callable[[Path, dict[str, Tensor]], None]] = {
    ".pt": lambda path, tensors: torch.save(tensors, path),
    ".pth": write_legacy,
    ".safetensors": checkpoints.write_safetensors,
    ".npz": checkpoints.write_npz,
}


def assert_same_tensors(got: Mapping[str, Any], expected: Mapping[str, Tensor]) -> None:
    """Compares keys, order, shapes, types and bits."""
    assert list(got) == list(expected)
    for key, tensor in expected.items():
        assert (got[key].shape, got[key].dtype) == (tensor.shape, tensor.dtype), key
        assert torch.equal(bits(got[key]), bits(tensor)), key


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def load_into(module: nn.Module, path: Path) -> nn.Module:
    other = copy.deepcopy(module)
    for tensor in other.state_dict().values():
        tensor.zero_()
    other.load_state_dict(dict(read_tensors(path)))
    return other


@EXAMPLES
@given(
    family=families,
    widths=widths,
    dtype=st.sampled_from(DTYPES),
    first=st.sampled_from(sorted(WRITERS)),
    second=st.sampled_from(sorted(WRITERS)),
)
def test_there_and_back_without_a_model(
    family: Family, widths: list[int], dtype: torch.dtype, first: str, second: str
) -> None:
    """Every bit of every tensor is kept through any two formats, and so are the outputs."""
    if dtype == torch.bfloat16 and first == ".npz":
        first = ".pt"  # NumPy has no such type, so no program writes it.
    module = family.member(widths).to(dtype)
    inputs = family.inputs_of(dtype)
    expected = {key: x.clone() for key, x in module.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        path, again = Path(folder, f"a{first}"), Path(folder, f"b{second}")
        WRITERS[first](path, expected)
        meta = copy.deepcopy(module).to("meta")
        graph = load(path, arch=meta, example_input=inputs.to("meta"))
        save(graph, again)
        if first == ".safetensors":  # That library sorts the keys.
            assert sorted(read_tensors(again)) == sorted(expected)
            expected = {key: expected[key] for key in read_tensors(again)}
        assert_same_tensors(read_tensors(again), expected)
        back = load_into(module, again)
    assert torch.equal(bits(back(inputs)), bits(module(inputs)))


@EXAMPLES
@given(data=st.data(), family=families, symmetry=st.sampled_from(["np", "hnp"]))
def test_there_and_back_through_a_model(data: st.DataObject, family: Family, symmetry: Any) -> None:
    """In a batch of different widths, each is edited as if alone, whatever the order of neurons."""
    first = data.draw(widths)
    shape = st.lists(st.integers(1, 6), min_size=len(first), max_size=len(first))
    # With types by depth, MLPs of other depths share the batch, too.
    is_mixed = family.kind == "mlp" and symmetry == "np"
    members = [first, *data.draw(st.lists(widths if is_mixed else shape, min_size=1, max_size=3))]
    modules = [family.member(m).double() for m in members]
    inputs = family.inputs_of(torch.float64)
    with tempfile.TemporaryDirectory() as folder:
        graphs = [through_a_file(Path(folder), module, inputs) for module in modules]
        batch = Batch.from_data_list(graphs)
        model = NFN(batch.spec, (3, 1), symmetry, edit_scale=0.01, act="Tanh").double()
        with torch.no_grad():
            edited = model(batch).to_graph()
            for i, (module, graph) in enumerate(zip(modules, graphs, strict=True)):
                alone = model(graph).to_graph()
                assert_close(edited[i], alone)
                result = written(Path(folder), edited[i], module)
                assert distance(outputs_of(result, (inputs,)), outputs_of(module, (inputs,))) > 0
                if not any(n > 1 for n in free_sizes(graph)):
                    continue
                # The same network with its neurons in another order is edited to the same.
                shuffled = to_module(moving(graph).apply(graph), copy.deepcopy(module))
                other = model(through_a_file(Path(folder), shuffled, inputs)).to_graph()
                moved = written(Path(folder), other, module)
                actual, wanted = (outputs_of(m, (inputs,)) for m in (moved, result))
                assert distance(actual, wanted) <= 1e-9
            # A model that changes nothing returns every bit.
            model.edit_scale.zero_()
            unchanged = model(batch).to_graph()
            for i, module in enumerate(modules):
                result = written(Path(folder), unchanged[i], module)
                assert_same_tensors(result.state_dict(), module.state_dict())


def through_a_file(folder: Path, module: nn.Module, inputs: Tensor) -> WeightGraph:
    torch.save(module.state_dict(), folder / "in.pt")
    meta = copy.deepcopy(module).to("meta")
    return load(folder / "in.pt", arch=meta, example_input=inputs.to("meta"))


def written(folder: Path, graph: WeightGraph, module: nn.Module) -> nn.Module:
    """Converts a graph through a file into a network; only weights are changed."""
    save(graph, folder / "out.safetensors")
    tensors, before = read_tensors(folder / "out.safetensors"), module.state_dict()
    assert list(tensors) == list(before)
    for key, tensor in before.items():
        if not tensor.is_floating_point():
            assert torch.equal(tensors[key], tensor), key
    return load_into(module, folder / "out.safetensors")


def assert_close(got: WeightGraph, expected: WeightGraph) -> None:
    assert got.layout == expected.layout
    tensors = got.to_tensors()
    for key, tensor in expected.to_tensors().items():
        torch.testing.assert_close(tensors[key], tensor, rtol=0, atol=1e-10)


@EXAMPLES
@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=5),
    suffix=st.sampled_from([".onnx", ".h5"]),
)
def test_formats_with_a_template(sizes: list[int], suffix: str) -> None:
    """In ONNX and Keras files, a copy gets other weights, and the original ones are restored."""
    model = checkpoints.mlp(sizes)
    with tempfile.TemporaryDirectory() as folder:
        path, again = Path(folder, f"a{suffix}"), Path(folder, f"b{suffix}")
        if suffix == ".onnx":
            path.write_bytes(checkpoints.onnx_mlp(model).SerializeToString())
        else:
            checkpoints.write_keras(path, checkpoints.keras_mlp(model))
        graph = load(path)
        save(graph, again, template=path)
        assert_same_tensors(read_tensors(again), read_tensors(path))
        doubled = (graph.features() * 2).to_graph()
        save(doubled, again, template=path)
        for key, tensor in read_tensors(path).items():
            assert torch.equal(read_tensors(again)[key], 2 * tensor), key
