"""File formats: each module reads a file into named tensors and writes named tensors back.

No reader runs code that is in a file, follows references to other files, or allocates what a
file merely declares. What cannot be read raises `ConversionError` with the file's name.
"""
