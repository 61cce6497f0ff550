"""Converters: from networks as people keep them to weight graphs, and back without loss.

This room reads modules, state dicts and checkpoint files, finds out which axes of which tensors
belong to the same neurons, and builds the `WeightGraph` that says so. It knows about file formats
and architectures so that the core need not; it uses the core and never the tasks.
"""
