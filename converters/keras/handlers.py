"""The layers of Keras: how each is followed with `wiring`, and how it is recorded on the tape.

Activations keep their axes in Keras, with channels last unless a layer has another option.
"""

from __future__ import annotations

import re
from functools import reduce
from typing import Any

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.keras.along_time import (
    RECURRENT,
    bidirectional,
    recurrent,
    time_distributed,
)
from nfn_graph.converters.keras.applied import AS_LAYERS, Applied, Handler, Record, activated
from nfn_graph.converters.keras.convolutions import SPATIAL
from nfn_graph.converters.wiring import Opaque, Signal, Value
from nfn_graph.converters.wiring.tape import Unrecordable
from nfn_graph.converters.wiring.values import num_entries

_NOTHING = (
    "Dropout SpatialDropout1D SpatialDropout2D SpatialDropout3D AlphaDropout GaussianDropout "
    "GaussianNoise ActivityRegularization Identity"
)
_MERGES = {
    "Add": "add", "Subtract": "sub", "Multiply": "mul", "Average": "add", "Maximum": "maximum",
    "Minimum": "minimum",
}  # fmt: skip


def _same(layer: Applied) -> Value:
    return layer.x


def _activation(layer: Applied) -> Value:
    return activated(layer, layer.x)


def _dense(layer: Applied) -> Value:
    y = layer.wiring.linear(layer.x, layer.weight("kernel"), layer.bias(), target=1, source=0)
    return activated(layer, y)


def _record_dense(r: Applied) -> Any:
    weight = r.call("permute", r.tensor("kernel"), (1, 0))
    return r.record_activation(r.call("linear", r.ref, weight, r.tensor("bias")))


def _embedding(layer: Applied) -> Value:
    """Handles an embedding as a linear map of one-hot inputs, with one input neuron per row."""
    x, table = layer.x, layer.weight("embeddings")
    if not isinstance(x, Opaque):
        raise ConversionError("Expected indices that come from the input (got computed ones)")
    shape = (None, None) if x.shape is None else x.shape
    rows = layer.wiring.opaque([x], (*shape, table.shape[0]))
    return layer.wiring.linear(rows, table, target=1, source=0)


def _flatten(layer: Applied) -> Value:
    """Merges all axes after the batch; channels that come first are moved to the end before."""
    x = layer.x
    if x.shape is None:
        if isinstance(x, Opaque):
            return layer.wiring.opaque([x])
        raise ConversionError("Expected an input of known axes to flatten (got an unknown one)")
    rank = len(x.shape)
    if isinstance(x, Opaque):
        sizes = x.shape[1:]
        return layer.wiring.opaque([x], (None, num_entries(sizes)))
    if layer.layer.text("data_format", "") == "channels_first" and rank > 2:
        x = layer.wiring.permute(x, [0, *range(2, rank), 1])
    return layer.wiring.flatten(x, 1) if rank > 1 else x


def _record_flatten(r: Applied) -> Any:
    rank = len(r.x.shape or ())
    x = r.ref
    if r.layer.text("data_format", "") == "channels_first":
        if not rank:
            raise Unrecordable("it flattens a value whose axes are not known")
        x = r.call("permute", x, (0, *range(2, rank), 1)) if rank > 2 else x
    return r.call("flatten", x, 1) if rank != 1 else r.call("unsqueeze", x, -1)


def _reshape(layer: Applied) -> Value:
    sizes = layer.layer.integers("target_shape", [])
    x = layer.x
    if isinstance(x, Opaque):
        known = None if -1 in sizes else (None, *sizes)
        return layer.wiring.opaque([x], known)
    return layer.wiring.reshape(x, [None, *sizes])


def _record_reshape(r: Applied) -> Any:
    sizes = r.layer.integers("target_shape", [])
    return r.call("reshape", r.ref, (r.call("size", r.ref, 0), *sizes))


def _permute(layer: Applied) -> Value:
    dims = layer.layer.integers("dims", [])
    x = layer.x
    if isinstance(x, Opaque):
        shape = x.shape
        known = shape is not None and sorted(dims) == [*range(1, len(shape))]
        return layer.wiring.opaque(
            [x], [None, *(shape[i] for i in dims)] if known and shape is not None else None
        )
    return layer.wiring.permute(x, [0, *dims])


def _record_permute(r: Applied) -> Any:
    return r.call("permute", r.ref, (0, *r.layer.integers("dims", [])))


def _repeat(layer: Applied) -> Value:
    x = layer.wiring.unsqueeze(layer.x, 1)
    return layer.resized(x, [1], [layer.layer.integer("n", 1)]) if x.shape else x


def _record_repeat(r: Applied) -> Any:
    return r.call("expand", r.call("unsqueeze", r.ref, 1), -1, r.layer.integer("n", 1), -1)


def _channelwise(layer: Applied, needed: str, *roles: str) -> Value:
    axes = layer.layer.integers("axis", [-1])
    if len(axes) != 1:
        raise ConversionError(f"Expected a norm along one axis (got {axes})")
    layer.weight(needed)
    return layer.wiring.channelwise(layer.x, layer.weights(*roles), axes[0])


def _axis(r: Applied) -> tuple[int, int]:
    """Returns the axis of a norm, counted from the front, and the number of axes."""
    rank = len(r.x.shape or ())
    (axis, *more) = r.layer.integers("axis", [-1])
    if more or (not rank and axis != -1):
        raise Unrecordable(f"its layer '{r.layer.name}' has an axis that is not known")
    return (axis % rank, rank) if rank else (-1, 0)


def _batch_norm(layer: Applied) -> Value:
    return _channelwise(layer, "moving_mean", "gamma", "beta", "moving_mean", "moving_variance")


def _record_batch_norm(r: Applied) -> Any:
    axis, rank = _axis(r)
    eps = r.number("epsilon", default=1e-3)
    mean, variance = r.tensor("moving_mean"), r.tensor("moving_variance")
    if axis == 1 and rank > 2:
        tensors = [mean, variance, r.tensor("gamma"), r.tensor("beta")]
        return r.call("batch_norm", r.ref, *tensors, False, 0.0, eps)
    if axis != rank - 1:
        raise Unrecordable("its norm is along an axis between others")
    y = r.call("sub", r.ref, mean)
    y = r.call("mul", y, r.call("rsqrt", r.call("add", variance, eps)))
    return _scaled(r, y)


def _scaled(r: Applied, y: Any) -> Any:
    gamma, beta = r.tensor("gamma"), r.tensor("beta")
    y = y if gamma is None else r.call("mul", y, gamma)
    return y if beta is None else r.call("add", y, beta)


def _normalization(layer: Applied) -> Value:
    return _channelwise(layer, "mean", "mean", "variance")


def _rescaling(layer: Applied) -> Value:
    numbers = [layer.layer.options.get(name) for name in ("scale", "offset")]
    if isinstance(layer.x, Signal) and any(isinstance(x, list | dict) for x in numbers):
        raise ConversionError("Expected one scale for all neurons (got one for each)")
    return layer.x


def _record_rescaling(r: Applied) -> Any:
    y = r.call("mul", r.ref, r.number("scale", default=1.0))
    return r.call("add", y, r.number("offset", default=0.0))


def _layer_norm(layer: Applied) -> Value:
    axes = layer.layer.integers("axis", [-1])
    rank = len(layer.x.shape or ()) or 2
    behind = sorted(rank - axis if axis >= 0 else -axis for axis in axes)
    if behind != [*range(1, len(axes) + 1)]:
        raise ConversionError(f"Expected a norm along the last axes (got axes {axes} of {rank})")
    return layer.wiring.layer_norm(layer.x, layer.weights("gamma", "beta", "scale"), len(axes))


def _record_layer_norm(r: Applied) -> Any:
    axes = r.layer.integers("axis", [-1])
    known = r.weights("gamma", "beta", "scale")
    if r.layer.flag("rms_scaling", False) or not known:
        raise Unrecordable("its layer norm has no stored size, or is another norm")
    shape = known[0].shape
    if len(shape) != len(axes):
        raise Unrecordable("its layer norm has a shape that does not match its axes")
    if r.layer.class_name == "RMSNormalization":
        return r.call(
            "rms_norm", r.ref, shape, r.tensor("scale"), r.number("epsilon", default=1e-6)
        )
    eps = r.number("epsilon", default=1e-3)
    return r.call("layer_norm", r.ref, shape, r.tensor("gamma"), r.tensor("beta"), eps)


def _group_norm(layer: Applied) -> Value:
    (axis, *_), x = layer.layer.integers("axis", [-1]), layer.x
    if not isinstance(x, Signal):
        raise ConversionError("Expected neurons to normalise (got inputs)")
    groups = layer.layer.integer("groups", 32)
    axis = axis % x.rank
    y = layer.wiring.move(x, [axis], [1])
    channels = y.shape[1] if y.shape else None
    y = layer.wiring.group_norm(
        y, channels if groups == -1 and channels else groups, layer.weights("gamma", "beta")
    )
    return layer.wiring.move(y, [1], [axis])


def _record_group_norm(r: Applied) -> Any:
    axis, rank = _axis(r)
    if rank < 3 or axis not in (1, rank - 1):
        raise Unrecordable("its group norm is along an axis between others")
    behind = axis == rank - 1
    known = r.weights("gamma", "beta")
    groups = r.layer.integer("groups", 32)
    if groups == -1 and not known:
        raise Unrecordable("its group norm has no stored size")
    count = known[0].shape[0] if groups == -1 else groups
    x = r.call("permute", r.ref, (0, rank - 1, *range(1, rank - 1))) if behind else r.ref
    eps = r.number("epsilon", default=1e-3)
    y = r.call("group_norm", x, count, r.tensor("gamma"), r.tensor("beta"), eps)
    return r.call("permute", y, (0, *range(2, rank), 1)) if behind else y


def _record_relu(r: Applied) -> Any:
    slope = r.number("negative_slope", default=0.0)
    if r.number("threshold", default=0.0):
        raise Unrecordable("its ReLU has a threshold")
    y = r.call("leaky_relu", r.ref, slope) if slope else r.call("relu", r.ref)
    most = r.layer.options.get("max_value")
    return y if most is None else r.call("clamp_max", y, r.number("max_value", default=0.0))


def _prelu(layer: Applied) -> Value:
    return layer.wiring.combine(layer.x, layer.weight("alpha"))


def _record_prelu(r: Applied) -> Any:
    below = r.call("mul", r.tensor("alpha"), r.call("relu", r.call("neg", r.ref)))
    return r.call("sub", r.call("relu", r.ref), below)


def _along_axis(layer: Applied) -> Value:
    axes = layer.layer.integers("axis", [-1])
    return layer.wiring.statistics(layer.x, axes) if isinstance(layer.x, Signal) else layer.x


def _merge(layer: Applied) -> Value:
    """Handles an entrywise operation; a number as an operand does not change the symmetry."""
    most = 1 if len(layer.values) == 1 else 0
    numbers = [other for other in layer.others if isinstance(other, int | float)]
    if not layer.values or not len(numbers) == len(layer.others) <= most:
        raise ConversionError(
            f"Expected values of the network, or one and a number (got {len(layer.values)} and "
            f"{len(layer.others)} other arguments)"
        )
    ranks = {len(value.shape) for value in layer.values if value.shape is not None}
    if len(ranks) > 1:
        raise ConversionError(f"Expected values with the same number of axes (got {sorted(ranks)})")
    return reduce(layer.wiring.combine, layer.values)


def _record_merge(r: Applied) -> Any:
    kind = r.layer.class_name
    operands = [*r.refs, *r.others]
    y = operands[0]
    for other in operands[1:]:
        y = r.call(_MERGES[kind], y, other)
    return r.call("truediv", y, len(operands)) if kind == "Average" else y


def _concatenate(layer: Applied) -> Value:
    if layer.others:
        raise ConversionError("Expected values of the network (got something else)")
    return layer.wiring.concat(layer.values, layer.layer.integer("axis", -1))


def _function(name: str) -> Record:
    return lambda r: r.call(name, r.ref)


#: Handlers by the class of the layer.
LAYERS: dict[str, Handler] = {
    **SPATIAL,
    **dict.fromkeys(_NOTHING.split(), Handler(_same, lambda r: r.ref)),
    **{layer: Handler(_same, _function(name)) for layer, name in AS_LAYERS.items()},
    **dict.fromkeys(_MERGES, Handler(_merge, _record_merge)),
    "ReLU": Handler(_same, _record_relu),
    "LeakyReLU": Handler(
        _same,
        lambda r: r.call("leaky_relu", r.ref, r.number("negative_slope", "alpha", default=0.3)),
    ),
    "ELU": Handler(_same, lambda r: r.call("elu", r.ref, r.number("alpha", default=1.0))),
    "ThresholdedReLU": Handler(
        _same, lambda r: r.call("threshold", r.ref, r.number("theta", default=1.0), 0.0)
    ),
    "Activation": Handler(_activation, lambda r: r.record_activation(r.ref)),
    "Dense": Handler(_dense, _record_dense),
    "Embedding": Handler(_embedding, lambda r: r.call("embedding", r.ref, r.tensor("embeddings"))),
    "Flatten": Handler(_flatten, _record_flatten),
    "Rescaling": Handler(_rescaling, _record_rescaling),
    "Reshape": Handler(_reshape, _record_reshape),
    "Permute": Handler(_permute, _record_permute),
    "RepeatVector": Handler(_repeat, _record_repeat),
    "BatchNormalization": Handler(_batch_norm, _record_batch_norm),
    "Normalization": Handler(_normalization),
    "LayerNormalization": Handler(_layer_norm, _record_layer_norm),
    "RMSNormalization": Handler(_layer_norm, _record_layer_norm),
    "GroupNormalization": Handler(_group_norm, _record_group_norm),
    "UnitNormalization": Handler(_along_axis),
    "Softmax": Handler(
        _along_axis, lambda r: r.call("softmax", r.ref, r.layer.integer("axis", -1))
    ),
    "Masking": Handler(_along_axis),
    "PReLU": Handler(_prelu, _record_prelu),
    "Concatenate": Handler(
        _concatenate, lambda r: r.call("cat", tuple(r.refs), r.layer.integer("axis", -1))
    ),
    **dict.fromkeys(RECURRENT, Handler(recurrent)),
    "Bidirectional": Handler(bidirectional),
    "TimeDistributed": Handler(time_distributed(_dense)),
}

# Layers that have no graph, not even as a PyTorch module.
_WITHOUT_GRAPH = {
    r".*(LSTM|GRU|RNN).*": "a recurrence over time other than LSTM, GRU and SimpleRNN",
    r".*Attention.*": "attention",
}


def refusal(class_name: str, is_custom: bool = False) -> ConversionError:
    """Returns the error for a class of layers that cannot be followed."""
    for pattern, what in _WITHOUT_GRAPH.items():
        if re.fullmatch(pattern, class_name):
            return ConversionError(f"Expected a layer whose graph of weights is known (got {what})")
    what = f"the class {class_name}, which is {'custom' if is_custom else 'not known'}"
    if class_name == "Lambda":
        what = "custom code, which is never run"
    return ConversionError(
        f"Expected a layer whose symmetry is known (got {what}). Pass the network as a PyTorch "
        f"module: arch=..."
    )
