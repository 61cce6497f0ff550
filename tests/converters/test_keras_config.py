"""What the configuration of a Keras model says about how its layers are joined."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.keras.config import check_chain

PATH = Path("model.h5")


def layer(name: str, kind: str = "Dense", **options: Any) -> dict[str, Any]:
    return {"class_name": kind, "name": name, "config": {"name": name, **options}}


def keras2(*parents: str) -> list[Any]:
    """`inbound_nodes` as Keras 2 writes them."""
    return [[[parent, 0, 0, {}] for parent in parents]] if parents else []


def keras3(*parents: str) -> list[Any]:
    """`inbound_nodes` as Keras 3 writes them."""
    tensors = [
        {"class_name": "__keras_tensor__", "config": {"keras_history": [parent, 0, 0]}}
        for parent in parents
    ]
    return [{"args": tensors, "kwargs": {}}] if parents else []


def functional(inbound: Any, *layers: tuple[str, tuple[str, ...]]) -> dict[str, Any]:
    described = [
        {
            **layer(name, "InputLayer" if not parents else "Dense"),
            "inbound_nodes": inbound(*parents),
        }
        for name, parents in layers
    ]
    return {"class_name": "Functional", "config": {"name": "model", "layers": described}}


@pytest.mark.parametrize("inbound", [keras2, keras3])
def test_a_functional_chain(inbound: Any) -> None:
    chain = functional(inbound, ("in", ()), ("a", ("in",)), ("b", ("a",)))
    assert check_chain(PATH, chain) == "channels_last"


@pytest.mark.parametrize("inbound", [keras2, keras3])
@pytest.mark.parametrize(
    ("layers", "where"),
    [
        ([("in", ()), ("a", ("in",)), ("b", ("in",))], "in"),
        ([("in", ()), ("a", ("in",)), ("b", ("in", "a"))], "in"),
        ([("in", ()), ("other", ()), ("b", ("in", "other"))], "b"),
    ],
    ids=["read twice", "skip", "two inputs"],
)
def test_a_branch_is_refused(inbound: Any, layers: Any, where: str) -> None:
    with pytest.raises(ConversionError, match=rf"model\.h5.*branch at layer '{where}'.*arch="):
        check_chain(PATH, functional(inbound, *layers))


def test_the_order_of_a_flatten() -> None:
    layers = [
        layer("conv", "Conv2D", data_format="channels_first"),
        layer("flat", "Flatten", data_format="channels_first"),
        layer("dense"),
    ]
    config = {"class_name": "Sequential", "config": {"layers": layers}}
    assert check_chain(PATH, config) == "channels_first"
    layers[0]["config"]["data_format"] = "channels_last"
    with pytest.raises(ConversionError, match="one data_format of all layers"):
        check_chain(PATH, config)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (layer("attention", "MultiHeadAttention"), "'attention' of the class MultiHeadAttention"),
        (layer("conv", "Conv2D", groups=2), "'conv' with 2 groups"),
    ],
)
def test_other_layers_are_refused(wrong: dict[str, Any], message: str) -> None:
    config = {"class_name": "Sequential", "config": {"layers": [layer("first"), wrong]}}
    with pytest.raises(ConversionError, match=message):
        check_chain(PATH, config)
