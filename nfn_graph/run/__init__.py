"""Running networks from their graphs: a batch of any mixture of sizes at once."""

from nfn_graph.run._evaluation import evaluate
from nfn_graph.run._operations import ENTRYWISE, OPERATIONS, leaves
from nfn_graph.run._run import Inputs, Outputs, run

__all__ = ["ENTRYWISE", "OPERATIONS", "Inputs", "Outputs", "evaluate", "leaves", "run"]
