"""What the handlers of torch's operations share: names, their table, arguments, unknown sizes.

Operations have the names that are common to all dialects of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.wiring import Opaque, Signal, Value, Weight

_ENTRYWISE = """
    relu relu6 leaky_relu elu selu celu gelu silu mish softplus softsign sigmoid logsigmoid
    log_sigmoid hardtanh hardswish hardsigmoid hardshrink softshrink tanhshrink threshold
    rrelu tanh sin cos tan sinh cosh asin acos atan atan2 asinh acosh atanh sinc erf erfc
    exp exp2 expm1 log log1p log2 log10 sqrt rsqrt square abs neg sign sgn reciprocal floor
    ceil round trunc frac clamp clip clamp_min clamp_max pow float_power add iadd radd sub
    isub rsub mul imul rmul multiply subtract div divide truediv itruediv rtruediv
    true_divide floordiv floor_divide mod fmod remainder maximum minimum fmax fmin hypot
    lerp addcmul addcdiv where masked_fill eq ne lt le gt ge logical_and logical_or
    logical_not and or invert isnan isinf isfinite nan_to_num heaviside logit xlogy
    special_expit positive pos dropout alpha_dropout feature_dropout feature_alpha_dropout
    dropout1d dropout2d dropout3d clone contiguous detach detach_copy alias
    lift_fresh_copy float double half bfloat16 cpu cuda requires_grad zeros_like ones_like
    full_like rand_like randn_like empty_like bernoulli identity copysign expand_as
"""

_REDUCTIONS = """
    mean sum prod amax amin norm vector_norm linalg_norm linalg_vector_norm
    var std logsumexp any all nanmean nansum count_nonzero
"""

#: Entrywise functions of any number of operands, all of which are tied. Dropout does nothing in
#: eval mode; copies keep entries.
ENTRYWISE = frozenset(_ENTRYWISE.split())

#: Casts. Their other arguments are only types and devices.
CASTS = frozenset({"to", "_to_copy", "type", "type_as"})

#: Symmetric functions that drop the axes along which they run.
REDUCTIONS = frozenset(_REDUCTIONS.split())

#: Linear maps whose second argument is always a weight.
WITH_WEIGHT = frozenset(
    {
        "linear",
        "convolution",
        *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)),
    }
)

#: Operations that have no graph, with the reason.
REFUSED = {
    "bilinear": "a bilinear map has neurons on three axes of its weight",
    "local_response_norm": "it mixes neighbouring channels, so their order matters",
    "unfold": "its entries move to other axes; use nn.Unfold, or a convolution of the same patches",
    "cond": "data-dependent control flow has no fixed wiring",
    "item": "the computation depends on the values of a tensor",
    "_local_scalar_dense": "the computation depends on the values of a tensor",
}


Handler = Callable[..., Any]
HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Registers the decorated function as the handler of an operation.

    The handler takes the :class:`~nfn_graph.converters.wiring.Wiring` and then the arguments of the
    operation. It calls methods of the wiring that describe the effect of the operation on neurons.

    Args:
        names: The names of the operation: short names for torch's own operations, such as `"relu"`;
            full names for others, `"namespace::name"` for `torch.ops.namespace.name` and
            `"package.function"` for functions that torch.fx does not trace into.

    Example:
        >>> import torch
        >>> from nfn_graph.converters import from_module, handles
        >>> @torch.library.custom_op("readme::scaled_relu", mutates_args=())
        ... def scaled_relu(x: torch.Tensor, scale: float) -> torch.Tensor:
        ...     return x.relu() * scale
        >>> @handles("readme::scaled_relu")
        ... def _scaled_relu(wiring, x, scale):
        ...     return wiring.pointwise(x)
        >>> class Network(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.first, self.last = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)
        ...
        ...     def forward(self, x):
        ...         return self.last(scaled_relu(self.first(x), 2.0))
        >>> from_module(Network())["hidden1"].x.shape
        torch.Size([4, 1, 1])
    """

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


def values_in(args: Any) -> list[Value]:
    """Returns the tensors among arguments, including those in lists."""
    if isinstance(args, Signal | Opaque | Weight):
        return [args]
    if isinstance(args, dict):
        args = list(args.values())
    if is_record(type(args)) and is_dataclass(args):
        args = [getattr(args, f.name) for f in fields(args)]
    if isinstance(args, list | tuple):
        return [v for arg in args for v in values_in(arg)]
    return []


def is_record(kind: type) -> bool:
    """Whether a class is a named tuple or a dataclass, in which networks return several values."""
    return is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def ints(dims: Any) -> list[int]:
    """Returns one axis, or several, as a list."""
    return [dims] if isinstance(dims, int) else list(dims)


def flat(dims: Sequence[Any]) -> list[Any]:
    """Returns arguments that may be given one by one or as one list."""
    return list(dims[0]) if len(dims) == 1 and isinstance(dims[0], list | tuple) else list(dims)


def sizes_in(shape: Sequence[Any]) -> list[int | None]:
    """Returns the sizes of a reshape, with None for unknown ones."""
    return [None if isinstance(n, Unknown) else n for n in flat(shape)]


class Unknown:
    """A size that depends on inputs that were not given."""


UNKNOWN = Unknown()


def _known(size: int | None) -> Any:
    return UNKNOWN if size is None else size


def _size(input: Value, dim: int | None = None) -> Any:
    return _shape(input) if dim is None else _shape(input)[dim]


def _shape(input: Value) -> Any:
    shape = input.shape
    if shape is None:
        return UnknownShape()
    if isinstance(input, Signal) and input.guessed:
        return UnknownShape(shape)
    return tuple(map(_known, shape))


class UnknownShape:
    """A shape with an unknown number of axes, of which the last ones may be known."""

    def __init__(self, last: Sequence[int | None] = ()) -> None:
        self.last = last

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self if index.stop is None and index.step is None else UnknownShape()
        is_last = isinstance(index, int) and -len(self.last) <= index < 0
        return _known(self.last[index]) if is_last else UNKNOWN


def _rank(input: Value) -> Any:
    shape = _shape(input)
    return UNKNOWN if isinstance(shape, UnknownShape) else len(shape)


def _getattr(input: Any, name: str) -> Any:
    if is_record(type(input)) and not isinstance(input, Signal | Opaque | Weight):
        return getattr(input, name)
    if name == "shape":
        return _size(input)
    if name == "ndim":
        return _rank(input)
    if name in ("device", "dtype", "is_cuda", "requires_grad", "layout"):
        return None
    if name in ("data", "real"):
        return input
    if name in ("values", "indices") and isinstance(input, Opaque):
        return input
    raise ConversionError(f"Expected a known attribute of a tensor (got '{name}')")


QUERIES: dict[str, Handler] = {
    "size": _size,
    "sym_size": _size,
    "dim": _rank,
    "ndimension": _rank,
    "getattr": _getattr,
    "numel": lambda input: UNKNOWN,
    "is_floating_point": lambda input: True,
}
