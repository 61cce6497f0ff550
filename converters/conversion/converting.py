"""Many files at once: their networks are added to a store, those that are not there yet."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

from nfn_graph.converters.conversion.jobs import Conversion, convert_sources
from nfn_graph.converters.conversion.reading import Options
from nfn_graph.converters.conversion.sources import (
    divide,
    earlier,
    find_sources,
    known_sources,
)
from nfn_graph.converters.files.atomic import replacing
from nfn_graph.converters.jobs.engines import Engine, run_jobs
from nfn_graph.converters.jobs.parts import Part
from nfn_graph.converters.store.description import is_store, read_description
from nfn_graph.converters.store.lock import none_publishing, only_writer
from nfn_graph.converters.store.reader import Store
from nfn_graph.converters.store.shards import METADATA, SHARDS, WEIGHTS, list_shards, remove_shard
from nfn_graph.converters.store.writer import StoreWriter

# The column that names a network: if it is converted again, the newer one counts.
KEY = "file"
_DESCRIPTION = {"key": KEY}
# A file of a shard, or what a killed process left of one: its name, and the part.
_FILE = re.compile(r"(\.?)(\d{6}(-\d+of\d+)?(_\d+)?)(\.\w+)+")


@dataclass
class Report:
    """What became of the files."""

    converted: int = 0
    skipped: int = 0
    failed: dict[str, str] = field(default_factory=dict)


def convert_files(
    paths: Sequence[Path],
    out: Path,
    options: Options,
    *,
    given: Sequence[Path] = (),
    workers: int = 0,
    overwrite: bool = False,
    shard: str = "1/1",
    shard_size: int = 1024,
    on_done: Callable[[], None] = lambda: None,
) -> Report:
    """Adds the networks of files to a store, and writes `report.json` beside them.

    Args:
        paths: The files.
        out: The store's folder, made if need be.
        options: How to read them.
        given: The folders and files that `paths` were found in, if not `paths` themselves:
            networks are named as their files lie below the common parent of these. A file that
            is in the store keeps its name there.
        workers: Processes; 0 for one per core.
        overwrite: Whether to convert again what was converted before, and to replace networks
            of other files that have the same name.
        shard: The part of the files to convert, such as 2/4 for the second of four machines.
        shard_size: Networks per shard at most.
        on_done: Called after every file.
    """
    part = Part.parse(shard)
    _prepare(out, workers, shard_size)
    report = Report()
    with only_writer(out / f"convert{part.suffix}.lock", f"this part of '{out}'") as is_alone:
        if is_alone:
            _clean(out, part)
        known = known_sources(out, repair=overwrite)
        plan = divide(find_sources(paths, given or paths, options), known, part, overwrite)
        report.skipped = len(plan.skipped)
        report.failed = {source.path: reason for source, reason in plan.refused}
        for _ in (*plan.skipped, *plan.refused):
            on_done()
        numbers = [int(name[:6]) for name in list_shards(out)]
        jobs = convert_sources(
            Conversion(out, options, shard_size),
            plan.work,
            workers or os.cpu_count() or 1,
            first=max(numbers, default=-1) + 1,
            suffix=part.suffix,
        )
        with closing(jobs) as results:
            for source, error in results:
                if error is None:
                    report.converted += 1
                else:
                    report.failed[source.path] = error + earlier(source, known.get(source.file))
                on_done()
        if is_alone:
            _clean(out, part)
        if any(source.file in known for source in plan.work):
            _remove_superseded(out)
    _write_report(report_file(out, part), report)
    return report


def convert_in_parts(
    paths: Sequence[Path],
    out: Path,
    options: Options,
    engine: Engine,
    *,
    given: Sequence[Path] = (),
    overwrite: bool = False,
    shard_size: int = 1024,
    on_done: Callable[[int], None] = lambda count: None,
) -> Report:
    """As :func:`convert_files`, each shard a job of an engine; see :func:`run_jobs`.

    A job that is begun again, since its worker died, skips what was converted.

    Args:
        paths: The files.
        out: The store's folder.
        options: How to read them.
        engine: Where to run the jobs.
        given: As of :func:`convert_files`.
        overwrite: As of :func:`convert_files`.
        shard_size: Networks per shard at most.
        on_done: Called after every job with the number of its files.
    """
    _prepare(out, 1, shard_size)
    total = max(1, math.ceil(len(paths) / shard_size))
    absolute = [[p.absolute() for p in found] for found in (paths, given)]
    job = _OnePart(absolute[0], absolute[1], out.absolute(), options, overwrite, shard_size)
    report = Report()
    for _, part in run_jobs(job, [f"{i + 1}/{total}" for i in range(total)], engine):
        report.converted += part.converted
        report.skipped += part.skipped
        report.failed |= part.failed
        on_done(part.converted + part.skipped + len(part.failed))
    _write_report(report_file(out, Part(0, 1)), report)
    return report


def _prepare(out: Path, workers: int, shard_size: int) -> None:
    """Makes the store, or refuses before any work is begun what cannot be done."""
    if workers < 0 or shard_size < 1:
        raise ValueError(
            f"Expected at least 0 processes and 1 network per shard (got {workers} and "
            f"{shard_size})"
        )
    if is_store(out) and read_description(out).get("key") != KEY:
        raise ValueError(
            f"Expected a store that convert made (got the zoo '{out}'). Choose another --out."
        )
    StoreWriter(out, _DESCRIPTION)


@dataclass(frozen=True)
class _OnePart:
    """Converts one part of the files, wherever it is called."""

    paths: Sequence[Path]
    given: Sequence[Path]
    out: Path
    options: Options
    overwrite: bool
    shard_size: int

    def __call__(self, shard: str) -> Report:
        return convert_files(
            self.paths,
            self.out,
            self.options,
            given=self.given,
            workers=1,
            overwrite=self.overwrite,
            shard=shard,
            shard_size=self.shard_size,
        )


def report_file(out: Path, part: Part) -> Path:
    """Where the report on a part of the files is written."""
    return out / f"report{part.suffix}.json"


def _write_report(path: Path, report: Report) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(asdict(report), indent=2) + "\n", "utf-8")


def _clean(out: Path, part: Part) -> None:
    """Deletes what killed processes left of this part, which nobody else writes now."""
    with none_publishing(out):
        published = set(list_shards(out))
        for path in (p for folder in (SHARDS, METADATA, WEIGHTS) for p in (out / folder).iterdir()):
            match = _FILE.fullmatch(path.name)
            is_ours = match is not None and (match[3] or "") == part.suffix
            if match and is_ours and (match[1] or match[2] not in published):
                path.unlink(missing_ok=True)


def _remove_superseded(out: Path) -> None:
    """Deletes the shards of which no network counts any more."""
    store = Store(out)
    counting = set(store.table.column("shard").unique().to_pylist())
    for shard in store.shards:
        if shard.name not in counting:
            remove_shard(out, shard.name)
