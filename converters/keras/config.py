"""The configuration of a Keras model: its layers, their options, and how they are joined."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nfn_graph.converters.errors import ConversionError

# Models are nested at most so deep.
_DEEPEST = 16
_MODELS = ("Sequential", "Functional", "Model")


class Source(NamedTuple):
    """A value of a functional model: the layer, which of its calls, which of its results."""

    layer: str
    call: int
    result: int


class Call(NamedTuple):
    """One use of a layer in a functional model.

    Attributes:
        sources: What it reads.
        others: Arguments that are no values of the model and not left out.
    """

    sources: tuple[Source, ...]
    others: tuple[Any, ...]


@dataclass(eq=False)
class KerasLayer:
    """A layer of a model.

    Args:
        name: Its name, unique in its model.
        class_name: Its class, without the module that it comes from.
        options: What it was made with.
        calls: Its uses, in a functional model.
        model: The model that it is, if it is one.
        is_custom: Whether its class is none of Keras's own.
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
        """An option that is true or false."""
        value = self.options.get(name)
        return default if value is None else bool(value)

    def integer(self, name: str, default: int) -> int:
        """An option that is a whole number."""
        return self.integers(name, [default])[0]

    def integers(self, name: str, default: list[int]) -> list[int]:
        """An option that is a whole number or several."""
        value = self.options.get(name)
        if value is None:
            return default
        values = value if isinstance(value, list) else [value]
        if not values or not all(type(item) is int and abs(item) < 2**31 for item in values):
            raise ConversionError(
                f"Expected whole numbers as '{name}' of layer '{self.name}' (got {value!r:.60})"
            )
        return list(values)

    def text(self, name: str, default: str) -> str:
        """An option that is a word."""
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
        """All layers that are not models, also those of models inside."""
        for layer in self.layers:
            if layer.model is None:
                yield layer
            else:
                yield from layer.model.leaves


def parse_model(config: Any, depth: int = 0) -> KerasModel:
    """The model that a configuration describes.

    Raises:
        ConversionError: It describes none: the model is a class of its author's, or damaged.
    """
    class_name, inner = _class_and_options(config)
    described = inner.get("layers") if isinstance(inner, Mapping) else inner
    if depth > _DEEPEST or class_name not in _MODELS or not isinstance(described, list):
        raise ConversionError(
            f"Expected a Sequential or functional model, whose configuration says how its layers "
            f"are joined (got a model of the class {class_name!r:.60})"
        )
    names: dict[str, None] = {}
    layers = []
    for item in described:
        layer = _parse_layer(item, depth)
        if layer.name in names:
            raise ConversionError(f"Expected layers with names of their own (got '{layer.name}')")
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
    """The shape of the inputs that a layer was made for, with the batch; None if unknown."""
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
    # Classes of others are registered as `package>Class`.
    registered, module = item.get("registered_name"), item.get("module")
    is_custom = ">" in f"{registered}{class_name}" or (
        isinstance(module, str) and not re.match(r"(keras|tf_keras|tensorflow)\b", module)
    )
    is_model = class_name in _MODELS and isinstance(options.get("layers"), list)
    model = parse_model(item, depth + 1) if is_model and not is_custom else None
    return KerasLayer(name, class_name, options, (), model, is_custom)


def _add_input_shape(inner: Any, layers: list[KerasLayer]) -> None:
    """A Sequential may note the shape that it was built with, instead of its first layer."""
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
    """The values that a description of inputs names, in the forms of Keras 2 and 3."""
    if isinstance(node, Mapping):
        history = node.get("config")
        if node.get("class_name") == "__keras_tensor__" and isinstance(history, Mapping):
            yield from _sources(history.get("keras_history"), names, others)
            return
        for key, value in node.items():
            # Whether the network is being trained, and masks that are none, change nothing.
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
