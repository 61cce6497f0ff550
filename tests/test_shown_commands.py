"""The shell commands on the pages work as they are shown."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import dropwhile
from pathlib import Path

import pytest

from commands import Leaf, leaves
from pages import PAGES, ROOT, blocks, reference

VARIABLE = re.compile(r"[A-Z_]+=")  # An environment variable before a command.
MORE = [ROOT / name / "README.md" for name in ("tasks", "benchmarks", "examples")]


def shown(page: Path) -> Iterator[list[str]]:
    """The words of every command in the shell blocks of a page."""
    for _, source in blocks(page.read_text("utf-8"), "bash", "sh", "shell"):
        for line in source.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words := list(dropwhile(VARIABLE.match, words)):
                yield words


def mistakes(words: list[str], commands: dict[str, Leaf]) -> list[str]:
    """Returns the parts of a command that `nfn-graph` would not understand."""
    leaf = commands.get(" ".join(words[:2])) or commands.get(words[0])
    if leaf is None:
        return [f"no command {words[:2]}"]
    names = {option.name: option for option in leaf.options}
    words = ["--output" if word == "-o" else word for word in words]
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    known = {*names, *(f"--no-{name[2:]}" for name in names if name.startswith("--"))}
    missing = {name for name, o in names.items() if o.is_required and name.startswith("--")}
    found = [f"no option {name}" for name in sorted(given - known)]
    return [*found, *(f"{name} is missing" for name in sorted(missing - given))]


@pytest.mark.parametrize(
    "page", [*PAGES, *MORE], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_commands_are_understood(page: Path) -> None:
    commands = leaves()
    for words in shown(page):
        if words[0] == "nfn-graph" and "--help" not in words:
            assert not mistakes(words[1:], commands), " ".join(words)
        elif words[0] == "python" and words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file(), words[1]


def test_mistakes_are_found() -> None:
    commands = leaves()
    good = "train edit-inr --zoo zoos/a --out runs/b --no-canonical --epochs 3"
    assert mistakes(good.split(), commands) == []
    assert mistakes(["fly", "away"], commands) == ["no command ['fly', 'away']"]
    assert mistakes(["train", "edit-inr", "--zoo", "a", "--speed", "3"], commands) == [
        "no option --speed",
        "--out is missing",
    ]
    assert (
        sum(1 for page in [*PAGES, *MORE] for words in shown(page) if words[0] == "nfn-graph") > 40
    )


@pytest.mark.parametrize("command", ["inspect", "convert", "predict", "edit", "prune"])
def test_options_of_reading_have_one_name(command: str) -> None:
    """Every command that reads checkpoints takes `--arch`, not `--reading.arch`."""
    text = reference.help_of(command)
    assert " --arch " in text and "--reading." not in text
