"""Follows the operations of torch with :class:`~nfn_graph.converters.wiring.Wiring`.

One table serves functions (`torch.relu`, `F.relu`), methods (`x.relu()`) and the operators of
torch.export (`aten.relu`), by their common name. Every handler takes the wiring, then the arguments
of the operation as torch documents them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import reduce
from typing import Any

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.pytorch import products, reshapes, weights
from nfn_graph.converters.pytorch.along_axes import reduction
from nfn_graph.converters.pytorch.handling import (
    CASTS,
    ENTRYWISE,
    HANDLERS,
    QUERIES,
    REDUCTIONS,
    REFUSED,
    WITH_WEIGHT,
    Handler,
    Unknown,
    UnknownShape,
    values_in,
)
from nfn_graph.converters.wiring import Opaque, Value, Wiring
from nfn_graph.converters.wiring.assembly import Use
from nfn_graph.run import leaves

__all__ = ["apply", "products", "reshapes", "weights"]


def apply(w: Wiring, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Applies the operation `name`, and refuses operations that might mix neurons."""
    if "::" not in name:
        name = name.strip("_") if name.startswith("__") else name.rstrip("_")
    values = values_in([*args, *kwargs.values()])
    try:
        result = _apply(w, name, values, args, kwargs)
    except ConversionError:
        raise
    except Exception as error:
        if any(isinstance(leaf, Unknown | UnknownShape) for leaf in leaves([args, kwargs])):
            raise ConversionError(
                f"Expected known sizes as arguments of '{name}' (got some that depend on the "
                f"input). Pass an example_input"
            ) from error
        raise RuntimeError(
            f"This looks like a bug in nfn-graph: '{name}' led to {type(error).__name__}: {error}. "
            f"Please report it with the code of the network"
        ) from error
    if name not in QUERIES and name not in CASTS:
        w.account(values, values_in(result))
    return result


def _apply(
    w: Wiring, name: str, values: Sequence[Value], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    if name.startswith("_assert"):
        return None
    if name in ENTRYWISE:
        return reduce(w.combine, values)
    if name in CASTS:
        return values[0]
    if name == "getattr" and args[1] in HANDLERS and values == [args[0]]:
        name, args = args[1], args[:1]
    if name in QUERIES:
        return _call(QUERIES[name], name, args, kwargs)
    if name in WITH_WEIGHT:
        _check_weight(w, args)
    if all(isinstance(v, Opaque) for v in values) and name not in ("getitem", "cond"):
        return w.opaque(values)
    if name in REFUSED:
        w.refuse(f"Expected an operation that keeps neurons apart (got {name}: {REFUSED[name]})")
    if name in REDUCTIONS:
        return _call(reduction, name, [w, name, *args], kwargs)
    if name not in HANDLERS:
        w.refuse(
            f"Expected an operation whose effect on neurons is known (got '{name}'). Convert "
            f"the parts of the network before and after it separately"
        )
    return _call(HANDLERS[name], name, [w, *args], kwargs)


def _call(handler: Handler, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    try:
        inspect.signature(handler).bind(*args, **kwargs)
    except TypeError as error:
        raise ConversionError(
            f"Expected only known arguments of '{name}' (got others: {error})"
        ) from error
    return handler(*args, **kwargs)


def _check_weight(w: Wiring, args: Sequence[Any]) -> None:
    """Refuses a tensor of the checkpoint that is used as a weight but cannot be one."""
    weight = args[1] if len(args) > 1 else None
    if isinstance(weight, Opaque) and weight.key is not None:
        Use.of(weight.key, w.tensors[weight.key])
        w.refuse(f"Expected a weight of the state dict (got values of '{weight.key}')")
