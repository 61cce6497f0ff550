"""Divides work into jobs for processes and machines, with a progress bar.

A job is one shard of a conversion or of a zoo. It publishes its result in one step or not at all,
and never changes what is already published, so it can be run again on another machine if one dies.
Jobs run in this process, in several processes of this machine, or on the user's Ray cluster.
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
# How often a job is restarted if its worker died.
_RETRIES = 5
_QUEUED_PER_WORKER = 4


class JobPart(NamedTuple):
    """One of several parts of the work.

    Attributes:
        number: The number of the part, from 0.
        total: The number of parts.
    """

    number: int
    total: int

    @classmethod
    def parse(cls, text: str) -> JobPart:
        """Parses the value of `--shard`: 2/4 is the second of four parts."""
        first, slash, second = text.partition("/")
        if slash and first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second):
            return cls(int(first) - 1, int(second))
        raise UserError(f"Expected --shard as I/N with 1 <= I <= N (got '{text}')")

    @property
    def suffix(self) -> str:
        """The suffix of its files, different for every part; empty if there is only one part."""
        return "" if self.total == 1 else f"-{self.number + 1}of{self.total}"


@contextmanager
def counting(what: str, total: int, *, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar if stderr is a terminal, and yields a function that advances it."""
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
        # A folder may be called [red], which must not be taken for markup.
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
    """Yields every job with its result, as soon as it is finished.

    Args:
        function: The function to call, which must not return None. For Ray, the function and the
            jobs are sent to the workers, which must have this package installed and see the same
            files.
        jobs: The arguments of the function.
        engine: `local` runs the jobs one after the other in this process, and `processes` in one
            process per core. `ray` runs them as tasks on the cluster named by `RAY_ADDRESS`, on a
            cluster that runs on this machine, or otherwise on the cores of this machine.
        gpus: The number of GPUs that a job needs on Ray.
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
                f"Expected a process to finish its job (got one that was killed, perhaps because "
                f"memory ran out, at {job!r}). Finished work is kept. Run the same command again "
                f"to continue."
            )
        yield job, result


def _run_on(
    ray: Any, function: Callable[[Job], Result], jobs: Sequence[Job], gpus: int
) -> Iterator[tuple[Job, Result]]:
    task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=_RETRIES)(_call)
    # Sent once, together with its data, and not once for every job.
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
        # Raise the error of the job itself, as without Ray.
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise ChildProcessError(
            f"Expected a worker of the Ray cluster to finish its job (got, after {_RETRIES} "
            f"retries, {type(error).__name__}). Finished work is kept. Run the same command again "
            f"to continue."
        ) from error


@contextmanager
def _cluster() -> Iterator[Any]:
    """Yields Ray connected to a cluster; an existing connection is used and stays open."""
    ray = require("ray", "to run on a Ray cluster", "ray")
    if ray.is_initialized():
        yield ray
        return
    # A cluster that is started here sends no usage statistics.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(include_dashboard=False, logging_level="error")
    try:
        yield ray
    finally:
        ray.shutdown()


def run_parallel(
    function: Callable[[Job], Result], jobs: Sequence[Job], workers: int, preload: str
) -> Iterator[tuple[Job, Result | None]]:
    """Yields the result of every finished job; None for a job that kills its process.
    Args:
        function: The function to call, which must be importable by its name.
        jobs: The arguments of the function, which must be hashable.
        workers: The number of processes.
        preload: The module that is imported once before the processes are forked.
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
                # A single process takes the jobs in order, so the first unfinished one killed it.
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
            # A process started while the pool broke would wait for jobs forever, and the pool for
            # it.
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
    """Returns a context in which processes are forked from a server that imported a module once."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    return context


def _start_worker() -> None:
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this process when its parent process is gone, for whatever reason."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
