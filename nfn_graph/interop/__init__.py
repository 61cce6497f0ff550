"""Bridges to other packages, one module for each, from which models and data come over.

Nothing is imported from the other package before it is needed.
"""

from nfn_graph.interop import nfn

__all__ = ["nfn"]
