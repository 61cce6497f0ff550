"""Identifies where the functions of a traced computation come from.

torch's own functions are known by their short names, and other functions only by their full names,
under which users have registered them.
"""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload, OpOverloadPacket

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.pytorch.handling import HANDLERS

_PACKAGES = frozenset({"torch", "operator", "_operator", "math", "builtins"})
_NAMESPACES = frozenset({"aten", "prim", "prims"})

#: Operators of aten whose arguments or results differ from those of torch's functions.
_OTHERWISE = {"batch_norm", "instance_norm", "embedding"} | {
    f"adaptive_max_pool{n}d" for n in (1, 2, 3)
}


class ForeignFunctionError(ConversionError):
    """Raised if a computation calls a function of another package, whose effect is not known."""


def is_torch(target: Any) -> bool:
    """Whether a function returns tensors, rather than Python numbers."""
    return isinstance(target, str | OpOverload | OpOverloadPacket) or _origin(target) == "torch"


def is_known(target: Any) -> bool:
    """Whether a function belongs to torch or Python, or its effect was registered."""
    if full_name(target) in HANDLERS:
        return True
    if isinstance(target, OpOverload | OpOverloadPacket):
        return _qualified(target).split("::")[0] in _NAMESPACES
    return isinstance(target, str) or _origin(target) in _PACKAGES


def check_known(target: Any) -> None:
    """Refuses functions of other packages, whatever their names."""
    if not is_known(target):
        raise ForeignFunctionError(
            f"Expected functions of torch (got {full_name(target)}, whose effect on neurons is "
            f"not known). Register it with @nfn_graph.converters.handles('{full_name(target)}')"
        )


def full_name(target: Any) -> str:
    """Returns a function's name with that of its module or namespace."""
    if isinstance(target, OpOverload | OpOverloadPacket):
        return _qualified(target)
    return f"{getattr(target, '__module__', '?')}.{function_name(target)}"


def function_name(target: Any) -> str:
    """Returns the name of a method or function."""
    return str(target if isinstance(target, str) else getattr(target, "__name__", target))


def operator_name(target: Any) -> str:
    """Returns the name under which a function, a method or an operator of aten is handled."""
    if full_name(target) in HANDLERS:
        return full_name(target)
    if not isinstance(target, OpOverload | OpOverloadPacket):
        return function_name(target)
    name = _qualified(target).split("::")[-1]
    return f"aten.{name}" if name in _OTHERWISE else name


def _qualified(target: OpOverload | OpOverloadPacket) -> str:
    return target._schema.name if isinstance(target, OpOverload) else target._qualified_op_name


def _origin(target: Any) -> str:
    """Returns the package that a function belongs to."""
    return str(getattr(target, "__module__", None) or "").split(".")[0]
