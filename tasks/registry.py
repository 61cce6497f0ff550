"""The tasks by name: what `nfn-graph train` offers, and what runs are read again with."""

from __future__ import annotations

from typing import Any

from nfn_graph.tasks.classify import Classify
from nfn_graph.tasks.classify_inr import ClassifyInr
from nfn_graph.tasks.edit_inr import EditInr
from nfn_graph.tasks.predict_generalization import PredictGeneralization
from nfn_graph.tasks.regress import Regress
from nfn_graph.tasks.training.task import Task
from nfn_graph.tasks.winning_tickets import WinningTickets

TASKS: dict[str, type[Task[Any]]] = {
    task.name: task
    for task in (Regress, Classify, PredictGeneralization, ClassifyInr, EditInr, WinningTickets)
}
