"""Norms whose groups the keys leave open: refused behind convolutions, accepted by clear names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nfn_graph.converters import ConversionError, from_module, from_state_dict, to_state_dict

S = nn.Sequential


def convolutions(norm: nn.Module, width: int = 8) -> nn.Sequential:
    return S(nn.Conv2d(2, width, 3), norm, nn.ReLU(), nn.Conv2d(width, 3, 3))


def named(name: str, size: int, convolution: bool = True) -> dict[str, Tensor]:
    """Two layers with a norm of some name between them."""
    kernel = (3, 3) if convolution else ()
    return {
        "first1.weight": torch.randn(size, 2, *kernel),
        f"{name}1.weight": torch.randn(size),
        f"{name}1.bias": torch.randn(size),
        "first2.weight": torch.randn(3, size, *kernel),
    }


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_group_norm_behind_a_convolution_needs_the_network(groups: int) -> None:
    """Its keys and shapes match norms whose channels can be permuted freely."""
    module = convolutions(nn.GroupNorm(groups, 8))
    with pytest.raises(ConversionError, match=r"'1\.weight'.*2 or 4 groups.*LayerNorm.*arch"):
        from_state_dict(module.state_dict())
    graph = from_state_dict(module.state_dict(), arch=module)
    assert graph.spec == from_module(module).spec
    assert ("group1" in graph.spec.neuron) == (groups in (2, 4))


@pytest.mark.parametrize("name", ["norm", "gn", "group_norm", "groupNorm", "layer.", "lnet.norm"])
def test_names_that_leave_the_norm_open(name: str) -> None:
    with pytest.raises(ConversionError, match=r"2, 3, 4 or 6 groups.*as arch"):
        from_state_dict(named(name, 12))


@pytest.mark.parametrize(
    "name",
    ["ln", "layernorm", "layer_norm", "layerNorm", "LayerNorm", "bn", "batchnorm", "batch_norm",
     "instancenorm", "instance_norm", "inst_norm", "in", "net.ln", "bns.", "layer_normalization"],
)  # fmt: skip
def test_names_that_say_the_norm(name: str) -> None:
    state_dict = named(name, 12)
    graph = from_state_dict(state_dict)
    assert graph["hidden1"].x.shape == (12, 2, 1)
    back = to_state_dict(graph)
    assert all(torch.equal(back[key], tensor) for key, tensor in state_dict.items())


@pytest.mark.parametrize("size", [3, 5, 7])
def test_a_prime_number_of_channels_has_no_groups_inside(size: int) -> None:
    """One group for all of them, or one for each: both leave the channels free."""
    assert from_state_dict(named("gn", size))["hidden1"].x.shape == (size, 2, 1)


def test_running_statistics_say_batch_norm() -> None:
    module = convolutions(nn.BatchNorm2d(8))
    assert from_state_dict(module.state_dict()).spec == from_module(module).spec


def test_a_slope_is_no_norm() -> None:
    module = convolutions(nn.PReLU(8))
    assert from_state_dict(module.state_dict()).spec == from_module(module).spec


def test_a_norm_of_the_picture_needs_the_network() -> None:
    module = S(nn.GroupNorm(2, 4), nn.Conv2d(4, 8, 3), nn.Conv2d(8, 2, 3))
    with pytest.raises(ConversionError, match=r"'0\.weight' with 4.*2 groups"):
        from_state_dict(module.state_dict())


def test_behind_a_linear_layer_norms_are_those_of_layers() -> None:
    module = S(nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
    assert from_state_dict(module.state_dict()).spec == from_module(module).spec
    assert from_state_dict(named("norm", 8, convolution=False))
    for name in ("gn", "group_norm", "groupnorm"):
        with pytest.raises(ConversionError, match="2 or 4 groups"):
            from_state_dict(named(name, 8, convolution=False))


def test_behind_a_flatten_norms_are_those_of_layers() -> None:
    module = S(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.LayerNorm(36), nn.Linear(36, 5))
    graph = from_state_dict(module.state_dict(), flatten="channels_first")
    assert graph.spec == from_module(module).spec
    with pytest.raises(ConversionError, match="groups"):
        from_state_dict(module.state_dict(prefix="group_net."), flatten="channels_first")
