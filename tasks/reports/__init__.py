"""Reports of runs: figures, one HTML page per run, and tables over runs and seeds.

.. code-block:: python

    scatter(run / "figures" / "scatter-test.png", true, predicted, title="test", tau=0.81)
    run_report(run)                                  # writes run/report.html
    print_table(compare([Path("runs")], out=Path("runs/compared")))
"""

from nfn_graph.tasks.reports.compare import compare, failed_runs, find_runs, print_table
from nfn_graph.tasks.reports.figures import bars, confusion, curves, progress, read_curves, scatter
from nfn_graph.tasks.reports.page import Section, Shown, Table, write_report
from nfn_graph.tasks.reports.run_page import repeat_command, run_report
from nfn_graph.tasks.reports.runs import Run, read_run

__all__ = [
    "Run",
    "Section",
    "Shown",
    "Table",
    "bars",
    "compare",
    "confusion",
    "curves",
    "failed_runs",
    "find_runs",
    "print_table",
    "progress",
    "read_curves",
    "read_run",
    "repeat_command",
    "run_report",
    "scatter",
    "write_report",
]
