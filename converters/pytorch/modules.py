"""The modules of torch.nn as the functions that they apply.

Every module is described once and used twice: by the wiring, which follows its neurons, and by the
tape, which records what it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from nfn_graph.converters.pytorch.operations import apply
from nfn_graph.converters.pytorch.tensors import normed_tensors
from nfn_graph.converters.pytorch.weights import recurrent_name, recurrent_weights
from nfn_graph.converters.wiring import Opaque, Wiring

Fetch = Callable[[Tensor | None], Any]

_NOTHING = (
    nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)  # fmt: skip
#: Modules without tensors, as functions with the attributes that they take.
_FUNCTIONS: dict[type[nn.Module], tuple[str, tuple[str, ...]]] = {
    nn.ReLU: ("relu", ()),
    nn.ReLU6: ("relu6", ()),
    nn.RReLU: ("rrelu", ()),
    nn.LeakyReLU: ("leaky_relu", ("negative_slope",)),
    nn.ELU: ("elu", ("alpha",)),
    nn.SELU: ("selu", ()),
    nn.CELU: ("celu", ("alpha",)),
    nn.SiLU: ("silu", ()),
    nn.Mish: ("mish", ()),
    nn.Softplus: ("softplus", ("beta", "threshold")),
    nn.Softsign: ("softsign", ()),
    nn.Sigmoid: ("sigmoid", ()),
    nn.LogSigmoid: ("logsigmoid", ()),
    nn.Hardtanh: ("hardtanh", ("min_val", "max_val")),
    nn.Hardswish: ("hardswish", ()),
    nn.Hardsigmoid: ("hardsigmoid", ()),
    nn.Hardshrink: ("hardshrink", ("lambd",)),
    nn.Softshrink: ("softshrink", ("lambd",)),
    nn.Tanhshrink: ("tanhshrink", ()),
    nn.Tanh: ("tanh", ()),
    nn.Threshold: ("threshold", ("threshold", "value")),
    nn.Flatten: ("flatten", ("start_dim", "end_dim")),
    nn.Softmax: ("softmax", ("dim",)),
    nn.LogSoftmax: ("log_softmax", ("dim",)),
    nn.Softmin: ("softmin", ("dim",)),
    nn.GLU: ("glu", ("dim",)),
    nn.PixelShuffle: ("pixel_shuffle", ("upscale_factor",)),
    nn.PixelUnshuffle: ("pixel_unshuffle", ("downscale_factor",)),
    nn.ChannelShuffle: ("channel_shuffle", ("groups",)),
    nn.Unfold: ("im2col", ("kernel_size", "dilation", "padding", "stride")),
    nn.LocalResponseNorm: ("local_response_norm", ("size", "alpha", "beta", "k")),
}
#: Pooling over one to three axes, by the first part of the name.
_POOLS: dict[str, tuple[str, tuple[str, ...]]] = {
    "MaxPool": ("max_pool", ("kernel_size", "stride", "padding", "dilation", "ceil_mode")),
    "AvgPool": ("avg_pool", ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")),
    "LPPool": ("lp_pool", ("norm_type", "kernel_size", "stride", "ceil_mode")),
    "FractionalMaxPool": ("fractional_max_pool", ("kernel_size",)),
    "AdaptiveMaxPool": ("adaptive_max_pool", ("output_size",)),
    "AdaptiveAvgPool": ("adaptive_avg_pool", ("output_size",)),
}
_PAD_MODES = {
    "ConstantPad": "constant", "ZeroPad": "constant", "ReflectionPad": "reflect",
    "ReplicationPad": "replicate", "CircularPad": "circular",
}  # fmt: skip
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_KNOWN_RANKS = (nn.BatchNorm2d, nn.BatchNorm3d, *_INSTANCE_NORMS)


class Listener(Protocol):
    """Receives the functions that a module applies."""

    def fetch(self, tensor: Tensor | None) -> Any:
        """Returns a tensor of the module."""
        ...

    def call(self, name: str, *args: Any, results: int = 1, **kwargs: Any) -> Any:
        """Applies a function; several results are returned as a tuple."""
        ...

    def padded(self, x: Any, padding: Sequence[int], mode: str) -> Any:
        """Pads a value for a convolution, which determines the numbers of positions."""
        ...

    def unknown(self, kind: str) -> Any:
        """Handles an unknown module."""
        ...


def say_module(to: Listener, module: nn.Module, x: Any, *more: Any) -> Any:
    """Describes what a module computes, in functions and operators of torch."""
    m: Any = module
    kind = type(module).__name__
    stem, spatial = (kind[:-2], kind[-2:]) if kind[-2:] in ("1d", "2d", "3d") else (kind, "")
    normed = normed_tensors(module)

    def fetch(tensor: Tensor | None) -> Any:
        if id(tensor) not in normed:
            return to.fetch(tensor)
        v, g, dim = normed[id(tensor)]
        return to.call("_weight_norm", to.fetch(v), to.fetch(g), dim)

    if isinstance(module, _NOTHING):
        return x
    if type(module) in _FUNCTIONS:
        name, attributes = _FUNCTIONS[type(module)]
        return to.call(name, x, *(getattr(m, attribute) for attribute in attributes))
    if stem in _POOLS and spatial and not getattr(m, "return_indices", False):
        name, attributes = _POOLS[stem]
        return to.call(f"{name}{spatial}", x, *(getattr(m, attribute) for attribute in attributes))
    if stem in _PAD_MODES:
        value = [m.value] if stem == "ConstantPad" else []
        return to.call("pad", x, tuple(m.padding), _PAD_MODES[stem], *value)
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return _recurrent(to, module, fetch, x, *more[:1])
    if isinstance(module, nn.Linear):
        return to.call("linear", x, fetch(m.weight), fetch(m.bias))
    if isinstance(module, nn.modules.conv._ConvNd):
        return _convolution(to, m, fetch, x)
    if isinstance(module, nn.modules.batchnorm._NormBase):
        tensors = map(fetch, (m.running_mean, m.running_var, m.weight, m.bias))
        name = "instance_norm" if isinstance(module, _INSTANCE_NORMS) else "batch_norm"
        return to.call(name, x, *tensors, m.running_mean is None, 0.0, m.eps)
    if isinstance(module, nn.LayerNorm):
        return to.call("layer_norm", x, m.normalized_shape, fetch(m.weight), fetch(m.bias), m.eps)
    if isinstance(module, nn.RMSNorm):
        return to.call("rms_norm", x, m.normalized_shape, fetch(m.weight), m.eps)
    if isinstance(module, nn.GroupNorm):
        return to.call("group_norm", x, m.num_groups, fetch(m.weight), fetch(m.bias), m.eps)
    if isinstance(module, nn.PReLU | nn.Embedding):
        return to.call(kind.lower(), x, fetch(m.weight))
    if isinstance(module, nn.GELU):
        return to.call("gelu", x, approximate=m.approximate)
    if isinstance(module, nn.Softmax2d):
        return to.call("softmax", x, -3)
    if isinstance(module, nn.Unflatten):
        return to.call("unflatten", x, m.dim, tuple(m.unflattened_size))
    if isinstance(module, nn.Upsample):
        rest = [m.mode, m.align_corners, m.recompute_scale_factor]
        return to.call("interpolate", x, m.size, m.scale_factor, *rest)
    return to.unknown(kind)


def _convolution(to: Listener, m: Any, fetch: Fetch, x: Any) -> Any:
    spatial, padding = len(m.kernel_size), m.padding
    weight, bias = fetch(m.weight), fetch(m.bias)
    if m.transposed:
        rest = [m.stride, padding, m.output_padding, m.groups, m.dilation]
        return to.call(f"conv_transpose{spatial}d", x, weight, bias, *rest)
    if m.padding_mode != "zeros":
        x = to.padded(x, m._reversed_padding_repeated_twice, m.padding_mode)
        padding = (0,) * spatial
    return to.call(f"conv{spatial}d", x, weight, bias, m.stride, padding, m.dilation, m.groups)


def _recurrent(
    to: Listener, module: nn.RNNBase | nn.RNNCellBase, fetch: Fetch, x: Any, state: Any = None
) -> Any:
    """Describes a recurrent network or cell, with its input and an optional initial state."""
    m: Any = module
    name = recurrent_name(module)
    if isinstance(module, nn.RNNCellBase):
        stored = (m.weight_ih, m.weight_hh, m.bias_ih, m.bias_hh)
        results = 2 if isinstance(module, nn.LSTMCell) else 1
        return to.call(name, x, state, *map(fetch, stored), results=results)
    weights = list(map(fetch, recurrent_weights(module)))
    options = [m.bias, m.num_layers, 0.0, False, m.bidirectional, m.batch_first]
    results = 3 if isinstance(module, nn.LSTM) else 2
    output, *states = to.call(name, x, state, weights, *options, results=results)
    return output, states[0] if len(states) == 1 else tuple(states)


class _Follower:
    """Applies the functions of modules to a wiring."""

    def __init__(self, wiring: Wiring, fetch: Fetch) -> None:
        self._wiring, self.fetch = wiring, fetch

    def call(self, name: str, *args: Any, results: int = 1, **kwargs: Any) -> Any:
        return apply(self._wiring, name, args, kwargs)

    def padded(self, x: Any, padding: Sequence[int], mode: str) -> Any:
        return x

    def unknown(self, kind: str) -> Any:
        self._wiring.refuse(
            f"Expected a module whose effect on neurons is known (got {kind}). Convert the parts "
            f"of the network before and after it separately"
        )


def apply_module(
    w: Wiring, module: nn.Module, fetch: Fetch, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Returns the result of a module of torch.nn; `fetch` returns its tensors as weights."""
    # Arguments after the input, such as an output size, only affect sizes of positions.
    first, *more = [*args, *kwargs.values()] or [None]
    if isinstance(module, _KNOWN_RANKS) and isinstance(first, Opaque):
        # The kind of norm determines the number of axes of an input of unknown shape.
        first = w.ranked(first, int(type(module).__name__[-2]) + 2)
    return say_module(_Follower(w, fetch), module, first, *more)
