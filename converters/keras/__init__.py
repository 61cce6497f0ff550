"""Keras models: their layers in PyTorch's names and axis orders, and back."""

from nfn_graph.converters.keras.model import KERNEL_ORDER, from_keras, to_keras

__all__ = ["KERNEL_ORDER", "from_keras", "to_keras"]
