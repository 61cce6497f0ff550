"""File formats: each module reads a file into named tensors and writes named tensors back.

No reader runs code from a file, follows references to other files, or allocates memory that a file
merely declares. A file that cannot be read raises a `ConversionError` with its name.
"""
