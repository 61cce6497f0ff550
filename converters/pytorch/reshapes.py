"""Torch operations on axes: reshapes, concatenations and slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nfn_graph.converters.pytorch.handling import flat, handles, ints, sizes_in, values_in
from nfn_graph.converters.wiring import Opaque, Signal, Value, Weight, Wiring, position_of


@handles("flatten")
def flatten(w: Wiring, input: Value, start_dim: int = 0, end_dim: int = -1) -> Value:
    """Merges several axes."""
    return w.flatten(input, start_dim, end_dim)


@handles("view", "reshape", "_unsafe_view", "_reshape_alias")
def reshape(w: Wiring, input: Value, *shape: Any, **kwargs: Any) -> Value:
    """Handles any reshape."""
    return w.reshape(input, sizes_in([*shape, *kwargs.values()]))


@handles("unflatten")
def unflatten(w: Wiring, input: Value, dim: int, sizes: Any) -> Value:
    """Splits one axis into several."""
    if not isinstance(input, Signal):
        return w.opaque([input])
    return w.unflatten(input, dim, sizes_in([sizes]))


@handles("permute")
def permute(w: Wiring, input: Value, *dims: Any, **kwargs: Any) -> Value:
    """Permutes axes."""
    return w.permute(input, flat([*dims, *kwargs.values()]))


@handles("transpose", "swapaxes", "swapdims")
def transpose(w: Wiring, input: Value, dim0: int, dim1: int) -> Value:
    """Exchanges two axes."""
    return w.move(input, [dim0, dim1], [dim1, dim0])


@handles("t", "T", "numpy_T")
def t(w: Wiring, input: Value) -> Value:
    """Reverses all axes."""
    return w.permute(input, range(input.rank)[::-1]) if not isinstance(input, Opaque) else input


@handles("mT", "adjoint")
def matrix_transpose(w: Wiring, input: Value) -> Value:
    """Exchanges the last two axes."""
    return transpose(w, input, -2, -1)


@handles("movedim", "moveaxis")
def movedim(w: Wiring, input: Value, source: Any, destination: Any) -> Value:
    """Moves axes to other places."""
    return w.move(input, ints(source), ints(destination))


@handles("unsqueeze")
def unsqueeze(w: Wiring, input: Value, dim: int) -> Value:
    """Adds an axis."""
    return w.unsqueeze(input, dim)


@handles("squeeze")
def squeeze(w: Wiring, input: Value, dim: Any = None) -> Value:
    """Drops axes of size 1."""
    return w.squeeze(input, *([] if dim is None else ints(dim)))


@handles("expand", "broadcast_to")
def expand(w: Wiring, input: Value, *sizes: Any, **_: Any) -> Value:
    """Repeats axes of size 1."""
    shape = sizes_in(sizes)
    if isinstance(input, Weight):
        return input.broadcast(len(shape))
    if not isinstance(input, Signal):
        return w.opaque([input])
    return w.expand(input, shape)


@handles("repeat_interleave")
def repeat_interleave(w: Wiring, input: Value, repeats: Any, dim: Any = None, **_: Any) -> Value:
    """Repeats every entry of an axis."""
    if not isinstance(repeats, int) or not isinstance(dim, int):
        w.refuse("Expected a number of repeats and an axis (got other arguments)")
    return w.repeat(input, dim, repeats)


@handles("channel_shuffle")
def channel_shuffle(w: Wiring, input: Value, groups: int) -> Value:
    """Interleaves the channels of all groups."""
    if not isinstance(input, Signal) or input.shape[1] is None:
        w.refuse("Expected channels to shuffle (got an unknown shape)")
    x = w.unflatten(input, 1, [groups, input.shape[1] // groups])
    return w.flatten(w.move(x, [1, 2], [2, 1]), 1, 2)


@handles("repeat", "tile")
def repeat(w: Wiring, input: Value, *sizes: Any, **_: Any) -> Value:
    """Repeats all entries of an axis in their order."""
    if not isinstance(input, Signal):
        return w.refuse("Expected an activation (got a tensor of the checkpoint)")
    times = sizes_in(sizes)
    y: Value = input
    for _new in range(len(times) - input.rank):
        y = w.unsqueeze(y, 0)
    for back, count in enumerate(reversed(times), 1):
        if count is None:
            return w.refuse("Expected known numbers of repeats (got one that depends on values)")
        if count != 1:
            y = w.repeat(y, -back, count, is_tiled=True)
    return y


@handles("cat", "concat", "concatenate")
def cat(w: Wiring, tensors: Sequence[Value], dim: int = 0, **kwargs: int) -> Value:
    """Concatenates values."""
    return w.concat(list(tensors), kwargs.get("axis", dim))


@handles("stack")
def stack(w: Wiring, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Concatenates values along a new axis."""
    ranks = [v.rank for v in tensors if isinstance(v, Signal)]
    if not ranks:
        w.refuse("Expected activations to stack (got tensors of the checkpoint)")
    rank = ranks[0] + 1
    at = position_of(dim, rank)
    return w.concat([w.unsqueeze(v, at) for v in tensors], at)


def _known_size(w: Wiring, x: Signal, dim: int, verb: str) -> int:
    size = x.shape[position_of(dim, x.rank)]
    if size is None:
        w.refuse(
            f"Expected an axis of known size to {verb} (got axis {dim}, whose size is not known). "
            f"Pass an example_input"
        )
    return size


@handles("chunk")
def chunk(w: Wiring, input: Signal, chunks: int, dim: int = 0) -> tuple[Value, ...]:
    """Splits an axis into equal parts."""
    size = _known_size(w, input, dim, "chunk")
    return split(w, input, -(-size // chunks), dim)


@handles("split", "split_with_sizes", "unsafe_split")
def split(w: Wiring, input: Signal, split_size_or_sections: Any, dim: int = 0) -> tuple[Value, ...]:
    """Splits an axis into parts."""
    sizes = split_size_or_sections
    if isinstance(sizes, int):
        total = _known_size(w, input, dim, "split")
        sizes = [min(sizes, total - start) for start in range(0, total, sizes)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(
        w.slice(input, dim, start, start + n) for start, n in zip(starts, sizes, strict=True)
    )


@handles("unbind")
def unbind(w: Wiring, input: Signal, dim: int = 0) -> tuple[Value, ...]:
    """Returns the entries of an axis one by one."""
    size = _known_size(w, input, dim, "unbind")
    return tuple(w.select(input, dim, i) for i in range(size))


@handles("slice")
def slice_(
    w: Wiring,
    input: Value,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Value:
    """Takes a part of an axis."""
    return w.slice(input, dim, start or 0, end, step)


@handles("narrow")
def narrow(w: Wiring, input: Value, dim: int, start: int, length: int) -> Value:
    """Takes a part of an axis."""
    return w.slice(input, dim, start, start + length)


@handles("select")
def select(w: Wiring, input: Value, dim: int, index: int) -> Value:
    """Selects one entry of an axis."""
    return w.select(input, dim, index)


@handles("getitem")
def getitem(w: Wiring, input: Any, index: Any) -> Any:
    """Handles Python's brackets, on a tuple or with slices, integers, None and `...`."""
    if isinstance(input, list | tuple):
        return input[index]
    if isinstance(input, Opaque):
        return w.opaque(values_in([input, index]))
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(i is not None and i is not Ellipsis for i in items)
    if Ellipsis in [i for i in items if not values_in(i)]:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (input.rank - used)
    axis = 0
    value: Any = input
    for item in items:
        if item is None:
            value = w.unsqueeze(value, axis)
            axis += 1
        elif isinstance(item, int):
            value = w.select(value, axis, item)
        elif isinstance(item, slice):
            if values_in([item.start, item.stop, item.step]):
                w.refuse("Expected numbers as bounds of a slice (got a tensor)")
            if item != slice(None):
                value = w.slice(value, axis, item.start or 0, item.stop, item.step or 1)
            axis += 1
        else:
            w.refuse("Expected slices and integers as indices (got a tensor)")
    return value


@handles("glu")
def glu(w: Wiring, input: Signal, dim: int = -1) -> Value:
    """Multiplies one half by the gates of the other."""
    first, second = chunk(w, input, 2, dim)
    return w.combine(first, second)
