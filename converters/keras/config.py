"""The configuration of a Keras model: its layers, their connections, and their tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files.keras import KerasFile
from nfn_graph.converters.keras.keys import by_layer, natural, snake_case, split_key

# The greatest depth of nested models.
_DEEPEST = 16
_MODELS = ("Sequential", "Functional", "Model")


class Source(NamedTuple):
    """A value of a functional model: the layer, the number of its call, and that of the result."""

    layer: str
    call: int
    result: int


class Call(NamedTuple):
    """One use of a layer in a functional model.

    Attributes:
        sources: The values that it reads.
        others: Other arguments that are given.
    """

    sources: tuple[Source, ...]
    others: tuple[Any, ...]


@dataclass(eq=False)
class KerasLayer:
    """A layer of a model.

    Args:
        name: Its name, which is unique in its model.
        class_name: Its class, without the module.
        options: The options with which it was created.
        calls: Its uses in a functional model.
        model: The model, if the layer is one.
        is_custom: Whether its class does not belong to Keras.
        keys: The tensors of the file that belong to it.
    """

    name: str
    class_name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    calls: tuple[Call, ...] = ()
    model: KerasModel | None = None
    is_custom: bool = False
    keys: tuple[str, ...] = ()

    def flag(self, name: str, default: bool) -> bool:
        """Returns a boolean option."""
        value = self.options.get(name)
        return default if value is None else bool(value)

    def integer(self, name: str, default: int) -> int:
        """Returns an integer option."""
        return self.integers(name, [default])[0]

    def integers(self, name: str, default: list[int]) -> list[int]:
        """Returns an option that is an integer or a list of integers."""
        value = self.options.get(name)
        if value is None:
            return default
        values = value if isinstance(value, list) else [value]
        if not values or not all(type(item) is int and abs(item) < 2**31 for item in values):
            raise ConversionError(
                f"Expected integers as '{name}' of layer '{self.name}' (got {value!r:.60})"
            )
        return list(values)

    def text(self, name: str, default: str) -> str:
        """Returns an option that is a string."""
        value = self.options.get(name)
        return value if isinstance(value, str) else default


@dataclass(eq=False)
class KerasModel:
    """A model, or one inside another.

    Args:
        layers: Its layers in the order of the configuration.
        inputs: The inputs of a functional model.
        outputs: The outputs of a functional model.
        is_sequential: Whether its layers follow one another.
    """

    layers: list[KerasLayer]
    inputs: tuple[Source, ...] = ()
    outputs: tuple[Source, ...] = ()
    is_sequential: bool = True

    @property
    def leaves(self) -> Iterator[KerasLayer]:
        """All layers that are not models, including those of nested models."""
        for layer in self.layers:
            if layer.model is None:
                yield layer
            else:
                yield from layer.model.leaves


def parse_model(config: Any, depth: int = 0) -> KerasModel:
    """Returns the model that a configuration describes.

    Raises:
        ConversionError: If the model is of a custom class, or the configuration is damaged.
    """
    class_name, inner = _class_and_options(config)
    described = inner.get("layers") if isinstance(inner, Mapping) else inner
    if depth > _DEEPEST or class_name not in _MODELS or not isinstance(described, list):
        raise ConversionError(
            f"Expected a Sequential or functional model, whose configuration contains the "
            f"connections of its layers (got a model of the class {class_name!r:.60})"
        )
    names: dict[str, None] = {}
    layers = []
    for item in described:
        layer = _parse_layer(item, depth)
        if layer.name in names:
            raise ConversionError(f"Expected layers of different names (got '{layer.name}' twice)")
        names[layer.name] = None
        layers.append(layer)
    if class_name == "Sequential" or not isinstance(inner, Mapping):
        _add_input_shape(inner, layers)
        return KerasModel(layers)
    inputs, outputs = (
        tuple(_sources(inner.get(name), names)) for name in ("input_layers", "output_layers")
    )
    for layer, item in zip(layers, described, strict=True):
        layer.calls = tuple(_calls(item, names))
    return KerasModel(layers, inputs, outputs, is_sequential=False)


def input_shape(layer: KerasLayer) -> tuple[int | None, ...] | None:
    """Returns the shape of a layer's inputs, including the batch; None if unknown."""
    shape = layer.options.get("batch_shape") or layer.options.get("batch_input_shape")
    if not isinstance(shape, list) or not all(n is None or type(n) is int for n in shape):
        return None
    return (None, *(n if n is None or n > 0 else None for n in shape[1:]))


def _class_and_options(config: Any) -> tuple[str, Any]:
    if not isinstance(config, Mapping) or not isinstance(config.get("config"), Mapping | list):
        raise ConversionError(f"Expected a class and its options (got {config!r:.60})")
    return str(config.get("class_name")), config["config"]


def _parse_layer(item: Any, depth: int) -> KerasLayer:
    class_name, options = _class_and_options(item)
    if isinstance(options, list):
        options = {"layers": options}
    name = str(item.get("name") or options.get("name") or class_name)
    # Custom classes are registered as `package>Class`.
    registered, module = item.get("registered_name"), item.get("module")
    is_custom = ">" in f"{registered}{class_name}" or (
        isinstance(module, str) and not re.match(r"(keras|tf_keras|tensorflow)\b", module)
    )
    is_model = class_name in _MODELS and isinstance(options.get("layers"), list)
    model = parse_model(item, depth + 1) if is_model and not is_custom else None
    return KerasLayer(name, class_name, options, (), model, is_custom)


def _add_input_shape(inner: Any, layers: list[KerasLayer]) -> None:
    """Adds the input shape that a Sequential model may record instead of its first layer."""
    built = inner.get("build_input_shape") if isinstance(inner, Mapping) else None
    if built is not None and layers and input_shape(layers[0]) is None:
        layers[0].options = {**layers[0].options, "batch_shape": built}


def _calls(item: Mapping[str, Any], names: Mapping[str, None]) -> Iterator[Call]:
    nodes = item.get("inbound_nodes")
    for node in nodes if isinstance(nodes, list) else []:
        others: list[Any] = []
        yield Call(tuple(_sources(node, names, others)), tuple(others))


def _sources(
    node: Any, names: Mapping[str, None], others: list[Any] | None = None
) -> Iterator[Source]:
    """Yields the values that a description of inputs names, in the forms of Keras 2 and 3."""
    if isinstance(node, Mapping):
        history = node.get("config")
        if node.get("class_name") == "__keras_tensor__" and isinstance(history, Mapping):
            yield from _sources(history.get("keras_history"), names, others)
            return
        for key, value in node.items():
            # The training flag and masks that are None change nothing.
            if not (key in ("training", "mask") and (value is None or isinstance(value, bool))):
                yield from _sources(value, names, others)
    elif isinstance(node, list):
        if _is_source(node, names):
            yield Source(*node[:3])
            yield from _sources(node[3:], names, others)
        else:
            for value in node:
                yield from _sources(value, names, others)
    elif node is not None and others is not None:
        others.append(node)


def _is_source(node: list[Any], names: Mapping[str, None]) -> bool:
    is_triple = len(node) in (3, 4) and isinstance(node[0], str) and node[0] in names
    return is_triple and type(node[1]) is int and type(node[2]) is int


#: The roles of the tensors of each class. A role with an option exists only if the option is set.
_ROLES: dict[str, Sequence[tuple[str | None, str]]] = {
    "Dense": ((None, "kernel"), ("use_bias", "bias")),
    "SeparableConv": ((None, "depthwise_kernel"), (None, "pointwise_kernel"), ("use_bias", "bias")),
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
    """Returns the roles of a layer's tensors; empty for an unknown class."""
    roles = () if layer.is_custom else _ROLES.get(layer.class_name, ())
    return [role for option, role in roles if option is None or layer.flag(option, True)]


def keys_by_role(layer: KerasLayer) -> dict[str, str]:
    """Returns the key of every role for which a layer has a tensor."""
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


def bind(model: KerasModel, file: KerasFile) -> None:
    """Assigns the keys of the file to layers, and raises if a tensor has no layer."""
    if file.is_ordered:
        _bind_named(model, file.layers)
    else:
        _bind_numbered(model, file.layers)
    bound = {key for layer in model.leaves for key in layer.keys}
    left = [key for key in file.tensors if key not in bound]
    if left:
        raise ConversionError(
            f"Expected every tensor to belong to a layer of the configuration (got '{left[0]}'"
            f"{f' and {len(left) - 1} more' if left[1:] else ''}, which do not)"
        )


def _bind_named(model: KerasModel, groups: Mapping[str, Sequence[str]]) -> None:
    """Assigns keys to layers by name; the group of a model holds the tensors of all its layers."""
    for layer in model.layers:
        keys = tuple(groups.get(layer.name, ()))
        if layer.model is None:
            layer.keys = keys
            continue
        inside: dict[str, list[str]] = {}
        for path, found in by_layer(keys).items():
            inside.setdefault(path.rpartition("/")[2], []).extend(found)
        names = [leaf.name for leaf in layer.model.leaves]
        if len(set(names)) != len(names):
            raise ConversionError(
                f"Expected layers with different names inside '{layer.name}' (got several of "
                f"one name, whose tensors cannot be distinguished)"
            )
        for leaf in layer.model.leaves:
            leaf.keys = tuple(inside.get(leaf.name, ()))


def _bind_numbered(model: KerasModel, groups: Mapping[str, Sequence[str]]) -> None:
    """Assigns keys to layers that are numbered by class: `dense`, `dense_1`, ..."""
    children: dict[str, dict[str, Sequence[str]]] = {}
    for path, keys in groups.items():
        # Take the second part of 'layers/dense' and of 'layers/model/layers/dense'.
        parts = re.split(r"[/\\]", path)
        if len(parts) > 1 and keys:
            children.setdefault(parts[1], {})["/".join(parts[2:])] = keys
    by_class: dict[str, list[KerasLayer]] = {}
    for layer in model.layers:
        by_class.setdefault(snake_case(layer.class_name), []).append(layer)
    for stem, layers in by_class.items():
        found = [n for n in children if re.fullmatch(rf"{stem}(_\d+)?", n)]
        found.sort(key=natural)
        having = layers if len(layers) == len(found) else [n for n in layers if _has_weights(n)]
        if len(having) != len(found):
            raise ConversionError(
                f"Expected the weights of {len(having)} layers of the class "
                f"{layers[0].class_name} (got {len(found)}: {', '.join(found[:3]) or 'none'})"
            )
        for layer, name in zip(having, found, strict=True):
            if layer.model is not None:
                _bind_numbered(layer.model, children[name])
            else:
                layer.keys = tuple(key for keys in children[name].values() for key in keys)


def _has_weights(layer: KerasLayer) -> bool:
    if layer.model is not None:
        return any(_has_weights(leaf) for leaf in layer.model.leaves)
    return bool(made_roles(layer))
