"""The table of presets in the manual lists the values of the code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nfn_graph.tasks.train import TASKS
from nfn_graph.tasks.training.options import TrainOptions

MANUAL = Path(__file__).resolve().parents[2] / "tasks" / "README.md"
HEAD = "| task | preset | channels | head | epochs | batch size | learning rate | schedule |"


def rows() -> Iterator[str]:
    """The rows that the table must have; tasks with the same presets share one."""
    tasks: dict[str, list[str]] = {}
    for name, task in TASKS.items():
        options: type[TrainOptions] = task.OPTIONS
        for preset, values in options.PRESETS.items():
            model = values.model
            cells = (
                f"`{preset}`",
                ", ".join(map(str, model.channels)),
                ", ".join(map(str, model.head)) or "-",
                str(values.epochs),
                str(values.batch_size),
                f"{values.learning_rate:g}",
                values.schedule,
            )
            tasks.setdefault(" | ".join(cells), []).append(name)
    yield from (f"| {', '.join(f'`{n}`' for n in names)} | {row} |" for row, names in tasks.items())


def test_table_of_presets() -> None:
    table = MANUAL.read_text("utf-8").partition(HEAD + "\n")[2].partition("\n\n")[0]
    assert set(table.splitlines()[1:]) == set(rows())
