"""Operations of torch by what they do to neurons, under the names that all dialects share."""

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

#: Functions of single entries: any number of operands, all tied. Dropout does nothing in
#: eval mode; copies keep entries.
ENTRYWISE = frozenset(_ENTRYWISE.split())

#: Casts: whatever else they are given says only a type or a device.
CASTS = frozenset({"to", "_to_copy", "type", "type_as"})

#: Symmetric functions along axes that drop them.
REDUCTIONS = frozenset(_REDUCTIONS.split())

#: Linear maps whose second argument is a weight, never anything else.
WITH_WEIGHT = frozenset(
    {
        "linear",
        "convolution",
        *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)),
    }
)

#: Operations that have no graph, and why.
REFUSED = {
    "bilinear": "a bilinear map has neurons on three axes of its weight",
    "local_response_norm": "it mixes neighbouring channels, so their order matters",
    "unfold": "its entries move to other axes; use nn.Unfold, or a convolution of the same patches",
    "cond": "data-dependent control flow has no fixed wiring",
    "item": "the computation depends on the values of a tensor",
    "_local_scalar_dense": "the computation depends on the values of a tensor",
}
