"""The reference pages: `docs/api/*.md` from the docstrings, `docs/cli.md` from the parser.

`make reference` writes them. They are part of the repository, so that they can be read on any code
host, and a test fails when they are out of date. The signatures in them also show every change
of a public name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import io
import os
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from textwrap import TextWrapper, dedent
from types import ModuleType
from unittest.mock import patch

DOCS = Path(__file__).resolve().parent.parent
NOTE = "<!-- Written by `make reference` from the docstrings. -->"
# The pages: the file, the title, and the modules, all of whose public names are shown.
PAGES = {
    "core.md": (
        "The core",
        (
            "nfn_graph",
            "nfn_graph.symmetry",
            "nfn_graph.spec",
            "nfn_graph.features",
            "nfn_graph.ops",
        ),
    ),
    "nn.md": ("Layers and models", ("nfn_graph.nn",)),
    "transforms.md": ("Transforms", ("nfn_graph.transforms",)),
    "converters.md": (
        "Converters",
        (
            "nfn_graph.converters",
            "nfn_graph.converters.zoos",
            "nfn_graph.converters.store",
            "nfn_graph.converters.wiring",
        ),
    ),
    "tasks.md": (
        "Tasks",
        (
            "nfn_graph.tasks.training",
            "nfn_graph.tasks.models",
            "nfn_graph.tasks.zoo",
            "nfn_graph.tasks.sources",
            "nfn_graph.tasks.reports",
        ),
    ),
    "testing.md": ("Testing layers", ("nfn_graph.testing",)),
    "interop.md": ("Importing from nfn", ("nfn_graph.interop.nfn",)),
}
COMMANDS = "<!-- commands -->"
COLUMNS = 80
WRAP = TextWrapper(COLUMNS, break_long_words=False, break_on_hyphens=False).wrap
# An option of a help page: its line, and the further lines of its explanation.
OPTION = re.compile(r"^  --?\w.*\n(?:  (?!-).*\n)*", re.M)
# The title of a group of options, its explanation, and no options.
EMPTY_GROUP = re.compile(r"\n [a-z][\w ]*\n -+\n(?:  .*\n  -+\n)?(?=\n|\Z)")
FEWEST_COMMANDS, FEWEST_OPTIONS = 4, 3
SUBCOMMANDS = re.compile(r"\{([a-z][\w,-]*)\}")
SECTION = re.compile(r"^(Args|Attributes|Example|Examples|Raises|Returns|Shapes|Yields):$", re.M)
ITEM = re.compile(r"^(\*{0,2}[\w.`\"']+):\s", re.M)
TITLES = {"Args": "Arguments", "Examples": "Example"}


# ---- The public names ------------------------------------------------------------------------


def members(kind: type, module: ModuleType) -> Iterator[tuple[str, object]]:
    """What a class offers, but for what it has from another public class, torch or PyG."""
    listed = [getattr(module, public) for public in module.__all__]
    ours = [
        base
        for base in kind.__mro__
        if base.__module__.startswith("nfn_graph") and (base is kind or base not in listed)
    ]
    for name in sorted({name for base in ours for name in vars(base)}):
        found = inspect.getattr_static(kind, name)
        is_offered = callable(getattr(kind, name)) or is_property(found) or is_attribute(found)
        if is_offered and not name.startswith("_") and name != "extra_repr":
            yield name, found


def is_property(found: object) -> bool:
    """Whether a member of a class is a property."""
    return isinstance(found, property | functools.cached_property)


def is_attribute(found: object) -> bool:
    """Whether a member of a class is a slot."""
    return inspect.ismemberdescriptor(found)


def described(found: object) -> str:
    """The arguments of a function or class, the bases of a class without any, or the kind."""
    if is_property(found):
        return ": property"
    if is_attribute(found):
        return ": attribute"
    if isinstance(found, ModuleType):
        return ": module"
    if typing.get_origin(found) is not None:
        return f" = {str(found).removeprefix('typing.')}"
    if isinstance(found, classmethod | staticmethod):
        found = found.__func__
    if inspect.isclass(found) and not _has_own_arguments(found):
        return f"({', '.join(_base(base) for base in found.__bases__)})"
    if not callable(found):
        return f": {type(found).__name__}"  # A constant.
    # Where a default lies in memory says nothing.
    return re.sub(r" at 0x[0-9a-f]+", "", _arguments(inspect.signature(found)))


def _base(kind: type) -> str:
    """A base class; one of another package with its module, since it may have the same name."""
    package = kind.__module__.partition(".")[0]
    return kind.__name__ if package in ("nfn_graph", "builtins") else f"{package}.{kind.__name__}"


def _has_own_arguments(kind: type) -> bool:
    """Whether a class says how it is made; if not, the arguments are those of another package."""
    module = str(getattr(kind.__init__, "__module__", ""))
    return dataclasses.is_dataclass(kind) or issubclass(kind, tuple) or "nfn_graph" in module


def _arguments(signature: inspect.Signature) -> str:
    """Names, annotations as they are written, defaults: the same in every version of Python."""
    parts, kind = [], None
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind == parameter.KEYWORD_ONLY and kind not in (
            parameter.KEYWORD_ONLY,
            parameter.VAR_POSITIONAL,
        ):
            parts.append("*")
        kind = parameter.kind
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(kind, "")
        text = f"{stars}{parameter.name}{_annotation(parameter.annotation, ': ')}"
        if parameter.default is not parameter.empty:
            text += f" = {parameter.default!r}"
        parts.append(text)
    end = f"){_annotation(signature.return_annotation, ' -> ')}".removesuffix(" -> None")
    line = f"({', '.join(parts)}{end}"
    if len(line) <= COLUMNS:
        return line
    return "\n".join(["(", *(f"    {part}," for part in parts), end])


def _annotation(found: object, before: str) -> str:
    if found is inspect.Parameter.empty:
        return ""
    if isinstance(found, typing.ForwardRef):
        found = found.__forward_arg__
    return before + (found if isinstance(found, str) else inspect.formatannotation(found))


# ---- API -------------------------------------------------------------------------------------


def api_page(title: str, modules: tuple[str, ...]) -> str:
    """A page with every public name of some modules."""
    lines = [f"# {title}", NOTE]
    shown: set[str] = set()
    for name in modules:
        module = importlib.import_module(name)
        lines.append(f"## {name}")
        lines.append(prose(inspect.getdoc(module) or ""))
        if name == "nfn_graph":
            layers = importlib.import_module(f"{name}.nn").__all__
            shown |= set(layers)
            lines.append(f"The layers are described under [{name}.nn](nn.md): {_names(layers)}.")
        for public in module.__all__:
            if public not in shown:
                lines += entry(module, public, getattr(module, public))
        shown |= set(module.__all__)
    return "\n\n".join(line for line in lines if line) + "\n"


def entry(module: ModuleType, public: str, value: object) -> Iterator[str]:
    """The section of a name: its signature, its docstring, and what a class offers."""
    yield f"### {public}"
    if isinstance(value, ModuleType):
        yield f"The module [{value.__name__}](#{value.__name__.replace('.', '')}), below."
        return
    yield _code(f"{'class ' if inspect.isclass(value) else ''}{public}{described(value)}")
    if not inspect.isclass(value) and not inspect.isfunction(value):
        return
    yield prose(inspect.getdoc(value) or "")
    if not inspect.isclass(value):
        return
    for name, found in members(value, module):
        text = prose(inspect.getdoc(getattr(value, name)) or "")
        if is_attribute(found):
            continue
        if is_property(found):
            yield f"**`{public}.{name}`**: {text}"
        else:
            yield f"#### {public}.{name}"
            yield _code(f"{name}{described(found)}")
            yield text


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def prose(text: str) -> str:
    """A docstring as Markdown: its sections get titles, and their items are lists."""
    parts = SECTION.split(text)
    blocks = [to_markdown(parts[0].strip())]
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        inside, _, after = _indented(body)
        blocks += [f"**{TITLES.get(title, title)}**", _section(title, inside)]
        blocks.append(to_markdown(after.strip()))
    return "\n\n".join(block for block in blocks if block)


def _indented(body: str) -> tuple[str, str, str]:
    """The indented lines of a section, and what follows them."""
    lines = body.strip("\n").split("\n")
    end = next((i for i, line in enumerate(lines) if line[:1].strip()), len(lines))
    return dedent("\n".join(lines[:end])).strip("\n"), "\n", "\n".join(lines[end:])


def _section(title: str, text: str) -> str:
    if title.startswith("Example"):
        return _code(text, "pycon" if text.startswith(">>>") else "py")
    if title in ("Returns", "Yields", "Shapes"):
        return to_markdown(text)
    items: list[str] = []
    for line in text.split("\n"):
        if ITEM.match(line):
            name, _, rest = line.partition(":")
            items.append(f"- `{name.strip('`')}`:{rest}")
        elif items:
            items[-1] += f"\n  {line.strip()}" if line.strip() else "\n"
    return to_markdown("\n".join(items))


def _code(text: str, language: str = "py") -> str:
    # Not "python": blocks of that language are whole programs, which tests run.
    return f"```{language}\n{text}\n```"


# ---- Command line ----------------------------------------------------------------------------


def cli_page(text: str) -> str:
    """The page of the command line with the help of every command of the real parser."""
    return f"{text.partition(COMMANDS)[0]}{COMMANDS}\n{chr(10).join(commands())}\n"


def commands() -> Iterator[str]:
    """A section for every command, with the help that it prints; shared options have their own."""
    from nfn_graph.cli import COMMANDS as every

    yield "\nOptions that several commands share are listed once, in sections of their own."
    texts = {name: help_of(name) for name in every}
    yield from _shared_sections("nfn-graph", texts, "##")
    for name, text in texts.items():
        yield f"\n## nfn-graph {name}\n"
        yield from _own_section("nfn-graph", name, texts)
        usage = text.partition("\n\n")[0]
        parts = re.findall(r"[\w-]+", "".join(SUBCOMMANDS.findall(usage)))
        inner = {part: help_of(name, part) for part in parts}
        yield from _shared_sections(f"nfn-graph {name}", inner, "###")
        for part in parts:
            yield f"\n### nfn-graph {name} {part}\n"
            yield from _own_section(f"nfn-graph {name}", part, inner)


def options_of(text: str) -> dict[str, str]:
    """The options that a help page explains, as it prints them, by their text without breaks."""
    return {" ".join(option.split()): option for option in OPTION.findall(text)}


def shared_options(texts: dict[str, str]) -> dict[tuple[str, ...], dict[str, str]]:
    """Options that are explained in the same words by several help pages.

    Args:
        texts: The help pages, by the names of their commands.

    Returns:
        The options of :func:`options_of`, by the names of the commands that share them. Only
        groups that save space are listed: `FEWEST_OPTIONS` options of `FEWEST_COMMANDS` commands.
    """
    listed = {name: options_of(text) for name, text in texts.items()}
    printed = {option: lines for options in listed.values() for option, lines in options.items()}
    groups: dict[tuple[str, ...], dict[str, str]] = {}
    for option, lines in printed.items():
        if not option.startswith("-h"):
            names = tuple(name for name in texts if option in listed[name])
            groups.setdefault(names, {})[option] = lines
    return {
        names: options
        for names, options in groups.items()
        if len(names) >= FEWEST_COMMANDS and len(options) >= FEWEST_OPTIONS
    }


def _shared_title(command: str, names: tuple[str, ...], texts: dict[str, str]) -> str:
    if len(names) == len(texts):
        return f"Options of all subcommands of {command}"
    return f"Options of {command} {', '.join(names[:-1])} and {names[-1]}"


def _shared_sections(command: str, texts: dict[str, str], level: str) -> Iterator[str]:
    for names, options in shared_options(texts).items():
        text = "".join(options.values())
        yield f"\n{level} {_shared_title(command, names, texts)}\n\n```text\n{text}```"


def _own_section(command: str, name: str, texts: dict[str, str]) -> Iterator[str]:
    """The help of one command without the options that have a section of their own."""
    text, links = texts[name], []
    for names, options in shared_options(texts).items():
        if name in names:
            for option in options:
                text = text.replace(options_of(text)[option], "", 1)
            title = _shared_title(command, names, texts)
            place = re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
            links.append(f"[{title[0].lower()}{title[1:]}](#{place})")
    text = EMPTY_GROUP.sub("\n", text).rstrip() + "\n"
    yield f"```text\n{text}```"
    if links:
        yield f"\nIt also takes the {' and the '.join(links)}."


def help_of(*command: str) -> str:
    """What `nfn-graph ... --help` prints on a terminal of 80 columns."""
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


# ---- All pages -------------------------------------------------------------------------------


def _hook(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"hook_{name}", DOCS / "hooks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


to_markdown = _hook("docstrings").to_markdown


def pages() -> dict[Path, str]:
    """The text of every reference page, by its file."""
    found = {DOCS / "api" / name: api_page(*about) for name, about in PAGES.items()}
    cli = DOCS / "cli.md"
    return found | {cli: cli_page(cli.read_text("utf-8"))}


def main() -> None:
    """Writes all pages."""
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    sys.exit(main())
