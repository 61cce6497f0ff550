"""What the configuration of a Keras model says about its topology."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nfn_graph.converters.chain import FlattenOrder
from nfn_graph.converters.errors import ConversionError

# Layers that keep the order of channels and join one layer to the next.
_CHAIN_LAYERS = re.compile(
    r"InputLayer|Dense|Conv[123]D|DepthwiseConv[12]D|SeparableConv[12]D|BatchNormalization|"
    r"Activation|ReLU|LeakyReLU|ELU|ThresholdedReLU|Softmax|Dropout|SpatialDropout[123]D|"
    r"AlphaDropout|GaussianDropout|GaussianNoise|ActivityRegularization|Flatten|Rescaling|"
    r"(Global)?(Max|Average)Pooling[123]D|ZeroPadding[123]D|Cropping[123]D|UpSampling[123]D"
)


def layer_classes(config: Mapping[str, Any] | None) -> dict[str, str]:
    """The class of every layer by its name; empty without a configuration."""
    return {} if config is None else {name: cls for name, cls, _ in _layers(config)}


def check_chain(path: Path, config: Mapping[str, Any]) -> FlattenOrder:
    """Refuses a model whose weights alone do not show how its layers are joined.

    Returns:
        The order of the entries after a flatten.
    """
    for name, class_name, options in _layers(config):
        if not _CHAIN_LAYERS.fullmatch(class_name):
            raise ConversionError(
                f"Expected a chain of layers in '{path}' (got layer '{name}' of the class "
                f"{class_name}). Give the network as a PyTorch module: arch=..."
            )
        if options.get("groups", 1) != 1:
            raise ConversionError(
                f"Expected convolutions without groups in '{path}' (got layer '{name}' with "
                f"{options['groups']} groups, whose channels cannot be permuted freely)"
            )
    if config.get("class_name") != "Sequential":
        _check_single_parents(path, config)
    formats = {
        str(options["data_format"])
        for _, _, options in _layers(config)
        if options.get("data_format") is not None
    }
    if len(formats) > 1:
        raise ConversionError(
            f"Expected one data_format of all layers in '{path}' (got {sorted(formats)})"
        )
    return "channels_first" if formats == {"channels_first"} else "channels_last"


def _layers(config: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    inner = config.get("config")
    layers = inner.get("layers", []) if isinstance(inner, Mapping) else inner
    for layer in layers if isinstance(layers, list) else []:
        if isinstance(layer, Mapping) and isinstance(layer.get("config"), Mapping):
            options = layer["config"]
            name = layer.get("name", options.get("name", ""))
            yield str(name), str(layer.get("class_name")), options


def _check_single_parents(path: Path, config: Mapping[str, Any]) -> None:
    """A functional model is a chain if every layer has one parent that no other layer has."""
    layers = config["config"]["layers"]
    names = {name for name, _, _ in _layers(config)}
    seen: dict[str, str] = {}
    for (name, _, _), layer in zip(_layers(config), layers, strict=True):
        parents = list(_parents(layer.get("inbound_nodes", []), names))
        if len(parents) > 1 or any(parent in seen for parent in parents):
            parent = next((p for p in parents if p in seen), name)
            raise ConversionError(
                f"Expected a chain of layers in '{path}' (got a branch at layer '{parent}'). "
                f"Give the network as a PyTorch module: arch=..."
            )
        seen.update(dict.fromkeys(parents, name))


def _parents(node: Any, names: set[str]) -> Iterator[str]:
    """The layers that a description of inputs names, in the forms of Keras 2 and 3."""
    if isinstance(node, Mapping):
        for value in node.values():
            yield from _parents(value, names)
    elif isinstance(node, list):
        if len(node) >= 3 and isinstance(node[0], str) and isinstance(node[1], int):
            if node[0] in names:
                yield node[0]
        else:
            for value in node:
                yield from _parents(value, names)
