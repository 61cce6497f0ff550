"""The weights of a state dict with their biases, and the vectors of norms and the like.

Every floating-point tensor must be one of these; what is left over is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from nfn_graph.converters.chain.names import Name, is_bias, stem
from nfn_graph.converters.chain.norms import VectorGroup, are_norm
from nfn_graph.converters.chain.order import ChainLayer, NotChained
from nfn_graph.converters.chain.topology import ASK_FOR_ARCH
from nfn_graph.converters.errors import ConversionError

_MOST_SHOWN = 5


def find_parts(tensors: Mapping[str, Tensor]) -> tuple[list[ChainLayer], list[VectorGroup]]:
    """The weights with their biases, and the vectors of norms and the like by module."""
    layers: list[ChainLayer] = []
    for key, tensor in tensors.items():
        _check_tensor(key, tensor)
        if tensor.dim() > 1:
            layers.append(ChainLayer(key, tuple(tensor.shape), Name.of(key)))
    _check_weights(layers)
    by_module, by_stem = _grouped(layers, _module), _grouped(layers, stem)
    modules: dict[str, list[str]] = {}
    unnamed: list[str] = []
    for key, tensor in tensors.items():
        if tensor.dim() > 1 or not tensor.is_floating_point():
            continue
        if (own := _own_layer(key, by_module, by_stem)) is not None:
            _check_bias(key, tensor.numel(), own)
            own.bias = key
        elif "." in key:
            modules.setdefault(_module(key), []).append(key)
        else:
            unnamed.append(key)
    groups, left = [], []
    for module, keys in modules.items():
        sizes = {tensors[key].numel() for key in keys}
        if len(sizes) == 1 and are_norm(keys):
            groups.append(VectorGroup.of(module, keys, sizes.pop()))
        else:
            left += keys
    # Arrays whose names pair no vector with a weight leave it to sizes, if these pair all of them.
    is_nameless = not modules and not any("." in n.key or n.bias for n in layers)
    if is_nameless and len(unnamed) == len(layers):
        for key in unnamed:
            _pair_by_size(key, tensors[key].numel(), layers)
    else:
        left += unnamed
    if left:
        raise ConversionError(
            f"Expected a chain of layers that explains every tensor (got {listed(tensors, left)} "
            f"left over). {ASK_FOR_ARCH}"
        )
    return layers, groups


def listed(tensors: Mapping[str, Tensor], keys: Sequence[str]) -> str:
    """How many tensors there are, and the first of them with their shapes."""
    if not keys:
        return "no tensors"
    shown = [f"'{key}' {list(tensors[key].shape)}" for key in keys[:_MOST_SHOWN]]
    more = ", ..." if len(keys) > _MOST_SHOWN else ""
    return f"{len(keys)} tensor{'s' * (len(keys) > 1)}: {', '.join(shown)}{more}"


def _check_tensor(key: str, tensor: Tensor) -> None:
    if tensor.is_complex() or (tensor.dim() > 1 and not tensor.is_floating_point()):
        raise ConversionError(f"Expected floating-point weights (got '{key}' of {tensor.dtype})")
    if 0 in tensor.shape:
        raise ConversionError(
            f"Expected tensors with entries (got '{key}' of shape {list(tensor.shape)})"
        )


def _check_weights(layers: Sequence[ChainLayer]) -> None:
    """Refuses tensors of several axes that are named as the biases of others."""
    by_stem = _grouped(layers, stem)
    for layer in layers:
        others = [n for n in by_stem[stem(layer.key)] if n is not layer]
        if is_bias(layer.key) and others:
            raise ConversionError(
                f"Expected '{layer.key}' to be a vector, the bias of '{others[0].key}' (got shape "
                f"{list(layer.shape)}). {ASK_FOR_ARCH}"
            )


def _own_layer(
    key: str,
    by_module: Mapping[str, list[ChainLayer]],
    by_stem: Mapping[str, list[ChainLayer]],
) -> ChainLayer | None:
    """The weight that a bias has in its module, or that has its name but for the role."""
    if not is_bias(key):
        return None
    own = by_module.get(_module(key), []) if "." in key else []
    if len(own) != 1:
        own = by_stem.get(stem(key), [])
    return own[0] if len(own) == 1 and own[0].bias is None else None


def _grouped(
    layers: Sequence[ChainLayer], name: Callable[[str], str]
) -> dict[str, list[ChainLayer]]:
    found: dict[str, list[ChainLayer]] = {}
    for layer in layers:
        found.setdefault(name(layer.key), []).append(layer)
    return found


def _module(key: str) -> str:
    return key.rpartition(".")[0]


def _check_bias(key: str, size: int, layer: ChainLayer) -> None:
    outputs, inputs, *kernel = layer.shape
    if size == outputs:
        return
    if size != inputs:
        raise NotChained(
            f"Expected '{key}' to have {outputs} entries, the outputs of '{layer.key}' (got {size})"
        )
    raise NotChained(
        f"Expected '{layer.key}' as [out, in{', ...' if kernel else ''}] (got shape "
        f"{list(layer.shape)} and {size} entries in '{key}': "
        + (
            f"a transposed convolution, which stores [in, out, ...]). {ASK_FOR_ARCH}"
            if kernel
            else f"it is transposed). {ASK_FOR_ARCH}"
        )
    )


def _pair_by_size(key: str, size: int, layers: Sequence[ChainLayer]) -> None:
    fitting = [n for n in layers if n.bias is None and n.shape[0] == size]
    if len(fitting) != 1:
        got = [n.key for n in fitting] or "none"
        raise (ConversionError if fitting else NotChained)(
            f"Expected one weight that the vector '{key}' of {size} entries can belong to "
            f"(got {got}). {ASK_FOR_ARCH}"
        )
    fitting[0].bias = key
