r"""Docstrings as Markdown, for the API reference.

The docstrings keep to Sphinx's markup, as PyTorch's do: roles (:class:`X`, :math:`x`), displayed
mathematics, simple tables, links. Here it becomes the Markdown that the rest of the site is
written in; Google's sections are left to mkdocstrings.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from textwrap import dedent
from typing import Any

from griffe import Extension, Module, NameResolutionError, Object

LINK = re.compile(r"`(?P<text>[^`<]+?)\s+<(?P<url>https?://[^>\s]+)>`_")
MATH = re.compile(r":math:`(?P<tex>[^`]+)`")
REFERENCE = re.compile(r":(?:class|func|meth|mod):`~?(?P<path>[\w.]+)`")
DISPLAY = re.compile(
    r"^(?P<indent> *)\.\. math::[ ]?(?P<first>.*)\n(?P<rest>(?:[ ]*\n|(?P=indent) +\S.*\n?)*)",
    re.MULTILINE,
)
CODE = re.compile(
    r"^(?P<indent> *)\.\. code-block:: (?P<language>\w+)\n\s*\n"
    r"(?P<code>(?:[ ]*\n|(?P=indent) +\S.*\n?)+)",
    re.MULTILINE,
)
EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
RULE = re.compile(r"^(?P<indent> *)=+( +=+)+$")
Resolve = Callable[[str], str]


def to_markdown(text: str, resolve: Resolve = lambda path: path) -> str:
    """A docstring in Markdown.

    Args:
        text: The docstring, with Sphinx's markup.
        resolve: The full path of an object from the name that the docstring gives it.
    """

    def reference(match: re.Match[str]) -> str:
        path = match["path"]
        # Optional: what is not part of the reference is shown as code, without a link.
        return f'<autoref optional identifier="{resolve(path)}"><code>{path}</code></autoref>'

    text = EXAMPLE.sub("Examples:", text)  # As Google spells it; one may be enough.
    text = CODE.sub(_code, DISPLAY.sub(_display, f"{text}\n")).rstrip("\n")
    text = _tables(text)
    text = LINK.sub(lambda m: f"[{' '.join(m['text'].split())}]({m['url']})", text)
    text = MATH.sub(lambda m: rf"\({' '.join(m['tex'].split())}\)", text)
    return REFERENCE.sub(reference, text)


def _display(match: re.Match[str]) -> str:
    tex = dedent(match["rest"]).strip() if match["rest"].strip() else ""
    tex = f"{match['first'].strip()}\n{tex}".strip()
    if "&" in tex or r"\\" in tex:
        tex = "\\begin{split}\n" + tex + "\n\\end{split}"
    return _block(match["indent"], [r"\[", *tex.splitlines(), r"\]"])


def _code(match: re.Match[str]) -> str:
    code = dedent(match["code"]).strip("\n")
    return _block(match["indent"], [f"```{match['language']}", *code.splitlines(), "```"])


def _block(indent: str, lines: list[str]) -> str:
    """Lines as a block of their own, at the place of the directive."""
    return "\n".join(indent + line if line else "" for line in ["", *lines, "", ""])


def _tables(text: str) -> str:
    """Replaces simple tables, which lie between rules of `=`."""
    lines, out = text.split("\n"), []
    while lines:
        if not RULE.match(lines[0]):
            out.append(lines.pop(0))
            continue
        # The table goes to the last rule before an empty line.
        end = next((i for i, line in enumerate(lines) if not line.strip()), len(lines))
        out += ["", *_table(lines[:end])]
        lines = lines[end:]
    return "\n".join(out)


def _table(lines: list[str]) -> list[str]:
    starts = [match.start() for match in re.finditer("=+", lines[0])]
    indent = " " * starts[0]
    parts: list[list[list[str]]] = []
    for line in lines:
        if RULE.match(line):
            parts.append([])
            continue
        cells = [line[a:b].strip() for a, b in pairwise([*starts, None])]
        if cells[0]:
            parts[-1].append(cells)
        else:  # The row before goes on.
            parts[-1][-1] = [f"{a} {b}".strip() for a, b in zip(parts[-1][-1], cells, strict=True)]
    head, body = (parts[0][0], parts[1]) if len(parts) == 3 else ([""] * len(starts), parts[0])
    rows = [head, ["---"] * len(starts), *body]
    return [indent + "| " + " | ".join(row) + " |" for row in rows]


class SphinxMarkup(Extension):
    """Makes Markdown of every docstring that mkdocstrings reads."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrites the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value, lambda p: _full_path(obj, p))

    def on_package(self, *, pkg: Module, **kwargs: Any) -> None:
        """Does so for the package, which is no member of anything."""
        self.on_object(obj=pkg)


def _full_path(obj: Object, path: str) -> str:
    """The path of an object that a docstring names as its module or class sees it."""
    first, dot, rest = path.partition(".")
    try:
        return f"{obj.resolve(first)}{dot}{rest}"
    except NameResolutionError:
        return path
