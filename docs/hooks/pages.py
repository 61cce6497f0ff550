"""Pages whose text lies elsewhere: the READMEs of benchmarks and tasks, and the command line.

The site keeps the places that the files have in the repository, but that `docs/` is its root: so
links between them are right after the step from `docs/` to the root, or back, is left out.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import TextWrapper
from typing import Any
from unittest.mock import patch

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
READMES = ("benchmarks", "tasks")
COMMANDS = "<!-- commands -->"
COLUMNS = 80
WRAP = TextWrapper(COLUMNS, break_long_words=False, break_on_hyphens=False).wrap
SUBCOMMANDS = re.compile(r"\{([\w,-]+)\}")
FROM_README = re.compile(r"\]\(\.\./docs/")
FROM_DOCS = re.compile(rf"\]\(\.\./(?=(?:{'|'.join(READMES)})/)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the READMEs and their figures."""
    for room in READMES:
        paths = [ROOT / room / "README.md", *sorted((ROOT / room).glob("figures/*.png"))]
        for path in paths:
            place = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **kwargs: Any) -> str:
    """Links as the site needs them; the commands where a page asks for them."""
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, "\n".join(_commands()))
    # A link out of the README's folder leads into docs/, which is the site's root.
    is_readme = page.file.src_uri.partition("/")[0] in READMES
    return (FROM_README if is_readme else FROM_DOCS).sub("](../" if is_readme else "](", markdown)


def _commands() -> Iterator[str]:
    """A section for every command of the real parser, with the help that it prints."""
    from nfn_graph.cli import COMMANDS as commands

    for name in commands:
        text = help_of(name)
        yield f"\n## nfn-graph {name}\n\n```text\n{text}```"
        usage = text.partition("\n\n")[0]
        for part in re.findall(r"[\w-]+", "".join(SUBCOMMANDS.findall(usage))):
            yield f"\n### nfn-graph {name} {part}\n\n```text\n{help_of(name, part)}```"


def help_of(*command: str) -> str:
    """What `nfn-graph ... --help` prints on a terminal as wide as the site's blocks of code."""
    from nfn_graph.cli import main

    out = io.StringIO()
    with patch.dict(os.environ, COLUMNS=str(COLUMNS)), contextlib.redirect_stdout(out):
        code = main([*command, "--help"])
    if code:
        raise ValueError(f"Expected help of 'nfn-graph {' '.join(command)}' (got exit code {code})")
    # The lines of prose are left to the terminal to break; those of examples are not to be broken.
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    parts = [[line] if line[:1] in ("", " ") else WRAP(line) for line in lines]
    return "\n".join(line for part in parts for line in part).rstrip() + "\n"
