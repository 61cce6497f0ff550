"""The modules of torch.nn in the words of :class:`~nfn_graph.converters.wiring.Wiring`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from nfn_graph.converters.pytorch.operations import apply
from nfn_graph.converters.pytorch.tensors import normed_tensors
from nfn_graph.converters.pytorch.weights import recurrent_name, recurrent_weights
from nfn_graph.converters.wiring import Opaque, Wiring

Fetch = Callable[[Tensor | None], Any]

#: Modules of single entries, without parameters; dropout does nothing in eval mode.
_ENTRYWISE = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU,
    nn.Mish, nn.Softplus, nn.Softsign, nn.Sigmoid, nn.LogSigmoid, nn.Hardtanh, nn.Hardswish,
    nn.Hardsigmoid, nn.Hardshrink, nn.Softshrink, nn.Tanhshrink, nn.Tanh, nn.Threshold,
    nn.RReLU, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)  # fmt: skip

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_KNOWN_RANKS = (nn.BatchNorm2d, nn.BatchNorm3d, *_INSTANCE_NORMS)
_PADDINGS = tuple(
    getattr(nn, f"{kind}Pad{n}d")
    for n in (1, 2, 3)
    for kind in ("Constant", "Zero", "Reflection", "Replication", "Circular")
)
_CONSTANT_PADDINGS = tuple(
    getattr(nn, f"{kind}Pad{n}d") for n in (1, 2, 3) for kind in ("Constant", "Zero")
)


def apply_module(
    w: Wiring, module: nn.Module, fetch: Fetch, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """The result of a module of torch.nn; `fetch` gives its tensors as weights."""
    # Whatever comes after the input, such as an output size, says only sizes of positions.
    first = next(iter([*args, *kwargs.values()]), None)
    if isinstance(module, _ENTRYWISE):
        return first
    if isinstance(module, _KNOWN_RANKS) and isinstance(first, Opaque):
        # The kind of norm says how many axes an input has of which nothing else is known.
        first = w.ranked(first, int(type(module).__name__[-2]) + 2)
    normed = normed_tensors(module)

    def fetch_stored(tensor: Tensor | None) -> Any:
        if id(tensor) not in normed:
            return fetch(tensor)
        return apply(w, "_weight_norm", [fetch(part) for part in normed[id(tensor)]], {})

    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return _recurrent(w, module, fetch_stored, [*args, *kwargs.values()])
    name, rest = _as_operation(w, module, fetch_stored)
    return apply(w, name, [first, *rest], {})


def _recurrent(
    w: Wiring, module: nn.RNNBase | nn.RNNCellBase, fetch: Fetch, args: Sequence[Any]
) -> Any:
    """A recurrent network or cell, which takes its input and, perhaps, its first state."""
    m: Any = module
    name, (x, state) = recurrent_name(module), [*args, None][:2]
    if isinstance(module, nn.RNNCellBase):
        stored = (m.weight_ih, m.weight_hh, m.bias_ih, m.bias_hh)
        return apply(w, name, [x, state, *map(fetch, stored)], {})
    tensors = list(map(fetch, recurrent_weights(module)))
    options = [m.bias, m.num_layers, 0.0, False, m.bidirectional, m.batch_first]
    output, *states = apply(w, name, [x, state, tensors, *options], {})
    return output, states[0] if len(states) == 1 else tuple(states)


def _as_operation(w: Wiring, module: nn.Module, fetch: Fetch) -> tuple[str, list[Any]]:
    """A module as the function that it applies, with the arguments after the input."""
    m: Any = module
    kind = type(module).__name__
    if isinstance(module, nn.Linear):
        return "linear", [fetch(m.weight), fetch(m.bias)]
    if isinstance(module, _CONVOLUTIONS):
        return "conv2d", [fetch(m.weight), fetch(m.bias), 1, 0, 1, m.groups]
    if isinstance(module, _TRANSPOSED):
        return "conv_transpose2d", [fetch(m.weight), fetch(m.bias), 1, 0, 0, m.groups]
    if isinstance(module, (*_BATCH_NORMS, *_INSTANCE_NORMS)):
        tensors = (m.running_mean, m.running_var, m.weight, m.bias)
        name = "instance_norm" if isinstance(module, _INSTANCE_NORMS) else "batch_norm"
        return name, [fetch(tensor) for tensor in tensors]
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        bias = getattr(m, "bias", None)
        return "layer_norm", [m.normalized_shape, fetch(m.weight), fetch(bias)]
    if isinstance(module, nn.GroupNorm):
        return "group_norm", [m.num_groups, fetch(m.weight), fetch(m.bias)]
    if isinstance(module, nn.PReLU):
        return "prelu", [fetch(m.weight)]
    if isinstance(module, nn.Embedding):
        return "embedding", [fetch(m.weight)]
    return _without_tensors(w, m, kind)


def _without_tensors(w: Wiring, m: Any, kind: str) -> tuple[str, list[Any]]:
    spatial = next((n for n in (1, 2, 3) if kind.endswith(f"{n}d")), 2)
    if isinstance(m, nn.Flatten):
        return "flatten", [m.start_dim, m.end_dim]
    if isinstance(m, nn.Unflatten):
        return "unflatten", [m.dim, tuple(m.unflattened_size)]
    if kind.startswith("Adaptive"):
        return f"adaptive_avg_pool{spatial}d", [m.output_size]
    if "Pool" in kind and "Unpool" not in kind and not getattr(m, "return_indices", False):
        return f"avg_pool{spatial}d", [m.kernel_size]
    if isinstance(m, nn.Upsample):
        return "interpolate", []
    if isinstance(m, _PADDINGS):
        return "pad", [tuple(m.padding), "constant" if isinstance(m, _CONSTANT_PADDINGS) else kind]
    if isinstance(m, nn.PixelShuffle):
        return "pixel_shuffle", [m.upscale_factor]
    if isinstance(m, nn.ChannelShuffle):
        return "channel_shuffle", [m.groups]
    if isinstance(m, nn.PixelUnshuffle):
        return "pixel_unshuffle", [m.downscale_factor]
    if isinstance(m, nn.Softmax | nn.LogSoftmax | nn.Softmin):
        return "softmax", [m.dim]
    if isinstance(m, nn.Softmax2d):
        return "softmax", [-3]
    if isinstance(m, nn.GLU):
        return "glu", [m.dim]
    if isinstance(m, nn.Unfold):
        return "im2col", [m.kernel_size]
    if isinstance(m, nn.LocalResponseNorm):
        return "local_response_norm", []
    return w.refuse(
        f"Expected a module whose effect on neurons is known (got {kind}). Convert the parts of "
        f"the network before and after it on their own"
    )
