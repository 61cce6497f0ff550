r"""Docstrings as Markdown, for the API reference.

The docstrings keep to Sphinx's markup, as PyTorch's do: roles (:class:`X`, :math:`x`), displayed
mathematics, simple tables, links. Here it becomes the Markdown that the rest of the site is
written in; `reference.py` takes care of Google's sections.
"""

from __future__ import annotations

import re
from itertools import pairwise
from textwrap import dedent

LINK = re.compile(r"`(?P<text>[^`<]+?)\s+<(?P<url>https?://[^>\s]+)>`_")
MATH = re.compile(r":math:`(?P<tex>[^`]+)`")
REFERENCE = re.compile(r":(?:class|func|meth|mod|attr|data):`~?(?P<path>[\w.]+)`")
DISPLAY = re.compile(
    r"^(?P<indent> *)\.\. math::[ ]?(?P<first>.*)\n(?P<rest>(?:[ ]*\n|(?P=indent) +\S.*\n?)*)",
    re.MULTILINE,
)
CODE = re.compile(
    r"^(?P<indent> *)\.\. code-block:: python\n\s*\n"
    r"(?P<code>(?:[ ]*\n|(?P=indent) +\S.*\n?)+)",
    re.MULTILINE,
)
RULE = re.compile(r"^(?P<indent> *)=+( +=+)+$")


def to_markdown(text: str) -> str:
    """A docstring in Markdown."""
    text = CODE.sub(_code, DISPLAY.sub(_display, f"{text}\n")).rstrip("\n")
    text = _tables(text)
    text = LINK.sub(lambda m: f"[{' '.join(m['text'].split())}]({m['url']})", text)
    text = MATH.sub(lambda m: f"${' '.join(m['tex'].split())}$", text)
    return REFERENCE.sub(lambda m: f"`{m['path']}`", text)


def _display(match: re.Match[str]) -> str:
    tex = dedent(match["rest"]).strip() if match["rest"].strip() else ""
    tex = f"{match['first'].strip()}\n{tex}".strip()
    if "&" in tex or r"\\" in tex:
        tex = "\\begin{split}\n" + tex + "\n\\end{split}"
    return _block(match["indent"], ["$$", *tex.splitlines(), "$$"])


def _code(match: re.Match[str]) -> str:
    code = dedent(match["code"]).strip("\n")
    return _block(match["indent"], ["```py", *code.splitlines(), "```"])


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
