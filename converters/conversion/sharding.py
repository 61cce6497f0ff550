"""Files to shards of a store: by this process, or by several that write shards of their own."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from nfn_graph import WeightGraph
from nfn_graph.converters.conversion.reading import Options, load_file
from nfn_graph.converters.jobs import run_parallel
from nfn_graph.converters.store.architecture import Network
from nfn_graph.converters.store.lock import publishing
from nfn_graph.converters.store.shards import read_shard, read_table
from nfn_graph.converters.store.writer import Row, StoreWriter
from nfn_graph.messages import reason_of

# Below this many files, starting processes takes longer than the work.
_PARALLEL_FROM = 32
# Jobs per process: so many that all of them end at about the same time.
_JOBS_PER_WORKER = 4
# A shard is published when it is full, or holds files of this size, or has taken this long.
_MOST_BYTES = 2**28
_MOST_SECONDS = 20.0


class Source(NamedTuple):
    """A file, and all that decides what its network is.

    Attributes:
        file: The name of the network in the store.
        path: Where the file lies.
        bytes: Its size; -1 if there is no such file.
        mtime_ns: When it was changed last.
        options: How it is read, as JSON.
        labels: Its labels, in the order of their columns; None if it should have some and has none.
    """

    file: str
    path: str
    bytes: int
    mtime_ns: int
    options: str
    labels: tuple[Any, ...] | None = ()


# Columns of the store's table that the fields of a source are kept in.
KEPT = Source._fields[:-1]


Result = tuple[Source, str | None]
Results = Generator[Result, None, None]


class Job(NamedTuple):
    """Files, and the name of the shard that they go to."""

    name: str
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class Conversion:
    """How jobs are done.

    Args:
        out: The store.
        options: How files are read.
        shard_size: Networks per shard at most.
        types: The columns of labels with their types, as of arrow.
        graphs: Networks that are not read from files, by name.
    """

    out: Path
    options: Options
    shard_size: int
    types: Mapping[str, Any] = field(default_factory=dict)
    graphs: Mapping[str, WeightGraph] = field(default_factory=dict)

    def __call__(self, job: Job) -> list[Result]:
        """Does a job: for every file, why it failed, or None."""
        return list(self.results(job))

    def results(self, job: Job) -> Results:
        """The results as they come; what was read is published when this is closed, too."""
        writer = StoreWriter(self.out, {}, self.types)
        done, pieces = published(writer, job.name)
        waiting: list[tuple[Row, Network]] = []
        size, start = 0, time.monotonic()
        try:
            for source in job.sources:
                if source.file in done:
                    yield source, None
                    continue
                try:
                    graph = self.graphs.get(source.file)
                    if graph is None:
                        graph = load_file(Path(source.path), self.options)
                    network = writer.describe(graph)
                except Exception as error:
                    yield source, reason_of(error)
                    continue
                waiting.append((self.row(source), network))
                size += source.bytes
                is_full = len(waiting) >= self.shard_size or size >= _MOST_BYTES
                if is_full or time.monotonic() - start >= _MOST_SECONDS:
                    self._publish(writer, _piece(job.name, pieces), waiting)
                    waiting, size, start, pieces = [], 0, time.monotonic(), pieces + 1
                yield source, None
        finally:
            if waiting:
                self._publish(writer, _piece(job.name, pieces), waiting)

    def row(self, source: Source) -> Row:
        """The row of a network in the store's table."""
        return dict(zip((*KEPT, *self.types), (*source[:-1], *(source.labels or ())), strict=True))

    def _publish(self, writer: StoreWriter, name: str, networks: list[tuple[Row, Network]]) -> None:
        with publishing(self.out):
            writer.publish(name, networks)


def convert_sources(
    conversion: Conversion, sources: Sequence[Source], workers: int, *, first: int, suffix: str
) -> Results:
    """Converts files; a file that kills its process costs no other file.

    Args:
        conversion: How.
        sources: The files.
        workers: How many processes.
        first: The number of the first shard.
        suffix: What the names of shards end in.
    """
    names = (f"{number:06d}{suffix}" for number in count(first))
    if workers == 1 or len(sources) < _PARALLEL_FROM:
        with closing(conversion.results(Job(next(names), tuple(sources)))) as results:
            yield from results
        return
    writer = StoreWriter(conversion.out, {})
    jobs = [Job(next(names), part) for part in _divide(sources, workers, conversion.shard_size)]
    while jobs:
        again: list[Job] = []
        for job, found in run_parallel(conversion, jobs, min(workers, len(jobs)), __name__):
            if found is not None:
                yield from found
                continue
            done, _ = published(writer, job.name)
            left = [source for source in job.sources if source.file not in done]
            yield from ((source, None) for source in job.sources if source.file in done)
            if len(left) == 1:
                yield left[0], "Expected a file that can be read (got one that kills the process)"
            elif left:
                halves = left[: len(left) // 2], left[len(left) // 2 :]
                again += [Job(next(names), tuple(half)) for half in halves]
        jobs = again


def published(writer: StoreWriter, name: str) -> tuple[set[str], int]:
    """The files of a job that are in the store already, and in how many shards."""
    files: set[str] = set()
    piece = 0
    while writer.is_done(shard := _piece(name, piece)):
        table = read_table(writer.folder, read_shard(writer.folder, shard))
        files.update(table.column("file").to_pylist())
        piece += 1
    return files, piece


def _piece(name: str, number: int) -> str:
    return f"{name}_{number}" if number else name


def _divide(
    sources: Sequence[Source], workers: int, shard_size: int
) -> Iterator[tuple[Source, ...]]:
    """The files in parts for a job each."""
    most = min(shard_size, math.ceil(len(sources) / (_JOBS_PER_WORKER * workers)))
    part: list[Source] = []
    size = 0
    for source in sources:
        if len(part) == most or (part and size + source.bytes > _MOST_BYTES):
            yield tuple(part)
            part, size = [], 0
        part.append(source)
        size += source.bytes
    yield tuple(part)
