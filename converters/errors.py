"""The one error of the converters."""


class ConversionError(ValueError):
    """A file, state dict or network that has no graph, with the reason and what to do."""
