"""The places of tensors in checkpoints: prefixes, nesting, and entries beside the network."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from comparing import assert_same
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from nfn_graph.converters import (
    ConversionError,
    from_module,
    from_state_dict,
    to_module,
    to_state_dict,
)

S = nn.Sequential


def network() -> nn.Sequential:
    return S(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")  # which needs no compiler


def below(prefix: str, module: nn.Module) -> dict[str, Any]:
    return {prefix + key: tensor for key, tensor in module.state_dict().items()}


def test_an_averaged_model() -> None:
    module = network()
    averaged = AveragedModel(module)
    averaged.update_parameters(module)
    state_dict = averaged.state_dict()
    assert "n_averaged" in state_dict
    graph = from_state_dict(state_dict, arch=module)
    assert graph.spec == from_module(module).spec
    assert_same(to_state_dict(graph), dict(state_dict))
    assert_same(to_module(graph, network()).state_dict(), module.state_dict())
    assert_same(to_module(graph, AveragedModel(network())).state_dict(), dict(state_dict))


@pytest.mark.parametrize(
    "prefix", ["model.", "encoder.", "backbone.", "a.b.c.", "_orig_mod.net.", "model._orig_mod."]
)
@pytest.mark.parametrize("beside", [{}, {"loss.weight": torch.rand(4), "metric.w": torch.eye(2)}])
def test_what_lies_beside_the_network_is_carried(prefix: str, beside: dict[str, Tensor]) -> None:
    """As in the state dict of a LightningModule with a weighted loss."""
    module = network()
    state_dict = {**beside, **below(prefix, module)}
    graph = from_state_dict({"state_dict": state_dict, "epoch": 1}, arch=module)
    assert graph.spec == from_module(module).spec
    assert_same(to_state_dict(graph), state_dict)
    assert_same(to_module(graph, network()).state_dict(), module.state_dict())


def test_wrapped_networks_are_architectures() -> None:
    """The prefix of the checkpoint's keys does not matter."""
    wrappers = {
        "": lambda m: m,
        "_orig_mod.": compiled,
        "module.": nn.DataParallel,
        "module._orig_mod.": lambda m: nn.DataParallel(compiled(m)),
    }
    for prefix in wrappers:
        for wrap in wrappers.values():
            module = network()
            state_dict = below(prefix, module)
            graph = from_state_dict(state_dict, arch=wrap(module))
            assert graph.spec == from_module(module).spec
            assert_same(to_state_dict(graph), state_dict)
            assert_same(to_module(graph, wrap(network())).state_dict(), wrap(module).state_dict())


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_network_with_a_compiled_part(is_compiled: bool) -> None:
    module = network()
    state_dict = module.state_dict()
    arch = S(module[0], compiled(module[1]), module[2], compiled(module[3]))
    if is_compiled:
        state_dict = arch.state_dict()
    for other in (arch, module):
        graph = from_state_dict(state_dict, arch=other)
        assert_same(to_state_dict(graph), dict(state_dict))
        assert_same(to_module(graph, other).state_dict(), other.state_dict())


def test_two_networks_are_not_chosen_from() -> None:
    module = network()
    both = {**below("student.", module), **below("teacher.", network())}
    with pytest.raises(ConversionError, match=r"one .*'student\.' and 'teacher\.'"):
        from_state_dict(both, arch=module)
    with pytest.raises(ConversionError, match=r"one .*'' and 'ema\.'"):
        from_state_dict({**below("", module), **below("ema.", network())}, arch=module)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_unknown_keys_inside_the_network_are_refused(prefix: str) -> None:
    """The checkpoint belongs to another network, with one more layer."""
    module = network()
    state_dict = {**below(prefix, module), f"{prefix}4.weight": torch.randn(2, 2)}
    with pytest.raises(ConversionError, match=r"none of them missing.*unknown \['.*4\.weight'"):
        from_state_dict(state_dict, arch=module)


def test_a_missing_key_is_named_behind_its_prefix() -> None:
    module = network()
    state_dict = {**below("encoder.", module), "loss": torch.rand(3)}
    del state_dict["encoder.3.bias"]
    with pytest.raises(ConversionError, match=r"without \['3\.bias'\]"):
        from_state_dict(state_dict, arch=module)


@pytest.mark.parametrize(
    "places", [["state_dict", "model"], ["checkpoint", "model_state_dict"], ["model", "state_dict"]]
)
def test_a_state_dict_inside_a_checkpoint_inside(places: list[str]) -> None:
    module = network()
    checkpoint: dict[str, Any] = module.state_dict()
    for place in reversed(places):
        checkpoint = {"epoch": 3, place: checkpoint, "optimizer": {"state": {0: torch.ones(2)}}}
    assert_same(to_state_dict(from_state_dict(checkpoint)), module.state_dict())


@pytest.mark.parametrize("inside", [False, True])
def test_arrays_are_tensors(inside: bool) -> None:
    module = network()
    arrays = {key: tensor.numpy() for key, tensor in module.state_dict().items()}
    arrays["0.weight"].setflags(write=False)
    arrays["0.bias"] = arrays["0.bias"].astype(">f4")
    arrays["3.bias"] = arrays["3.bias"][::-1].copy()[::-1]
    graph = from_state_dict({"params": arrays, "rng": np.arange(3)} if inside else arrays)
    assert_same(to_state_dict(graph), module.state_dict())
    assert from_state_dict(arrays, arch=module).spec == graph.spec
    for wrong in (np.array(["a"]), np.array([object()]), np.zeros(6, np.longdouble)):
        with pytest.raises(ConversionError, match=r"'1\.bias'.*type"):
            from_state_dict({**arrays, "1.bias": wrong})


def test_a_checkpoint_inside_itself_has_no_tensors() -> None:
    checkpoint: dict[str, Any] = {"epoch": 1}
    checkpoint["model"] = checkpoint
    with pytest.raises(ConversionError, match="no tensors"):
        from_state_dict(checkpoint)


def test_numbers_of_numpy_are_carried() -> None:
    state_dict = {**network().state_dict(), "rate": np.float64(0.5)}
    assert to_state_dict(from_state_dict(state_dict))["rate"] == 0.5


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.randn(2), torch.randn(3)])
    with pytest.raises(ConversionError, match=r"'0\.weight'.*nested"):
        from_state_dict({**network().state_dict(), "0.weight": nested})


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("with_arch", [False, True])
def test_sparse_and_quantised_tensors_are_refused(with_arch: bool) -> None:
    module = network()
    state_dict = module.state_dict()
    arch = module if with_arch else None
    sparse = {**state_dict, "0.weight": state_dict["0.weight"].to_sparse()}
    with pytest.raises(ConversionError, match=r"'0\.weight'.*torch\.sparse_coo.*to_dense"):
        from_state_dict(sparse, arch=arch)
    quantised = torch.quantize_per_tensor(state_dict["0.weight"], 0.1, 0, torch.qint8)
    with pytest.raises(ConversionError, match=r"'0\.weight'.*torch\.qint8.*dequantize"):
        from_state_dict({**state_dict, "0.weight": quantised}, arch=arch)


def test_values_of_channels() -> None:
    """A weight without a gradient has None; arrays are accepted as values, too."""
    module = network()
    module[3](torch.randn(4, 6)).sum().backward()
    gradients = {key: parameter.grad for key, parameter in module.named_parameters()}
    assert gradients["0.weight"] is None
    mask = np.ones((6, 3), bool)
    graph = from_state_dict(
        module.state_dict(), channels={"grad": gradients, "mask": {"0.weight": mask}}
    )
    assert not graph["input", "weight", "hidden1"].edge_attr[..., 1].any()
    back = to_state_dict(graph, channel="grad")
    assert_same(back, {key: value for key, value in gradients.items() if value is not None})
    assert torch.equal(to_state_dict(graph, channel="mask")["0.weight"], torch.ones(6, 3).bool())
    nothing = from_state_dict(module.state_dict(), channels={"grad": dict.fromkeys(gradients)})
    assert to_state_dict(nothing, channel="grad") == {}
    with pytest.raises(ConversionError, match=r"values of channel 'grad' by key.*list"):
        from_state_dict(module.state_dict(), channels={"grad": [1]})  # type: ignore[dict-item]
    wrong: list[tuple[Any, str]] = [
        ([[1.0]], "list"), (np.array("x"), "type"), (torch.eye(6).to_sparse(), "to_dense")
    ]  # fmt: skip
    for value, reason in wrong:
        with pytest.raises(ConversionError, match=rf"'0\.weight' of channel 'grad'.*{reason}"):
            from_state_dict(module.state_dict(), channels={"grad": {"0.weight": value}})
