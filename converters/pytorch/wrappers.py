"""Modules that only run another one: compiled, spread over devices, or averaged."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.optim.swa_utils import AveragedModel

from nfn_graph.converters.errors import ConversionError

_AROUND = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)


def unwrapped_module(module: nn.Module) -> nn.Module:
    """The network inside `torch.compile`, data parallelism or an average; else the module.

    What it computes is what the wrapper computes; the wrapper's state dict has the same tensors
    under longer keys.
    """
    *_, inner = _layers(module)
    return inner


def unwrap_parts(module: nn.Module) -> None:
    """Puts networks in the place of their wrappers, anywhere inside a module."""
    for part in list(module.modules()):
        for name, child in part._modules.items():
            if child is not None:
                part._modules[name] = unwrapped_module(child)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """A module and what it wraps, from the outside in."""
    yield module
    inside = _inside(module)
    while inside is not None:
        if module._forward_hooks or module._forward_pre_hooks:
            raise ConversionError(
                f"Expected {type(module).__name__} without forward hooks (got some, whose effect "
                f"is not followed). Remove them first"
            )
        yield inside
        module, inside = inside, _inside(inside)


def _inside(module: nn.Module) -> nn.Module | None:
    if _is_compiled(module):
        return module._modules["_orig_mod"]
    for kind in _AROUND:
        # A class derived from it may compute something else.
        if isinstance(module, kind) and type(module).forward is kind.forward:
            return module._modules["module"]
    return None


def _is_compiled(module: nn.Module) -> bool:
    # By its name, since the import of torch._dynamo takes seconds.
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("torch._dynamo.eval_frame", "OptimizedModule")
