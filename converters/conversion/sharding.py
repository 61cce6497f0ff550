"""Converts files to shards of a store, except those that are already in it.

Files are converted by this process, or by several processes that write their own shards.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nfn_graph import WeightGraph
from nfn_graph.converters.conversion.jobs import JobPart, run_parallel
from nfn_graph.converters.conversion.reading import Options, load_file
from nfn_graph.converters.store.architecture import Network, damaged_architecture, describe
from nfn_graph.converters.store.description import publishing
from nfn_graph.converters.store.reader import Store
from nfn_graph.converters.store.shards import PLACE, list_shards, read_shard, read_table
from nfn_graph.converters.store.verification import wrong_architectures
from nfn_graph.converters.store.writer import Row, StoreWriter
from nfn_graph.messages import reason_of

# With fewer files, starting processes takes longer than the work itself.
_PARALLEL_FROM = 32
# Jobs per process. With several, all processes finish at about the same time.
_JOBS_PER_WORKER = 4
# A shard is published when it is full, when its files have this size, or after this time.
_MOST_BYTES = 2**28
_MOST_SECONDS = 20.0


class Source(NamedTuple):
    """A file, and everything that determines its network.

    Attributes:
        file: The name of the network in the store.
        path: The path of the file.
        bytes: The size of the file; -1 if it does not exist.
        mtime_ns: The time of its last change.
        options: The options with which it is read, as JSON.
        labels: Its labels, in the order of their columns; None if they are missing.
    """

    file: str
    path: str
    bytes: int
    mtime_ns: int
    options: str
    labels: tuple[Any, ...] | None = ()


# The columns of the store's table for the fields of a source.
KEPT = Source._fields[:-1]


Result = tuple[Source, str | None]
Results = Generator[Result, None, None]


class Job(NamedTuple):
    """Files, and the name of the shard that they are written to."""

    name: str
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class Conversion:
    """A function that does jobs, with their common settings."""

    out: Path
    options: Options
    shard_size: int
    types: Mapping[str, Any] = field(default_factory=dict)
    graphs: Mapping[str, WeightGraph] = field(default_factory=dict)

    def __call__(self, job: Job) -> list[Result]:
        """Does a job. Returns for every file why it failed, or None."""
        return list(self.results(job))

    def results(self, job: Job) -> Results:
        """Yields results one by one; closing this publishes the networks read so far."""
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
        """Returns the row of a network in the store's table."""
        return dict(zip((*KEPT, *self.types), (*source[:-1], *(source.labels or ())), strict=True))

    def _publish(self, writer: StoreWriter, name: str, networks: list[tuple[Row, Network]]) -> None:
        with publishing(self.out):
            writer.publish(name, networks)


def convert_sources(
    conversion: Conversion, sources: Sequence[Source], workers: int, *, first: int, suffix: str
) -> Results:
    """Converts files; a file that kills its process does not affect other files."""
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
    """Returns the files of a job that are already in the store, and the number of their shards."""
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
    """Divides the files into jobs."""
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


def find_sources(paths: Sequence[Path], given: Sequence[Path], options: Options) -> list[Source]:
    """Returns the files in the order of their names, by which machines divide them.

    Args:
        paths: The files.
        given: The files and folders that the user passed. Names start below their common parent, so
            they do not change when a folder gets more files.
        options: The options for reading the files.
    """
    found = list(dict.fromkeys(map(located_file, paths)))
    folders = [_folder(path if path.is_dir() else path.parent) for path in given]
    root = Path(os.path.commonpath(folders))
    how = json.dumps(list(asdict(options).values()))
    sources = []
    for path in found:
        name = path.relative_to(root).as_posix()
        try:
            state = path.stat()
            sources.append(Source(name, str(path), state.st_size, state.st_mtime_ns, how))
        except (OSError, ValueError):  # The error is reported when the file is read.
            sources.append(Source(name, str(path), -1, 0, how))
    return sorted(sources, key=lambda source: source[:2])


def located_file(path: Path) -> Path:
    """Returns the absolute path of a file, with the links that the user sees."""
    return _folder(path.parent) / path.name


def source_of(name: str, graph: WeightGraph) -> Source:
    """Returns a source for a graph instead of a file; it is changed if its content changed."""
    network = describe(graph, {})
    content = hashlib.sha256(f"{network.architecture.name}/{network.notes}".encode())
    for tensor in network.tensors:
        content.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return Source(name, f"graph:{name}", 0, 0, content.hexdigest())


def label_columns(table: Any) -> list[str]:
    """Returns the columns of a store's table that hold labels."""
    return [name for name in table.column_names if name not in (*KEPT, *PLACE)]


def known_sources(out: Path, labels: Sequence[str] = (), *, repair: bool) -> Mapping[str, Source]:
    """Returns the sources of the networks of a store, by name.

    Args:
        out: The store.
        labels: The columns of labels to compare.
        repair: Whether networks are written again, which also repairs damaged architectures.
    """
    if not list_shards(out):
        return {}
    store = Store(out)
    names = {name for shard in store.shards for name in shard.architectures}
    wrong = None if repair else next(wrong_architectures(out, names), None)
    if wrong is not None:
        raise damaged_architecture(wrong.path, wrong.got)
    table = store.table
    nothing = [None] * len(store)
    kept = (table.column(name).to_pylist() for name in KEPT)
    values = [table.column(n).to_pylist() if n in table.column_names else nothing for n in labels]
    rows = zip(*values, strict=True) if values else [()] * len(store)
    known = zip(*kept, rows, strict=True)
    return {source[0]: Source(*source) for source in known}


class Plan(NamedTuple):
    """The decision for every file of a part.

    Attributes:
        work: Files to convert, under the names of their networks.
        skipped: Files that were converted before, or are links to others.
        refused: Files that are not converted, with the reason.
    """

    work: list[Source]
    skipped: list[Source]
    refused: list[tuple[Source, str]]


def divide(
    sources: Sequence[Source], known: Mapping[str, Source], part: JobPart, overwrite: bool
) -> Plan:
    """Decides which files of a part are converted.

    Args:
        sources: All files, in order.
        known: The sources of the networks in the store, by name.
        part: The part of the files to convert.
        overwrite: Whether to convert files again, and to replace networks of other files that have
            the same name.
    """
    names = {real_path(before): before.file for before in known.values()}
    # Only the first of several links to one file is converted. Machines divide the files before
    # this.
    listed = {real_path(source): source for source in reversed(sources)}
    plan = Plan([], [], [])
    for new in sources[part.number :: part.total]:
        real = real_path(new)
        source = new._replace(file=names.get(real, new.file))
        before = known.get(source.file)
        is_done = before is not None and before._replace(path=source.path) == source
        if listed[real] != new or (is_done and real in names and not overwrite):
            plan.skipped.append(source)
        elif not _is_text(source.path):
            reason = (
                f"Expected a path in UTF-8 (got {source.path!r}). Rename the file or its folder"
            )
            plan.refused.append((source, reason))
        elif source.labels is None:
            plan.refused.append(
                (source, "Expected a row for this file among the labels (got none)")
            )
        elif before is None or real in names or (overwrite and real_path(before) not in listed):
            plan.work.append(source)
        else:
            reason = _refusal(source, before, real_path(before) in listed)
            plan.refused.append((source, reason))
    return plan


def real_path(source: Source) -> str:
    """Returns the path of a file with all links resolved."""
    try:
        return os.path.realpath(source.path)
    except (OSError, ValueError):  # An invalid path is reported when the file is read.
        return source.path


def _refusal(source: Source, before: Source, is_together: bool) -> str:
    """Explains that a file is not converted because another file's network has its name."""
    instead = "" if is_together else ", convert both at once, or replace it with --overwrite"
    return (
        f"Expected the name '{source.file}' to be free for the network of '{source.path}' (got "
        f"the network of '{before.path}'). Choose another --out{instead}."
    )


def earlier(source: Source, before: Source | None) -> str:
    """Says that the store still has the previous network of a file that can no longer be read."""
    if before is None or real_path(source) != real_path(before):
        return ""
    return f" The network of its previous content is still in the store as '{source.file}'."


def _is_text(path: str) -> bool:
    """Whether a path can be stored in a table; file names may contain any bytes."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _folder(path: Path) -> Path:
    # Paths without '..' keep their links, so that names are those that the user sees.
    return path.resolve() if ".." in path.parts else path.absolute()
