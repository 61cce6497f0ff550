"""Converts many checkpoint files: finds them, reads them with a command's options, stores them."""

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
