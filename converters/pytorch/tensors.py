"""The tensors of a module as values of its computation, and modules that wrap another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim.swa_utils import AveragedModel

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.pytorch.handling import CASTS
from nfn_graph.converters.pytorch.targets import operator_name
from nfn_graph.converters.wiring import Value, Wiring

_AROUND = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)


def check_module(module: Any, what: str) -> None:
    """Raises unless a value is a module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"Expected a torch.nn.Module as {what} (got {type(module).__name__})")


def unwrapped_module(module: nn.Module) -> nn.Module:
    """Returns the network inside `torch.compile`, data parallelism or an average, or the module.

    It computes the same as the wrapper, whose state dict has the same tensors under longer keys.
    """
    *_, inner = _layers(module)
    return inner


def unwrap_parts(module: nn.Module) -> None:
    """Replaces wrappers anywhere inside a module by the networks that they wrap."""
    for part in list(module.modules()):
        for name, child in part._modules.items():
            if child is not None:
                part._modules[name] = unwrapped_module(child)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yields a module and what it wraps, from the outside in."""
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
        # A subclass may compute something else.
        if isinstance(module, kind) and type(module).forward is kind.forward:
            return module._modules["module"]
    return None


def _is_compiled(module: nn.Module) -> bool:
    # Compared by name, because importing torch._dynamo takes seconds.
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("torch._dynamo.eval_frame", "OptimizedModule")


#: Functions that create tensors of equal numbers, and functions that never write to their
#: arguments.
_FILLS = frozenset({"zeros", "ones", "full", "new_zeros", "new_ones", "new_full"})
_READERS = frozenset(
    {"add", "sub", "mul", "truediv", "linear", "matmul", "cat", "stack", "where"}
) | {f"{kind}{cell}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for cell in ("", "_cell")}


class StoredTensors:
    """The state dict of a module, by the identity of its tensors.

    A tensor under several keys is one weight. Two tensors in the same memory are refused, because
    loading values into one of them changes the other.

    Args:
        state_dict: The tensors themselves, `module.state_dict(keep_vars=True)`.
        constants: Tensors among them that are not weights and are carried along unchanged.
    """

    def __init__(self, state_dict: Mapping[str, Any], constants: Sequence[Tensor] = ()) -> None:
        self._constants = {id(tensor) for tensor in constants}
        self.tensors = {key: t for key, t in state_dict.items() if isinstance(t, Tensor)}
        for key, tensor in self.tensors.items():
            if nn.parameter.is_lazy(tensor):
                raise ConversionError(
                    f"Expected parameters with a shape (got '{key}' of a lazy module, which has "
                    f"none yet). Run the network once on an input first"
                )
        self.on_meta = any(tensor.is_meta for tensor in self.tensors.values())
        self.keys: dict[int, str] = {}
        tied: dict[str, list[str]] = {}
        for key, tensor in self.tensors.items():
            first = self.keys.setdefault(id(tensor), key)
            if first != key:
                tied.setdefault(first, []).append(key)
        spans = _spans({key: self.tensors[key] for key in self.keys.values()})
        # Carried tensors never change, so other tensors may be parts of them.
        self._spans = {key: span for key, span in spans.items() if self._moves(self.tensors[key])}
        self.wiring = Wiring(self.tensors, tied)

    def fetch(self, tensor: Tensor | None) -> Value | None:
        """Returns a tensor of the module as a weight, or as a constant if it is not stored.
        Integer buffers, such as masks and indices, are constants too and are carried along
        unchanged.
        """
        if tensor is None:
            return None
        key = self.keys.get(id(tensor))
        if key is not None and not self._moves(tensor):
            return replace(self.wiring.constant(tuple(tensor.shape)), key=key)
        if key is not None:
            return self.wiring.parameter(key)
        span = _span(tensor)
        for other, (start, stop) in self._spans.items():
            if span is not None and span[0] < stop and start < span[1]:
                raise ConversionError(
                    f"Expected tensors of the state dict or with their own memory (got one in the "
                    f"memory of '{other}', which changes with it). Use '{other}' itself, or a clone"
                )
        return self.wiring.constant(tuple(tensor.shape))

    def _moves(self, tensor: Tensor) -> bool:
        return is_weight(tensor) and id(tensor) not in self._constants


def is_weight(tensor: Tensor) -> bool:
    """Whether a tensor belongs to the features or must be refused; masks and counts are carried."""
    return tensor.is_floating_point() or tensor.is_complex() or isinstance(tensor, nn.Parameter)


def is_uniform(node: fx.Node, tensor: Tensor | None = None) -> bool:
    """Whether a node creates a tensor of equal numbers to which nothing is written afterwards."""
    if tensor is None:
        is_filled = operator_name(node.target) in _FILLS
    else:
        is_made = str(node.target).startswith("_tensor_constant")
        is_filled = is_made and not tensor.is_meta and len(tensor.unique()) == 1
    return is_filled and _stays(node)


def _stays(node: fx.Node) -> bool:
    """Whether no node may change a tensor, through a view of it or in place."""
    for user in node.users:
        name = operator_name(user.target)
        if name in CASTS or name in ("float", "double", "cpu", "cuda"):
            if not _stays(user):
                return False
        elif name.startswith("_assert"):
            continue
        elif user.op != "output" and user.op != "call_module" and name not in _READERS:
            return False
    return True


def _spans(tensors: dict[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Returns the memory of every tensor, and raises if two overlap."""
    found = {key: span for key, tensor in tensors.items() if (span := _span(tensor))}
    last, end = "", 0
    for key, (start, stop) in sorted(found.items(), key=lambda item: item[1]):
        if start < end:
            raise ConversionError(
                f"Expected parameters with their own memory (got '{last}' and '{key}', which "
                f"share memory without being one parameter). Use one parameter twice, or clone "
                f"one of them"
            )
        last, end = key, stop
    return found


def _span(tensor: Tensor) -> tuple[int, int] | None:
    """Returns the addresses from the first entry to the last; None without memory."""
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return None
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes)
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Runs a block in eval mode and restores all attributes of a module afterwards.

    A network that stores its results in an attribute, a list or a dictionary would otherwise be
    left with symbols instead of tensors, and one that counts its calls with a wrong count.
    """
    saved = [(vars(part), dict(vars(part))) for part in module.modules()]
    held = {
        id(value): (value, type(value)(value))
        for _, before in saved
        for value in before.values()
        if type(value) in (list, dict, set)
    }
    stored = module.state_dict(keep_vars=True).values()
    symbols = {id(t) for t in stored if isinstance(t, Tensor) and is_weight(t)}
    # All other buffers are used with their values and may be changed.
    others = [b for b in module.buffers() if id(b) not in symbols and not b.is_inference()]
    counts = [(buffer, buffer._version, buffer.clone()) for buffer in others]
    module.eval()
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, version, count in counts:
                if buffer._version != version:
                    buffer.copy_(count)
        for attributes, before in saved:
            _refill(attributes, before)
        for value, before in held.values():
            _refill(value, before)


def _refill(container: Any, before: Any) -> None:
    container.clear()
    if isinstance(container, list):
        container.extend(before)
    else:
        container.update(before)


def check_as_written(module: nn.Module) -> None:
    """Refuses a module that does more than its class, because a trace would not see it."""
    before = [
        hook for hook in module._forward_pre_hooks.values() if not isinstance(hook, WeightNorm)
    ]
    if module._forward_hooks or before:
        raise ConversionError(
            f"Expected {type(module).__name__} without forward hooks (got some, whose effect is "
            f"not followed). Remove hooks and parametrisations first"
        )
    if "forward" in vars(module):
        raise ConversionError(
            f"Expected {type(module).__name__} with the forward of its class (got one whose "
            f"forward was replaced). Write a module with this forward instead"
        )


def normed_tensors(module: nn.Module) -> dict[int, tuple[Tensor, Tensor, int]]:
    """Returns the direction, length and axis of each weight of `nn.utils.weight_norm`, by id."""
    return {
        id(vars(module)[hook.name]): (
            getattr(module, f"{hook.name}_v"),
            getattr(module, f"{hook.name}_g"),
            hook.dim,
        )
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, WeightNorm)
    }
