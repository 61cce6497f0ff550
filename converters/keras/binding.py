"""Which tensors of a file belong to which layer of the model's configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files.keras import KerasFile
from nfn_graph.converters.keras.config import KerasLayer, KerasModel
from nfn_graph.converters.keras.keys import by_layer, natural, snake_case
from nfn_graph.converters.keras.roles import made_roles


def bind(model: KerasModel, file: KerasFile) -> None:
    """Notes the keys of every layer; every tensor of the file must find one."""
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
    """The group of a layer has its name; that of a model holds the tensors of all its layers."""
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
                f"Expected layers with names of their own inside '{layer.name}' (got several of "
                f"one name, whose tensors cannot be told apart)"
            )
        for leaf in layer.model.leaves:
            leaf.keys = tuple(inside.get(leaf.name, ()))


def _bind_numbered(model: KerasModel, groups: Mapping[str, Sequence[str]]) -> None:
    """The layers of a class are counted in their order: `dense`, `dense_1`, ..."""
    children: dict[str, dict[str, Sequence[str]]] = {}
    for path, keys in groups.items():
        # Of 'layers/dense' and of 'layers/model/layers/dense' the first two parts.
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
