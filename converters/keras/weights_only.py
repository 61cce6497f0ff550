"""The chain of layers that a Keras file without a configuration can only be."""

from __future__ import annotations

from collections.abc import Iterator

from nfn_graph.converters.chain import FlattenOrder
from nfn_graph.converters.chain.topology import NamedWeight, check_chain, check_names
from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files.keras import KerasFile
from nfn_graph.converters.keras.config import KerasLayer, KerasModel
from nfn_graph.converters.keras.counted import in_order
from nfn_graph.converters.keras.keys import by_layer, shown_layer
from nfn_graph.converters.keras.links import (
    Ends,
    are_flattened,
    class_of,
    default_class,
    ends_of,
    is_spatial,
    refuse_chain,
)


def read_chain(file: KerasFile, flatten: FlattenOrder | None) -> KerasModel:
    """The layers of a file as a Sequential model.

    Args:
        file: A file without a configuration.
        flatten: The order of the entries between a convolution and a dense layer, if known.
    """
    found = list(_leaves(file))
    for layer in found:
        layer.class_name = class_of(layer, file.tensors)
    if sum(layer.class_name == "InputLayer" for layer in found) > 1:
        raise refuse_chain("several inputs")
    if not file.is_ordered:
        found = in_order(found, file.tensors)
    layers: list[KerasLayer] = []
    chain: list[tuple[KerasLayer, Ends]] = []
    for layer in found:
        ends = ends_of(layer, file.tensors)
        is_flat = any(before.class_name in ("Flatten", "Dense") for before in layers)
        if ends is not None:
            if chain and are_flattened(chain[-1], (layer, ends)):
                if flatten is None:
                    raise _unknown_order(layer, ends, chain[-1][1])
                if not is_flat:
                    layers.append(KerasLayer("flatten", "Flatten"))
            chain.append((layer, ends))
        has_images = any(is_spatial(before) for before in layers) and not is_flat
        # Entries are flattened as they lie.
        if layer.class_name != "Flatten":
            order = flatten or "channels_last"
            is_first = order == "channels_first" and has_images
            layer.options = {"data_format": order, "axis": 1 if is_first else -1}
        layers.append(layer)
    check_names([f"{n.name}.weight" for n, _ in chain if default_class(n.name) is None])
    if chain:
        check_chain([_named(layer, ends) for layer, ends in chain])
    return KerasModel(layers)


def _leaves(file: KerasFile) -> Iterator[KerasLayer]:
    """The layers; a model inside lists only those of its layers with weights."""
    for group, keys in file.layers.items():
        inside = by_layer(keys)
        if len(inside) < 2:
            name = group if file.is_ordered else shown_layer(group)
            yield KerasLayer(name, "", keys=tuple(keys))
            continue
        for path, found in inside.items():
            yield KerasLayer(shown_layer(path), "", keys=tuple(found))


def _named(layer: KerasLayer, ends: Ends) -> NamedWeight:
    is_square = is_spatial(layer) and ends.inputs == ends.outputs > 1
    return NamedWeight(
        f"{layer.name}.weight", *ends, is_square and default_class(layer.name) is None
    )


def _unknown_order(layer: KerasLayer, ends: Ends, before: Ends) -> ConversionError:
    return ConversionError(
        f"Expected flatten='channels_first' or flatten='channels_last' (got none). The "
        f"{ends.inputs} inputs of '{layer.name}' are {before.outputs} channels times "
        f"{ends.inputs // before.outputs} positions, in either order; Keras's own is channels_last"
    )
