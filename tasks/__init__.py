"""Tasks: what weight graphs are good for, end to end.

This room holds the experiments: it builds collections of trained networks, trains models on their
weights and reports how well they do. It uses the core and the converters, and neither of them
knows about it.
"""
