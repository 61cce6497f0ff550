"""Converts Keras models, from their configuration or with PyTorch's names, and back."""
