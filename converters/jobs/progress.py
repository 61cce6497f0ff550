"""The progress bar of commands that go through many networks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on the error stream, if that is a terminal; the function adds to its count.

    Args:
        what: What is being done.
        total: To how many.
    """
    messages = Console(stderr=True, highlight=False)
    with Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=messages,
        transient=True,
        disable=not messages.is_terminal,
    ) as progress:
        task = progress.add_task("", total=total)
        yield lambda count: progress.advance(task, count)
