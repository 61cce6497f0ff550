"""Training models on zoos: options, data, Lightning, the folder of a run."""

from nfn_graph.tasks.training.options import Preset, TrainOptions
from nfn_graph.tasks.training.run import evaluate, train
from nfn_graph.tasks.training.task import Task

__all__ = ["Preset", "Task", "TrainOptions", "evaluate", "train"]
