"""Work of many parts: divided between processes and machines, with a bar that counts them.

A job is one shard of a conversion or of a zoo. It publishes its result in one step, or not at
all, and leaves alone what is there: it can be run again on another machine if one dies. Jobs run
in this process, in several processes of this machine, or on the user's Ray cluster.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.context import BaseContext
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch

from nfn_graph.converters.errors import require
from nfn_graph.messages import UserError

Engine = Literal["local", "processes", "ray"]
Job = TypeVar("Job")
Result = TypeVar("Result")
# How often a job is begun again whose worker died.
_RETRIES = 5
_QUEUED_PER_WORKER = 4


class JobPart(NamedTuple):
    """One of several parts of the work.

    Attributes:
        number: Which one, from 0.
        total: The number of all items.
    """

    number: int
    total: int

    @classmethod
    def parse(cls, text: str) -> JobPart:
        """The part that `--shard 2/4` names: the second of four."""
        first, slash, second = text.partition("/")
        if slash and first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second):
            return cls(int(first) - 1, int(second))
        raise UserError(f"Expected --shard as I/N with 1 <= I <= N (got '{text}')")

    @property
    def suffix(self) -> str:
        """What tells its files from those of other parts; nothing if it is all of the work."""
        return "" if self.total == 1 else f"-{self.number + 1}of{self.total}"


@contextmanager
def counting(what: str, total: int, *, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar on the error stream, if that is a terminal; the function adds to its count."""
    if not shown or not total:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    messages = Console(stderr=True, highlight=False)
    with Progress(
        # A folder may be called [red], which is no style.
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=messages,
        transient=True,
        disable=not messages.is_terminal,
    ) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


def run_jobs(
    function: Callable[[Job], Result],
    jobs: Sequence[Job],
    engine: Engine = "local",
    *,
    gpus: int = 0,
) -> Iterator[tuple[Job, Result]]:
    """Every job with its result, as it is done.

    Args:
        function: What to call; it never returns None. For Ray, it and the jobs are sent to the
            workers, on which this package is installed and which see the same files.
        jobs: Its arguments.
        engine: `local` runs them in turn in this process; `processes` in one process for each
            core; `ray` as tasks on the cluster that `RAY_ADDRESS` names or that runs on this
            machine, or else on this machine's cores.
        gpus: GPUs that a job needs, on Ray.
    """
    if engine == "local":
        yield from ((job, function(job)) for job in jobs)
        return
    if engine == "processes":
        yield from _run_in_processes(function, jobs)
        return
    if engine != "ray":
        raise UserError(f"Expected an engine: {', '.join(get_args(Engine))} (got '{engine}')")
    with _cluster() as ray:
        yield from _run_on(ray, function, jobs, gpus)


def _run_in_processes(
    function: Callable[[Job], Result], jobs: Sequence[Job]
) -> Iterator[tuple[Job, Result]]:
    workers = max(1, min(len(jobs), os.cpu_count() or 1))
    for job, result in run_parallel(function, jobs, workers, preload=__name__):
        if result is None:
            raise ChildProcessError(
                f"Expected a process to finish its job (got one that was killed, perhaps for want "
                f"of memory, at {job!r}). What is finished is kept: give the same command again to "
                f"go on."
            )
        yield job, result


def _run_on(
    ray: Any, function: Callable[[Job], Result], jobs: Sequence[Job], gpus: int
) -> Iterator[tuple[Job, Result]]:
    task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=_RETRIES)(_call)
    # Sent once, with the data that it may hold, not once for every job.
    shared = ray.put(function)
    running = {task.remote(shared, job): job for job in jobs}
    try:
        while running:
            (done, *_), _ = ray.wait(list(running))
            yield running[done], _result(ray, done)
            del running[done]
    finally:
        for left in running:
            ray.cancel(left, force=True)


def _call(function: Callable[[Job], Result], job: Job) -> Result:
    return function(job)


def _result(ray: Any, done: Any) -> Any:
    try:
        return ray.get(done)
    except ray.exceptions.RayTaskError as error:
        # What the job itself raised, as it would be without Ray.
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise ChildProcessError(
            f"Expected a worker of the Ray cluster to finish its job (got, after {_RETRIES} "
            f"retries, {type(error).__name__}). What is finished is kept: give the same command "
            f"again to go on."
        ) from error


@contextmanager
def _cluster() -> Iterator[Any]:
    """Ray, connected to a cluster; a connection that was there stays."""
    ray = require("ray", "to run on a Ray cluster", "ray")
    if ray.is_initialized():
        yield ray
        return
    # A cluster that is started here tells nobody.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(include_dashboard=False, logging_level="error")
    try:
        yield ray
    finally:
        ray.shutdown()


def run_parallel(
    function: Callable[[Job], Result], jobs: Sequence[Job], workers: int, preload: str
) -> Iterator[tuple[Job, Result | None]]:
    """The result of every job as it is done; None for one that kills its process.

    Args:
        function: What to call, importable by its name.
        jobs: Its arguments, hashable.
        workers: How many processes.
        preload: The module that processes start with, imported once for all.
    """
    left = dict.fromkeys(jobs)
    in_order = False
    while left:
        try:
            for job, result in _run_pool(function, list(left), 1 if in_order else workers, preload):
                del left[job]
                yield job, result
        except BrokenProcessPool:
            if in_order:
                # One process takes them in order, so the first one left is to blame.
                job = next(iter(left))
                del left[job]
                yield job, None
            in_order = not in_order


def _run_pool(
    function: Callable[[Job], Result], jobs: Sequence[Job], workers: int, preload: str
) -> Iterator[tuple[Job, Result]]:
    with ProcessPoolExecutor(workers, _context(preload), initializer=_start_worker) as pool:
        try:
            yield from _run_jobs(pool, function, jobs, _QUEUED_PER_WORKER * workers)
        except BrokenProcessPool:
            # One that was started while the pool broke would wait for jobs, and the pool for it.
            for process in list((pool._processes or {}).values()):
                process.kill()
            raise


def _run_jobs(
    pool: ProcessPoolExecutor, function: Callable[[Job], Result], jobs: Sequence[Job], most: int
) -> Iterator[tuple[Job, Result]]:
    running: dict[Future[Result], Job] = {}
    waiting = iter(jobs)
    while True:
        while len(running) < most:
            job = next(waiting, None)
            if job is None:
                break
            running[pool.submit(function, job)] = job
        if not running:
            return
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in [future for future in running if future in done]:
            yield running[future], future.result()
            del running[future]


def _context(preload: str) -> BaseContext:
    """How processes start: as copies of a server that has imported a module once."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    return context


def _start_worker() -> None:
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this process when the one that gives it work is gone, however it went."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
