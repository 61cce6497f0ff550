"""ONNX operations that move, join, split or reduce axes, followed with `wiring`."""

from __future__ import annotations

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.onnx.node import Node, by_name
from nfn_graph.converters.wiring import Signal, Value, Weight, position_of


def _pool(node: Node) -> Value:
    if len(node.outputs) > 1:
        raise ConversionError("Expected pooling with one output (got one with indices)")
    return node.wiring.pool(node.x, node.rank() - 2)


def _resize(node: Node) -> Value:
    before, after = node.shape(0), node.shapes.get(node.outputs[0])
    if before is None or len(before) < 3 or (after is None and not _keeps_channels(node)):
        raise ConversionError(
            "Expected a resize whose sizes are known (got one that depends on an input). Pass an "
            "example_input"
        )
    if after is not None and before[1:2] != after[1:2]:
        raise ConversionError(f"Expected a resize that keeps channels (got {before} to {after})")
    return node.wiring.pool(node.x, len(before) - 2)


def _keeps_channels(node: Node) -> bool:
    """Whether a resize has stored scales that leave the first two axes unchanged."""
    found = [node.tensors[name] for name in node.names[1:] if name in node.tensors]
    return any(t.is_floating_point() and t.dim() and t[:2].tolist() == [1, 1] for t in found)


def _pad(node: Node) -> Value:
    rank = node.rank()
    pads = node.integers("pads", 1) or []
    axes = node.integers("axes", 3) or list(range(rank))
    if len(pads) != 2 * len(axes):
        raise ConversionError(f"Expected two pads for each of {len(axes)} axes (got {pads})")
    padded = [a % rank for a, n, m in zip(axes, pads, pads[len(axes) :], strict=False) if n or m]
    if not padded:
        return node.x
    if min(padded) < 2:
        raise ConversionError(f"Expected padding of positions (got padding of axis {min(padded)})")
    return node.wiring.pool(node.x, rank - min(padded))


def _flatten(node: Node) -> Value:
    axis = node.integer("axis", 1)
    if isinstance(node.x, Signal):
        axis = axis % (node.x.rank + 1) if axis < 0 else axis
    y = node.wiring.flatten(node.x, axis)
    return y if axis == 1 else node.wiring.flatten(y, 0, axis - 1)


def _reshape(node: Node) -> Value:
    stored = node.tensors.get(node.names[1]) if node.has(1) else None
    sizes: list[int | None] | None
    if stored is not None or node.has_attribute("shape"):
        sizes = list(node.integers("shape", 1) or [])
    else:
        sizes = node.computed(1) if node.has(1) else None
    inferred = node.shapes.get(node.outputs[0])
    if inferred is not None and (sizes is None or (None in sizes and None not in inferred)):
        sizes = list(inferred)
    if sizes is None:
        raise ConversionError(
            "Expected a reshape to a shape that can be determined (got one that depends on "
            "values). Pass an example_input"
        )
    if 0 in sizes and not node.integer("allowzero", 0):
        old = node.shape(0) or ()
        if len(old) < len(sizes):
            old = (*old, *[None] * (len(sizes) - len(old)))
        sizes = [old[i] if n == 0 else n for i, n in enumerate(sizes)]
    if isinstance(node.x, Signal) and len(sizes) == 2 and sizes[0] in (None, -1):
        # The batch stays separate. The rest is flattened, whichever of its sizes are known.
        rest = None if sizes[1] == -1 else sizes[1]
        if node.x.rank > 2 and None in node.x.shape[(node.x.neuron_axis or 0) + 1 :]:
            # Otherwise, rows of the result might be neurons.
            raise ConversionError(
                "Expected a reshape of known sizes (got unknown ones after the neurons). Pass an "
                "example_input"
            )
        return node.wiring.annotate(node.wiring.flatten(node.x, 1), (None, rest))
    return node.wiring.reshape(node.x, sizes)


def _transpose(node: Node) -> Value:
    order = node.integers("perm")
    if order is None:
        order = list(range(node.rank()))[::-1]
    return node.wiring.permute(node.x, order)


def _squeeze(node: Node) -> Value:
    return node.wiring.squeeze(node.x, *(node.integers("axes", 1) or []))


def _unsqueeze(node: Node) -> Value:
    y = node.x
    axes = node.integers("axes", 1) or []
    rank = node.rank() + len(axes)
    for axis in sorted(a % rank for a in axes):
        y = node.wiring.unsqueeze(y, axis)
    return y


def _concat(node: Node) -> Value:
    return node.wiring.concat(node.inputs, node.integer("axis"))


def _slice(node: Node) -> Value:
    starts, stops = node.integers("starts", 1) or [], node.integers("ends", 2) or []
    axes = node.integers("axes", 3) or list(range(len(starts)))
    steps = node.integers("steps", 4) or [1] * len(starts)
    if not len(starts) == len(stops) == len(axes) == len(steps):
        raise ConversionError(
            f"Expected a start, an end and a step for each axis (got {starts}, {stops} and {steps} "
            f"for axes {axes})"
        )
    y = node.x
    for axis, start, stop, step in zip(axes, starts, stops, steps, strict=True):
        y = node.wiring.slice(y, axis, start, None if stop >= 2**31 - 1 else stop, step)
    return y


def _split(node: Node) -> list[Value]:
    axis = node.integer("axis", 0)
    sizes = node.integers("split", 1)
    if sizes is None:
        shape = node.shape(0)
        total = None if shape is None else shape[position_of(axis, len(shape))]
        if total is None:
            raise ConversionError("Expected to split an axis of known size (got an unknown one)")
        step = -(-total // len(node.outputs))
        sizes = [min(step, total - step * i) for i in range(len(node.outputs))]
    values, start = [], 0
    for size in sizes:
        values.append(node.wiring.slice(node.x, axis, start, start + size))
        start += size
    return values


def _reduce(node: Node) -> Value:
    axes = node.integers("axes", 1)
    if axes is None and node.integer("noop_with_empty_axes", 0):
        return node.x
    return node.wiring.reduce(node.x, axes, bool(node.integer("keepdims", 1)))


def _gather(node: Node) -> Value:
    if not isinstance(node.x, Signal):
        if isinstance(node.x, Weight):
            raise ConversionError("Expected an activation (got an embedding, a table of rows)")
        return node.wiring.opaque([node.x])
    indices = node.tensors.get(node.names[1]) if node.has(1) else None
    if indices is None or indices.is_floating_point() or indices.dim():
        raise ConversionError("Expected one stored index (got several, or a computed one)")
    return node.wiring.select(node.x, node.integer("axis", 0), int(indices))


def _expand(node: Node) -> Value:
    """Handles entries repeated along axes of size 1, as in entrywise operations."""
    shape = node.shapes.get(node.outputs[0]) or node.computed(1)
    if isinstance(node.x, Weight) and shape is not None:
        return node.x.broadcast(max(node.x.rank, len(shape)))
    if isinstance(node.x, Signal) and shape is not None:
        return node.wiring.expand(node.x, shape)
    return node.x


def _tile(node: Node) -> Value:
    """Handles repetitions of all entries of an axis in their order."""
    y = node.x
    for axis, times in enumerate(node.integers("repeats", 1) or []):
        if times != 1:
            y = node.wiring.repeat(y, axis, times, is_tiled=True)
    return y


def _places(node: Node) -> Value:
    axis, keepdims = node.integer("axis", 0), bool(node.integer("keepdims", 1))
    return node.wiring.places(node.x, [axis], keepdims)


def _largest(node: Node) -> list[Value]:
    k = node.integers("k", 1) if not node.has_attribute("k") else [node.integer("k")]
    return list(node.wiring.largest(node.x, node.integer("axis", -1), k[0] if k else None))


def _one_hot(node: Node) -> Value:
    """Handles one-hot rows of positions; the two values are taps of the network."""
    if isinstance(node.value(2), Weight):
        node.wiring.use(node.weight(2), [None])
    return node.wiring.opaque([node.x])


def _cumulate(node: Node) -> Value:
    axes = node.integers("axis", 1) or []
    return node.wiring.mixes(node.x, axes)


AXIS_OPERATORS = by_name(
    [
        (_pool, "MaxPool AveragePool LpPool GlobalMaxPool GlobalAveragePool GlobalLpPool"),
        (_resize, "Resize Upsample"),
        (_pad, "Pad"),
        (_flatten, "Flatten"),
        (_reshape, "Reshape"),
        (_transpose, "Transpose"),
        (_squeeze, "Squeeze"),
        (_unsqueeze, "Unsqueeze"),
        (_concat, "Concat"),
        (_slice, "Slice"),
        (_split, "Split"),
        (
            _reduce,
            "ReduceMean ReduceSum ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceLogSum "
            "ReduceLogSumExp ReduceSumSquare",
        ),
        (_gather, "Gather"),
        (_expand, "Expand"),
        (_tile, "Tile"),
        (_places, "ArgMax ArgMin"),
        (_largest, "TopK"),
        (_one_hot, "OneHot"),
        (_cumulate, "CumSum"),
    ]
)
