"""Many checkpoint files at once: found, read with the options of a command, put into a store."""

from nfn_graph.converters.conversion.converting import (
    Report,
    build_store,
    convert_files,
    report_file,
)
from nfn_graph.converters.conversion.reading import Options, find_files, load_file

__all__ = [
    "Options",
    "Report",
    "build_store",
    "convert_files",
    "find_files",
    "load_file",
    "report_file",
]
