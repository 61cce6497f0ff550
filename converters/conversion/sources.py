"""The files of a conversion: their names in a store, and which of them are there already."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nfn_graph import WeightGraph
from nfn_graph.converters.conversion.reading import Options
from nfn_graph.converters.conversion.sharding import KEPT, Source
from nfn_graph.converters.jobs import Part
from nfn_graph.converters.store.architecture import damaged_architecture, describe
from nfn_graph.converters.store.reader import Store
from nfn_graph.converters.store.shards import PLACE, list_shards
from nfn_graph.converters.store.verification import wrong_architectures


def find_sources(paths: Sequence[Path], given: Sequence[Path], options: Options) -> list[Source]:
    """The files in the order of their names, by which machines divide them.

    Args:
        paths: The files.
        given: What was asked for, files and folders of them: names begin below their common
            parent, so that they stay when a folder gets more files.
        options: How the files are read.
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
        except (OSError, ValueError):  # what is wrong with it is said when it is read
            sources.append(Source(name, str(path), -1, 0, how))
    return sorted(sources, key=lambda source: source[:2])


def located_file(path: Path) -> Path:
    """The whole path of a file, with the links that the user sees."""
    return _folder(path.parent) / path.name


def source_of(name: str, graph: WeightGraph) -> Source:
    """A graph instead of a file: its content says whether it was changed."""
    network = describe(graph, {})
    content = hashlib.sha256(f"{network.architecture.name}/{network.notes}".encode())
    for tensor in network.tensors:
        content.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return Source(name, f"graph:{name}", 0, 0, content.hexdigest())


def label_columns(table: Any) -> list[str]:
    """The columns of a store's table that labels are in."""
    return [name for name in table.column_names if name not in (*KEPT, *PLACE)]


def known_sources(out: Path, labels: Sequence[str] = (), *, repair: bool) -> Mapping[str, Source]:
    """What the networks of a store were made from, by name.

    Args:
        out: The store.
        labels: The columns of labels that matter.
        repair: Whether networks are written again, and with them architectures that are damaged.
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
    """What is to be done with the files of a part.

    Attributes:
        work: Files to convert, under the names that their networks have or get.
        skipped: Files that were converted before, or are links to others.
        refused: Files that are not converted, and why.
    """

    work: list[Source]
    skipped: list[Source]
    refused: list[tuple[Source, str]]


def divide(
    sources: Sequence[Source], known: Mapping[str, Source], part: Part, overwrite: bool
) -> Plan:
    """Which files of a part are converted.

    Args:
        sources: All files, in order.
        known: What the networks of the store were made from, by name.
        part: Which of the files count.
        overwrite: Whether to convert again what was converted before, and to replace networks of
            other files that have the same name.
    """
    names = {real_path(before): before.file for before in known.values()}
    # Of links to one file, the first counts; machines divide them before they know names.
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
    """Where a file lies, however it was reached."""
    try:
        return os.path.realpath(source.path)
    except (OSError, ValueError):  # no path at all, as is said when it is read
        return source.path


def _refusal(source: Source, before: Source, is_together: bool) -> str:
    """Why a file is not converted: its name is that of another file's network.

    Args:
        source: The file.
        before: The other one.
        is_together: Whether both are converted now, so that none replaces the other.
    """
    instead = "" if is_together else ", convert both at once, or replace it with --overwrite"
    return (
        f"Expected the name '{source.file}' to be free for the network of '{source.path}' (got "
        f"the network of '{before.path}'). Choose another --out{instead}."
    )


def earlier(source: Source, before: Source | None) -> str:
    """That a store still has the network of a file which cannot be read any more."""
    if before is None or real_path(source) != real_path(before):
        return ""
    return f" The network of an earlier content is still in the store as '{source.file}'."


def _is_text(path: str) -> bool:
    """Whether a path can be kept in a table; names of files may be any bytes."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _folder(path: Path) -> Path:
    # Without '..' links stay, so that names are those that the user sees.
    return path.resolve() if ".." in path.parts else path.absolute()
