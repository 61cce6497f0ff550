"""Networks inside `torch.compile`, data parallelism or averaging are followed like themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from permuting import free_sizes
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from nfn_graph.converters import ConversionError, from_module, to_module, to_state_dict
from nfn_graph.converters.pytorch import unwrapped_module

S = nn.Sequential

#: Only the backend that compiles nothing is quick.
compiled = partial(torch.compile, backend="eager")

WRAPPERS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "compiled": (compiled, "_orig_mod."),
    "data parallel": (nn.DataParallel, "module."),
    "averaged": (AveragedModel, "module."),
    "compiled and data parallel": (lambda m: nn.DataParallel(compiled(m)), "module._orig_mod."),
}  # fmt: skip
ALL = pytest.mark.parametrize(("wrap", "prefix"), WRAPPERS.values(), ids=WRAPPERS.keys())


def network() -> nn.Sequential:
    """A small network."""
    return S(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


@ALL
@pytest.mark.parametrize("example", [None, torch.randn(2, 3)])
def test_a_wrapped_network_is_the_network(
    wrap: Callable[[nn.Module], nn.Module], prefix: str, example: Tensor | None
) -> None:
    module = network()
    wrapped = wrap(module)
    inner = unwrapped_module(wrapped)
    graph = from_module(wrapped, example, verify=example is not None)
    assert graph.spec == from_module(module).spec
    state_dict = wrapped.state_dict()
    back = to_state_dict(graph)
    assert list(back) == list(state_dict)
    assert all(torch.equal(back[key], state_dict[key]) for key in back)
    assert {f"{prefix}{key}" for key in inner.state_dict()} <= set(back)


@ALL
def test_a_wrapped_network_takes_the_weights_of_a_graph(
    wrap: Callable[[nn.Module], nn.Module], prefix: str
) -> None:
    module, wrapped = network(), wrap(network())
    assert to_module(from_module(module), wrapped) is wrapped
    inner = unwrapped_module(wrapped).state_dict()
    assert all(torch.equal(inner[key], value) for key, value in module.state_dict().items())
    again = to_module(from_module(wrapped), wrap(network()))
    found = again.state_dict()
    assert all(torch.equal(found[key], value) for key, value in wrapped.state_dict().items())


@pytest.mark.parametrize("example", [None, torch.randn(2, 3)])
def test_wrapped_parts_are_followed_and_stay_wrapped(example: Tensor | None) -> None:
    part = S(nn.Linear(8, 8), nn.ReLU())
    module = S(nn.Linear(3, 8), compiled(part), nn.DataParallel(part), nn.Linear(8, 2))
    before = list(module)
    graph = from_module(module, example, verify=example is not None)
    assert free_sizes(graph) == (8,)
    assert all(now is then for now, then in zip(module, before, strict=True))
    assert list(to_state_dict(graph)) == list(module.state_dict())


def test_a_module_that_compiles_itself_is_the_same() -> None:
    module = network()
    module.compile(backend="eager")
    assert from_module(module).spec == from_module(network()).spec


class Doubled(nn.DataParallel):
    """Computes something other than the module inside."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Returns more than the result of the module."""
        return 2 * super().forward(*inputs, **kwargs)


def test_only_known_wrappers_are_taken_off() -> None:
    module, doubled = network(), Doubled(network())
    assert unwrapped_module(module) is module
    assert unwrapped_module(doubled) is doubled


def test_a_hook_of_a_wrapper_is_refused() -> None:
    module = nn.DataParallel(network())
    module.register_forward_hook(lambda m, args, out: out * torch.arange(2))
    with pytest.raises(ConversionError, match=r"DataParallel.*hook"):
        from_module(module)
    with pytest.raises(ConversionError, match=r"DataParallel.*hook"):
        from_module(S(nn.Linear(3, 3), module))
