"""Keras models: followed by their configuration, or read under PyTorch's names; and back."""
