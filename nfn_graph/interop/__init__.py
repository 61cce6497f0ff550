"""Imports models and data from other packages, with one module for each package.

The other package is not loaded before it is needed.
"""

from nfn_graph.interop import nfn

__all__ = ["nfn"]
