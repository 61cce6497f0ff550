"""Runs networks from their graphs, including batches of networks of different sizes."""

from nfn_graph.run._evaluation import evaluate
from nfn_graph.run._operations import ENTRYWISE, OPERATIONS, leaves
from nfn_graph.run._run import Inputs, Outputs, run

__all__ = ["ENTRYWISE", "OPERATIONS", "Inputs", "Outputs", "evaluate", "leaves", "run"]
