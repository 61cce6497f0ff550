"""The evaluation of a computation on networks of different widths at once, by message passing.

The activations of all networks are concatenated, with one row per neuron. Functions of single
neurons act on the rows; a linear map or a convolution is a product over the edges.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from nfn_graph.data import Computation, Ref
from nfn_graph.messages import UserError
from nfn_graph.run._evaluation import carried_out
from nfn_graph.run._operations import ENTRYWISE, OPERATIONS, leaves
from nfn_graph.run._products import Layers, Window, complete_layers, layer_product

#: Operations whose results share no memory with their operands.
_FRESH = ("linear", "conv1d", "conv2d", "conv3d", "batch_norm")
#: Functions of single entries that are finite at zero and have finite derivatives there.
_FINITE_AT_ZERO = """
    relu selu sigmoid tanh sin cos atan asinh erf square abs neg positive detach relu6 leaky_relu
    elu celu gelu silu mish softplus softsign logsigmoid hardtanh hardswish hardsigmoid add sub mul
    multiply subtract
"""
_KEEPS_FINITE = frozenset(_FINITE_AT_ZERO.split())

#: The shape of a tensor in every network.
Shapes = tuple[tuple[int, ...], ...]


class NotRaggedError(Exception):
    """An operation that is supported only for networks of equal sizes."""


#: A size that differs between networks.
_OPEN_SIZE = object()


@dataclass(frozen=True)
class Same:
    """Values that have the same shape in all networks.

    Args:
        data: `[networks, *shape]`, or `[1, *shape]` if all networks share the value.
    """

    data: Tensor

    @property
    def rank(self) -> int:
        """The number of axes of the value in one network."""
        return self.data.dim() - 1


@dataclass(frozen=True)
class NeuronRows:
    """Values with an axis of neurons, whose number differs between networks.

    Args:
        data: `[neurons of all networks, *other axes]`.
        at: The axis of the neurons in a network.
        counts: The number of neurons of every network.
        own: The number of neurons of every network before padding; these neurons come first.
    """

    data: Tensor
    at: int
    counts: tuple[int, ...]
    own: tuple[int, ...]

    @property
    def rank(self) -> int:
        """The number of axes of the value in one network."""
        return self.data.dim()

    def along(self, axis: int) -> int:
        """The axis of `data` for an axis of a network other than that of the neurons."""
        return axis + (axis < self.at)

    @property
    def is_padded(self) -> bool:
        """Whether some of the neurons were added by padding; no others read these."""
        return self.own != self.counts

    def without_padding(self) -> Tensor:
        """The rows of the original neurons."""
        if not self.is_padded:
            return self.data
        return self.data.index_select(0, _unpadded(self.counts, self.own, self.data.device))


@dataclass(frozen=True)
class Stored:
    """A tensor of all networks, whose shapes may differ.

    Args:
        data: The entries of the tensors of all networks, in one row.
        shapes: The shape of the tensor of every network.
        own: The shapes before padding with zeros.
    """

    data: Tensor
    shapes: Shapes
    own: Shapes

    @property
    def rank(self) -> int:
        """The number of axes of the value in one network."""
        return len(self.shapes[0])

    @property
    def is_padded(self) -> bool:
        """Whether some of the tensors were padded with zeros."""
        return self.own != self.shapes

    def sizes(self, axis: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The sizes along an axis, and those before padding."""
        sizes = tuple(shape[axis] for shape in self.shapes)
        return sizes, tuple(shape[axis] for shape in self.own) if self.is_padded else sizes

    def split(self, counts: Sequence[int]) -> list[Stored]:
        """Splits the tensor by networks into parts with these numbers of networks."""
        if len(counts) == 1:
            return [self]
        cuts = list(itertools.pairwise(accumulate(counts, initial=0)))
        sizes = [sum(map(math.prod, self.shapes[a:b])) for a, b in cuts]
        return [
            Stored(data, self.shapes[a:b], self.own[a:b])
            for data, (a, b) in zip(self.data.split(sizes), cuts, strict=True)
        ]


Value = Same | NeuronRows | Stored
_Handler = Callable[..., Value | None]


def evaluate_ragged(
    computation: Computation,
    tensors: Mapping[int, Stored],
    inputs: Sequence[Tensor],
    wanted: Sequence[Ref],
) -> list[Any]:
    """Computes the results of steps for networks that differ in width; None for unwanted ones.

    Args:
        computation: The steps to carry out.
        tensors: The tensors of the networks by number.
        inputs: The inputs, `[networks, ...]`, or `[1, ...]` if all networks share them.
        wanted: The results to keep.
    """
    overwriting = frozenset() if torch.is_grad_enabled() else _overwriting(computation)

    def apply(number: int, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if number in overwriting and isinstance(args[0], NeuronRows):
            return replace(args[0], data=args[0].data.relu_())
        return _apply(computation.steps[number].operation, args, kwargs)

    return carried_out(
        computation,
        tensors,
        [Same(x) for x in inputs],
        lambda value: Same(inputs[0].new_tensor(value).unsqueeze(0)),
        apply,
        {ref.step for ref in wanted},
    )


@lru_cache(maxsize=64)
def _overwriting(computation: Computation) -> frozenset[int]:
    """The steps that may overwrite their only operand because no other step reads it."""
    steps = computation.steps
    named = [*computation.outputs, *(neurons.value for neurons in computation.activations)]
    uses = Counter(ref.step for ref in (*named, *(r for step in steps for r in step.operands)))
    return frozenset(
        number
        for number, step in enumerate(steps)
        if step.operation == "relu"
        and step.args
        and all(
            uses[ref.step] == 1 and steps[ref.step].operation in _FRESH for ref in step.operands
        )
    )


def as_same(value: Any) -> Any:
    """Converts a value in any arrangement to one with the same shape in all networks."""
    if not isinstance(value, NeuronRows | Stored):
        return value
    sizes = value.counts if isinstance(value, NeuronRows) else value.shapes
    if value.is_padded or len(set(sizes)) > 1:
        raise NotRaggedError
    if isinstance(value, Stored):
        return Same(value.data.reshape(len(sizes), *value.shapes[0]))
    data = value.data.reshape(len(sizes), value.counts[0], *value.data.shape[1:])
    return Same(data.movedim(1, value.at + 1))


def as_rows(value: Value, axis: int, num_networks: int) -> NeuronRows:
    """Converts a value to rows along an axis; a shared value is repeated."""
    at = axis % value.rank
    if isinstance(value, NeuronRows):
        if value.at != at:
            raise NotRaggedError
        return value
    same = as_same(value).data
    rows = same.expand(num_networks, *same.shape[1:]).movedim(at + 1, 1)
    counts = (rows.shape[1],) * num_networks
    return NeuronRows(rows.flatten(0, 1), at, counts, counts)


def _apply(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if name in ("shape", "size", "dim") and isinstance(args[0], NeuronRows | Same):
        return _sizes(name, *args)
    given = leaves([args, kwargs])
    if any(leaf is _OPEN_SIZE for leaf in given):
        raise NotRaggedError
    values = [v for v in given if isinstance(v, Value)]
    if not values:
        return OPERATIONS[name](*args, **kwargs)
    found = None
    if name in _HANDLERS:
        found = _HANDLERS[name](*args, **kwargs)
    elif name in ENTRYWISE and not all(isinstance(v, Same) for v in values):
        if name not in _KEEPS_FINITE and any(
            isinstance(v, NeuronRows) and v.is_padded for v in values
        ):
            raise NotRaggedError
        found = _entrywise(ENTRYWISE[name], args, kwargs)
    return _equal_sizes(OPERATIONS[name], args, kwargs) if found is None else found


def _equal_sizes(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Applies any operation whose operands have the same shape in all networks."""
    flat, structure = tree_flatten((args, kwargs))
    flat = [as_same(leaf) for leaf in flat]
    count = max(leaf.data.shape[0] for leaf in flat if isinstance(leaf, Same))

    def one(*flat: Any) -> Any:
        args, kwargs = tree_unflatten(flat, structure)
        return function(*args, **kwargs)

    dims = tuple(0 if isinstance(leaf, Same) else None for leaf in flat)
    data = [
        leaf.data.expand(count, *leaf.data.shape[1:]) if isinstance(leaf, Same) else leaf
        for leaf in flat
    ]
    result: Any = torch.vmap(one, dims)(*data)
    if isinstance(result, Tensor):
        return Same(result)
    return tuple(Same(item) for item in result)


def _entrywise(
    function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]
) -> NeuronRows | Stored:
    if any(isinstance(v, Value) for v in kwargs.values()):
        raise NotRaggedError
    rows = [arg for arg in args if isinstance(arg, NeuronRows)]
    stored = [arg for arg in args if isinstance(arg, Stored)]
    if not rows:
        if len(stored) > 1 or stored[0].is_padded or any(isinstance(arg, Same) for arg in args):
            raise NotRaggedError
        flat = [arg.data if isinstance(arg, Stored) else arg for arg in args]
        return replace(stored[0], data=function(*flat, **kwargs))
    rank = max(arg.rank for arg in args if isinstance(arg, Value))
    behind = {arg.at - arg.rank for arg in rows}
    counts = {(arg.counts, arg.own) for arg in rows}
    if len(behind) > 1 or len(counts) > 1:
        raise NotRaggedError
    axis = behind.pop()
    count, own = counts.pop()
    aligned = [_aligned(arg, rank, axis, count) if isinstance(arg, Value) else arg for arg in args]
    return NeuronRows(function(*aligned, **kwargs), rank + axis, count, own)


def _aligned(value: Value, rank: int, axis: int, counts: tuple[int, ...]) -> Tensor:
    """Converts a value to `[rows or 1, *other axes]`, which broadcasts with such rows."""
    if isinstance(value, NeuronRows):
        data = value.data
    elif isinstance(value, Stored) and value.rank >= -axis:
        if any(shape[axis] != n for shape, n in zip(value.shapes, counts, strict=True)):
            data = _repeated(as_same(value), axis, counts)
        else:
            others = {(*shape[:axis], 1, *shape[axis:][1:]) for shape in value.shapes}
            if len(others) > 1 or any(n != 1 for n in next(iter(others))[:axis]):
                raise NotRaggedError
            sizes = next(iter(others))
            at = len(sizes) + axis
            data = value.data.reshape(sum(counts), *sizes[:at], *sizes[at + 1 :])
    else:
        data = _repeated(as_same(value), axis, counts)
    missing = rank - data.dim()
    return data.reshape(data.shape[0], *[1] * missing, *data.shape[1:])


def _repeated(value: Same, axis: int, counts: tuple[int, ...]) -> Tensor:
    """Repeats values without neurons, or with the same number in all networks, for every row."""
    data = value.data
    if value.rank >= -axis:
        if data.shape[axis] != 1:
            if set(counts) != {data.shape[axis]}:
                raise NotRaggedError
            return data.expand(len(counts), *data.shape[1:]).movedim(axis, 1).flatten(0, 1)
        data = data.squeeze(axis)
    if data.shape[0] == 1:
        return data
    network = torch.repeat_interleave(torch.tensor(counts), output_size=sum(counts))
    return data.index_select(0, network.to(data.device))


def _sizes(name: str, x: NeuronRows | Same, axis: int | None = None) -> Any:
    if name == "dim":
        return x.rank
    sizes: list[Any] = list(x.data.shape[1:])
    if isinstance(x, NeuronRows):
        sizes.insert(x.at, x.own[0] if len(set(x.own)) == 1 else _OPEN_SIZE)
    return tuple(sizes) if axis is None else sizes[axis]


def _linear(x: Value, weight: Any, bias: Any = None) -> Value | None:
    if not isinstance(weight, Stored) or weight.rank != 2:
        return None
    inputs, layers = _sources(x, -1, weight)
    y = layer_product(weight.data, inputs.data.flatten(1), layers)
    y = y.reshape(len(y), *inputs.data.shape[1:])
    result = NeuronRows(y, inputs.rank - 1, *weight.sizes(0))
    return result if bias is None else _with_vector(torch.add, result, bias, -1)


def _sources(x: Value, axis: int, weight: Stored) -> tuple[NeuronRows, Layers]:
    """The rows that a layer reads, and the layer."""
    targets, sources = (tuple(shape[axis] for shape in weight.shapes) for axis in (0, 1))
    is_shared = isinstance(x, Same) and x.data.shape[0] == 1
    rows = as_rows(x, axis, 1 if is_shared else len(sources))
    counts = rows.counts * len(sources) if is_shared else rows.counts
    if sources != counts:
        expected, got = next((a, b) for a, b in zip(sources, counts, strict=True) if a != b)
        raise UserError(f"Expected an input of {expected} neurons (got {got})")
    return rows, complete_layers(targets, sources, is_shared, weight.data.device)


def _with_vector(
    function: Callable[..., Tensor], x: NeuronRows, vector: Value, axis: int
) -> NeuronRows:
    """Applies an entrywise operation with a vector along the neurons."""
    if vector.rank != 1 or x.at != axis % x.rank:
        raise NotRaggedError
    column = _aligned(vector, 1, -1, x.counts)
    return replace(x, data=function(x.data, column.reshape(-1, *[1] * (x.rank - 1))))


def _convolution(spatial: int) -> _Handler:
    def apply(
        x: Value,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Value | None:
        if not isinstance(weight, Stored) or groups != 1 or x.rank != spatial + 2:
            return None
        kernels = {shape[2:] for shape in weight.shapes}
        if len(kernels) > 1:
            raise NotRaggedError
        inputs, layers = _sources(x, 1, weight)
        if len(set(weight.shapes)) == 1 and (bias is None or isinstance(bias, Stored)):
            # Torch's own convolution runs the networks side by side without copying windows.
            y = getattr(F, f"conv{spatial}d")(
                inputs.data.transpose(0, 1),
                weight.data.reshape(-1, *weight.shapes[0][1:]),
                None if bias is None else bias.data,
                stride,
                padding,
                dilation,
                len(inputs.counts),
            )
            return NeuronRows(y.transpose(0, 1), 1, *weight.sizes(0))
        kernel, dilations = kernels.pop(), _each(dilation, spatial)
        pads = _pads(padding, kernel, dilations)
        window = Window(kernel, _each(stride, spatial), dilations, pads)
        # If the inputs are the last axis, windows are copied in long contiguous pieces.
        y = layer_product(weight.data, inputs.data.movedim(1, -1), layers, window).movedim(-1, 1)
        result = NeuronRows(y, 1, *weight.sizes(0))
        return result if bias is None else _with_vector(torch.add, result, bias, 1)

    return apply


def _pads(
    padding: Any, kernel: Sequence[int], dilations: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilations, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((n, n) for n in _each(padding, len(kernel)))


def _each(value: Any, count: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * count
    return tuple(value) * count if len(value) == 1 else tuple(value)


def _batch_norm(
    x: Value,
    mean: Any = None,
    variance: Any = None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Value | None:
    if not isinstance(x, NeuronRows) or training or mean is None or variance is None:
        return None
    y = _with_vector(torch.sub, x, mean, 1)
    y = _with_vector(lambda a, v: a * (v + eps).rsqrt(), y, variance, 1)
    y = y if weight is None else _with_vector(torch.mul, y, weight, 1)
    return y if bias is None else _with_vector(torch.add, y, bias, 1)


def _prelu(x: Value, weight: Value) -> Value | None:
    if not isinstance(x, NeuronRows):
        return None
    is_one = isinstance(weight, Stored) and all(shape == (1,) for shape in weight.shapes)
    axis = x.at if is_one else 1
    return _with_vector(lambda a, s: torch.where(a > 0, a, s * a), x, weight, axis)


def _at_positions(name: str, spatial: int | None) -> _Handler:
    """Makes a handler for an operation on single channels, along the axes after the channels."""

    def apply(x: Value, *args: Any, **kwargs: Any) -> Any:
        axes = len(args[0] if args else kwargs["pad"]) // 2 if spatial is None else spatial
        if not isinstance(x, NeuronRows) or kwargs.get("return_indices"):
            return None
        if x.at >= x.rank - axes or (spatial is not None and (x.at, x.rank) != (1, spatial + 2)):
            return None
        # The batch takes the place of the channels, and the neurons take that of the batch.
        return replace(x, data=OPERATIONS[name](x.data, *args, **kwargs))

    return apply


def _flatten(x: Value, start_dim: int = 0, end_dim: int = -1) -> Value | None:
    if not isinstance(x, NeuronRows):
        return None
    first, last = start_dim % x.rank, end_dim % x.rank
    if x.at < first:
        return replace(x, data=x.data.flatten(first, last))
    if x.at > last:
        return replace(x, data=x.data.flatten(first + 1, last + 1), at=x.at - (last - first))
    if x.at not in (first, last) or (x.is_padded and x.at != first):
        return None
    joined = [x.along(axis) for axis in range(first, last + 1) if axis != x.at]
    data = x.data.movedim(joined, list(range(1, last - first + 1))).flatten(0, last - first)
    positions = data.shape[0] // x.data.shape[0]
    if x.at != first:
        # Positions come before neurons here.
        index = _turned(tuple((n, positions) for n in x.counts), (1, 0))
        data = data.index_select(0, index.to(data.device))
    counts, own = (tuple(n * positions for n in sizes) for sizes in (x.counts, x.own))
    return NeuronRows(data, first, counts, own)


def _reshape(x: Value, *sizes: Any, **named: Any) -> Value | None:
    shape = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], tuple) else sizes
    is_flatten = isinstance(x, NeuronRows) and x.at == 1 and len(shape) == 2 and shape[1] == -1
    if isinstance(x, NeuronRows) and is_flatten and shape[0] == x.data.shape[1]:
        return _flatten(x, 1)
    return None


def _reduction(name: str) -> _Handler:
    def apply(x: Value, dim: Any = None, keepdim: bool = False, **others: Any) -> Value | None:
        if not isinstance(x, NeuronRows) or dim is None or others:
            return None
        axes = {d % x.rank for d in ((dim,) if isinstance(dim, int) else dim)}
        if x.at in axes:
            return None
        own = tuple(map(x.along, axes))
        # The derivative of a reduction lays out the axes in their order. In the order of memory, it
        # is laid out like the values, and the derivatives of earlier layers need not copy it.
        order = sorted(range(x.rank), key=x.data.stride().__getitem__, reverse=True)
        data = OPERATIONS[name](x.data.permute(order), tuple(map(order.index, own)), True)
        data = data.permute([order.index(axis) for axis in range(x.rank)])
        if keepdim:
            return replace(x, data=data)
        return replace(x, data=data.squeeze(own), at=x.at - sum(axis < x.at for axis in axes))

    return apply


def _average_pool(spatial: int) -> _Handler:
    """Makes a handler for average pooling to a given number of positions, usually one."""
    pool, mean = _at_positions(f"adaptive_avg_pool{spatial}d", spatial), _reduction("mean")

    def apply(x: Value, output_size: Any) -> Value | None:
        if output_size in (1, (1,) * spatial):
            return mean(x, tuple(range(-spatial, 0)), True)
        return pool(x, output_size)

    return apply


def _squeeze(x: Value, dim: Any = None) -> Value | None:
    if not isinstance(x, NeuronRows) or not isinstance(dim, int) or dim % x.rank == x.at:
        return None
    axis = dim % x.rank
    if x.data.shape[x.along(axis)] != 1:
        return x
    return replace(x, data=x.data.squeeze(x.along(axis)), at=x.at - (axis < x.at))


def _permute(x: Value, *dims: Any, **named: Any) -> Value | None:
    order = named.get("dims", dims[0] if dims and isinstance(dims[0], tuple) else dims)
    if isinstance(x, Stored):
        order = tuple(axis % x.rank for axis in order)
        index = _turned(x.shapes, order).to(x.data.device)
        turned = (tuple(tuple(s[i] for i in order) for s in shapes) for shapes in (x.shapes, x.own))
        return Stored(x.data.index_select(0, index), *turned)
    if not isinstance(x, NeuronRows):
        return None
    order = [axis % x.rank for axis in order]
    # The neurons always come first in the data; the other axes are permuted.
    others = [x.along(axis) for axis in order if axis != x.at]
    return replace(x, data=x.data.permute(0, *others), at=order.index(x.at))


@lru_cache(maxsize=32)
@torch.inference_mode(False)
def _turned(shapes: tuple[tuple[int, ...], ...], order: tuple[int, ...]) -> Tensor:
    """The index that permutes the axes of tensors that are stored as one row of entries."""
    parts, begin = [], 0
    for shape, same in itertools.groupby(shapes):
        count, size = len(list(same)), math.prod(shape)
        places = torch.arange(begin, begin + count * size).reshape(count, *shape)
        parts.append(places.permute(0, *(axis + 1 for axis in order)).reshape(-1))
        begin += count * size
    return torch.cat(parts)


# Slices of every network would need several kernels each on a GPU, above all in the derivative.
@lru_cache(maxsize=32)
@torch.inference_mode(False)
def _unpadded(counts: tuple[int, ...], own: tuple[int, ...], device: torch.device) -> Tensor:
    """The rows of the original neurons among those of padded networks."""
    parts = torch.arange(sum(counts)).split(counts)
    return torch.cat([rows[:n] for rows, n in zip(parts, own, strict=True)]).to(device)


def _transpose(x: Value) -> Value | None:
    return _permute(x, (1, 0)) if x.rank == 2 else x


def _cat(values: Sequence[Any], axis: int = 0, **named: int) -> Value | None:
    axis = named.get("dim", axis)
    like = next((v for v in values if isinstance(v, NeuronRows)), None)
    if like is None:
        return None
    if like.at != axis % like.rank:
        if any(
            not isinstance(v, NeuronRows)
            or (v.at, v.counts, v.is_padded) != (like.at, like.counts, like.is_padded)
            for v in values
        ):
            return None
        return replace(like, data=torch.cat([v.data for v in values], like.along(axis % like.rank)))
    rows = [as_rows(v, axis, len(like.counts)) for v in values]
    if any(v.is_padded for v in rows):
        raise NotRaggedError
    by_network = zip(*(v.data.split(v.counts) for v in rows), strict=True)
    counts = tuple(map(sum, zip(*(v.counts for v in rows), strict=True)))
    data = torch.cat([part for parts in by_network for part in parts])
    return NeuronRows(data, like.at, counts, counts)


_POOLS = ("max_pool", "avg_pool", "lp_pool", "adaptive_max_pool")
#: They return None for values that have the same shape in all networks, or must have.
_HANDLERS: dict[str, _Handler] = {
    "linear": _linear,
    "batch_norm": _batch_norm,
    "prelu": _prelu,
    "flatten": _flatten,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "permute": _permute,
    "t": _transpose,
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    **{name: _reduction(name) for name in ("mean", "sum", "amax", "amin")},
    **{f"conv{n}d": _convolution(n) for n in (1, 2, 3)},
    **{f"{kind}{n}d": _at_positions(f"{kind}{n}d", n) for kind in _POOLS for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": _average_pool(n) for n in (1, 2, 3)},
    "pad": _at_positions("pad", None),
}
