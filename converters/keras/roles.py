"""The tensors that the layers of Keras have, in the order in which Keras makes them."""

from __future__ import annotations

from collections.abc import Sequence

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.keras.config import KerasLayer
from nfn_graph.converters.keras.keys import by_layer, split_key

#: The roles of the layers of a class. Those after an option are made if it is set.
_ROLES: dict[str, Sequence[tuple[str | None, str]]] = {
    "Dense": ((None, "kernel"), ("use_bias", "bias")),
    "SeparableConv": (
        (None, "depthwise_kernel"),
        (None, "pointwise_kernel"),
        ("use_bias", "bias"),
    ),
    "BatchNormalization": (
        ("scale", "gamma"),
        ("center", "beta"),
        (None, "moving_mean"),
        (None, "moving_variance"),
    ),
    "LayerNormalization": (("scale", "gamma"), ("center", "beta")),
    "GroupNormalization": (("scale", "gamma"), ("center", "beta")),
    "RMSNormalization": ((None, "scale"),),
    "PReLU": ((None, "alpha"),),
    **dict.fromkeys(
        ("LSTM", "GRU", "SimpleRNN"),
        ((None, "kernel"), (None, "recurrent_kernel"), ("use_bias", "bias")),
    ),
    "Embedding": ((None, "embeddings"),),
    "Normalization": ((None, "mean"), (None, "variance"), (None, "count")),
}
for _n in "123":
    for _name in ("Conv{}D", "Conv{}DTranspose", "DepthwiseConv{}D"):
        _ROLES[_name.format(_n)] = _ROLES["Dense"]
    _ROLES[f"SeparableConv{_n}D"] = _ROLES["SeparableConv"]

#: All roles of tensors in Keras files.
ROLES = frozenset(role for roles in _ROLES.values() for _, role in roles)


def made_roles(layer: KerasLayer) -> list[str]:
    """The roles of the tensors that a layer makes, none for a class that is not known."""
    roles = () if layer.is_custom else _ROLES.get(layer.class_name, ())
    return [role for option, role in roles if option is None or layer.flag(option, True)]


def keys_by_role(layer: KerasLayer) -> dict[str, str]:
    """The key of every role that a layer has a tensor for."""
    found: dict[str, str] = {}
    for path, keys in by_layer(layer.keys).items():
        roles = [split_key(key)[1] for key in keys]
        if path.endswith("vars") and all(role.isdecimal() for role in roles):
            known = made_roles(layer)
            roles = [known[i] if i < len(known) else role for i, role in enumerate(roles)]
        for role, key in zip(roles, keys, strict=True):
            if role in found:
                raise ConversionError(f"Expected one '{role}' (got '{found[role]}' and '{key}')")
            found[role] = key
    return found
