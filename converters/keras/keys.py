"""Parses the keys of a Keras file into the layer and the role of a tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable

# The axes of a Keras kernel `(*spatial, in, out)` in PyTorch's order, by the number of axes. A
# transposed kernel is `(*spatial, out, in)` in Keras and `(in, out, *spatial)` in PyTorch.
KERNEL_ORDER = {2: (1, 0), 3: (2, 1, 0), 4: (3, 2, 0, 1), 5: (4, 3, 0, 1, 2)}
DEPTHWISE_ORDER = {3: (1, 2, 0), 4: (2, 3, 0, 1)}

# The names of Keras 1: `dense_1/dense_1_W:0`.
_KERAS_1 = re.compile(r"(.+)_(W|b|gamma|beta|alphas|running_mean|running_std)")
_KERAS_1_ROLES = {
    "W": "kernel",
    "b": "bias",
    "alphas": "alpha",
    "running_mean": "moving_mean",
    "running_std": "moving_variance",  # It holds the variance in spite of its name.
}


def split_key(key: str) -> tuple[str, str]:
    """Returns the layer and the role of a tensor: `d/d/kernel:0` gives `d/d`, `kernel`.

    In the format of Keras 3, `layers/dense/vars/0`, the role is a number.
    """
    layer, _, last = key.rpartition("/")
    role = last.split(":")[0]
    old = _KERAS_1.fullmatch(role)
    if old and "/" not in layer:
        return f"{layer}/{old[1]}", _KERAS_1_ROLES.get(old[2], old[2])
    return layer, role


def is_keras_1(key: str) -> bool:
    """Whether a tensor has a name of Keras 1, which has two possible axis orders of kernels."""
    return split_key(key)[0] != key.rpartition("/")[0]


def is_numbered(key: str) -> bool:
    """Whether a key is in the format of Keras 3, with a number as the role."""
    return "vars/" in key and split_key(key)[1].isdecimal()


def shown_layer(layer: str) -> str:
    """Returns the name of a layer without repetitions: `d/d` and `layers/d/vars` give `d`."""
    names = [name for name in re.split(r"[/\\]", layer) if name not in _CONTAINERS]
    return "/".join(dict.fromkeys(names)) or "model"


def by_layer(keys: Iterable[str]) -> dict[str, list[str]]:
    """Groups keys by layer, in the order of the first key of each layer."""
    found: dict[str, list[str]] = {}
    for key in keys:
        found.setdefault(split_key(key)[0], []).append(key)
    return found


def natural(name: str) -> list[tuple[int, str]]:
    """Returns a sort key for names, so that `dense_2` comes before `dense_10`."""
    return [(int(n or -1), word) for n, word in re.findall(r"(\d+)|(\D+)", name)]


def snake_case(class_name: str) -> str:
    """Converts a class name to the name of its layers in Keras: `PReLU` gives `p_re_lu`."""
    return re.sub(r"(?<=.)(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z])", "_", class_name).lower()


_CONTAINERS = ("layers", "_layer_checkpoint_dependencies", "vars", "cell")
