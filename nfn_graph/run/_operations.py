"""The operations of which a computation may consist, named like torch's own functions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nfn_graph.messages import UserError
from nfn_graph.run._recurrence import RECURRENT

Operation = Callable[..., Any]

#: Functions of single entries.
_ENTRYWISE_TORCH = """
    relu selu sigmoid tanh sin cos tan sinh cosh asin acos atan atan2 asinh acosh atanh sinc erf
    erfc exp exp2 expm1 log log1p log2 log10 sqrt rsqrt square abs neg sign sgn reciprocal floor
    ceil round trunc frac clamp clip clamp_min clamp_max float_power multiply subtract div divide
    true_divide floor_divide fmod remainder maximum minimum fmax fmin hypot lerp addcmul addcdiv
    where masked_fill logical_and logical_or logical_not isnan isinf isfinite nan_to_num heaviside
    logit xlogy positive detach copysign zeros_like ones_like full_like rsub
"""
_ENTRYWISE_FUNCTIONAL = """
    relu6 leaky_relu elu celu gelu silu mish softplus softsign logsigmoid hardtanh hardswish
    hardsigmoid hardshrink softshrink tanhshrink threshold
"""
_ENTRYWISE_OPERATORS = "add sub mul truediv floordiv mod pow eq ne lt le gt ge"

_TORCH = """
    matmul mm addmm bmm baddbmm outer flatten unflatten transpose swapaxes swapdims
    cat concat concatenate stack chunk narrow select unbind cumsum cumprod
    sum mean prod amax amin var std logsumexp any all max min median mode topk sort argmax
    argmin argsort einsum var_mean std_mean aminmax count_nonzero broadcast_to
    pixel_shuffle pixel_unshuffle group_norm prelu
"""
_FUNCTIONAL = """
    linear embedding layer_norm rms_norm softmax log_softmax softmin normalize glu interpolate pad
    cosine_similarity local_response_norm
"""
_FUNCTIONAL_BY_AXES = """
    conv conv_transpose max_pool avg_pool adaptive_max_pool adaptive_avg_pool lp_pool
"""
_METHODS = """
    reshape expand expand_as repeat size dim t permute movedim moveaxis squeeze unsqueeze flip
    tile roll split norm gather index_select tril triu repeat_interleave
"""


def _of_numbers(name: str) -> Operation:
    """Extends a function of torch to plain numbers, for example for the root of a size."""
    function, plain = getattr(torch, name), getattr(math, name, None)
    if plain is None:
        return function

    def apply(*args: Any, **kwargs: Any) -> Any:
        is_plain = not kwargs and all(isinstance(x, (int, float)) for x in args)
        return (plain if is_plain else function)(*args, **kwargs)

    return apply


def _with_operator(name: str) -> Operation:
    own, full = getattr(operator, name), getattr(torch, name, None)

    def apply(*args: Any, **kwargs: Any) -> Any:
        # Operators also accept Python numbers such as sizes; torch's functions accept options.
        return full(*args, **kwargs) if kwargs and full is not None else own(*args)

    return apply


def _channels(x: Tensor, parameter: Tensor) -> Tensor:
    """Reshapes a vector to lie along axis 1 of a value."""
    return parameter.reshape(-1, *[1] * (x.dim() - 2))


def _channel_norm(statistics: Operation) -> Operation:
    def apply(
        x: Tensor,
        mean: Tensor | None = None,
        variance: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if training or mean is None or variance is None:
            y = statistics(x, eps)
        else:
            # Torch's own has no derivative in the statistics, which are features of a graph here.
            y = (x - _channels(x, mean)) * _channels(x, (variance + eps).rsqrt())
        y = y if weight is None else y * _channels(x, weight)
        return y if bias is None else y + _channels(x, bias)

    return apply


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Computes `torch._weight_norm` in operations that can be batched."""
    axes = [i for i in range(v.dim()) if dim == -1 or i != dim % v.dim()]
    return v * (g / torch.linalg.vector_norm(v, dim=axes, keepdim=True))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention as in `F.scaled_dot_product_attention`, which can be batched and derived twice."""
    if dropout_p:
        raise UserError(f"Expected attention without dropout (got dropout_p={dropout_p})")
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~keep, -math.inf)
    if attn_mask is not None:
        is_bool = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if is_bool else scores + attn_mask
    return scores.softmax(-1) @ value


#: Functions of single entries, which act on rows in any arrangement.
ENTRYWISE: dict[str, Operation] = {
    **{name: _of_numbers(name) for name in _ENTRYWISE_TORCH.split()},
    **{name: getattr(F, name) for name in _ENTRYWISE_FUNCTIONAL.split()},
    **{name: _with_operator(name) for name in _ENTRYWISE_OPERATORS.split()},
}

#: All operations, by name.
OPERATIONS: dict[str, Operation] = {
    **ENTRYWISE,
    **{name: getattr(torch, name) for name in _TORCH.split()},
    **{name: getattr(F, name) for name in _FUNCTIONAL.split()},
    **{
        f"{name}{n}d": getattr(F, f"{name}{n}d")
        for name in _FUNCTIONAL_BY_AXES.split()
        for n in (1, 2, 3)
    },
    **{name: getattr(Tensor, name) for name in _METHODS.split()},
    "batch_norm": _channel_norm(
        lambda x, eps: F.batch_norm(x, None, None, None, None, True, 0, eps)
    ),
    "instance_norm": _channel_norm(lambda x, eps: F.instance_norm(x, eps=eps)),
    "getitem": operator.getitem,
    "shape": lambda x: x.shape,
    "numel": Tensor.numel,
    "T": lambda x: x.permute(*range(x.dim())[::-1]),
    "mT": lambda x: x.mT,
    "im2col": F.unfold,
    "_weight_norm": _weight_norm,
    "scaled_dot_product_attention": _attention,
    **RECURRENT,
}


def leaves(value: Any) -> list[Any]:
    """The items inside nested lists, tuples, dictionaries and slices."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, slice):
        value = [value.start, value.stop, value.step]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]
