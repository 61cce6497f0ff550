"""The files of a conversion: their names in a store, and which of them are there already."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from nfn_graph.converters.conversion.jobs import Source
from nfn_graph.converters.conversion.reading import Options
from nfn_graph.converters.store.architecture import damaged_architecture
from nfn_graph.converters.store.reader import Store
from nfn_graph.converters.store.shards import list_shards
from nfn_graph.converters.store.verification import wrong_architectures


def find_sources(paths: Sequence[Path], given: Sequence[Path], options: Options) -> list[Source]:
    """The files in the order of their names, by which machines divide them.

    Args:
        paths: The files.
        given: What was asked for, files and folders of them: names begin below their common
            parent, so that they stay when a folder gets more files.
        options: How the files are read.
    """
    found = list(dict.fromkeys(_folder(path.parent) / path.name for path in paths))
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
    return sorted(sources)


def known_sources(out: Path, *, repair: bool) -> Mapping[str, Source]:
    """What the networks of a store were made from, by name.

    Args:
        out: The store.
        repair: Whether networks are written again, and with them architectures that are damaged.
    """
    if not list_shards(out):
        return {}
    store = Store(out)
    names = {name for shard in store.shards for name in shard.architectures}
    wrong = None if repair else next(wrong_architectures(out, names), None)
    if wrong is not None:
        raise damaged_architecture(wrong.path, wrong.got)
    table = store.table.select(list(Source._fields))
    columns = (column.to_pylist() for column in table.columns)
    return {source[0]: Source(*source) for source in zip(*columns, strict=True)}


def real_path(source: Source) -> str:
    """Where a file lies, however it was reached."""
    try:
        return os.path.realpath(source.path)
    except (OSError, ValueError):  # no path at all, as is said when it is read
        return source.path


def refusal(source: Source, before: Source, is_together: bool) -> str:
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


def _folder(path: Path) -> Path:
    # Without '..' links stay, so that names are those that the user sees.
    return path.resolve() if ".." in path.parts else path.absolute()
