"""Tables on the terminal."""

from __future__ import annotations

from nfn_graph.converters.errors import require
from nfn_graph.tasks.reports.page import Table, is_number
from nfn_graph.tasks.reports.runs import format_value


def print_rows(table: Table) -> None:
    """Prints a table; names in it are shown as they are, whatever they hold."""
    rich, box = require("rich.table", "to print tables"), require("rich.box", "to print tables")
    text = require("rich.text", "to print tables").Text
    shown = rich.Table(
        title=text(table.caption) if table.caption else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for i, name in enumerate(table.columns):
        is_right = any(is_number(row[i]) for row in table.rows)
        shown.add_column(text(name), justify="right" if is_right else "left")
    for row in table.rows:
        shown.add_row(*(text(format_value(x)) for x in row))
    require("rich.console", "to print tables").Console().print(shown)
