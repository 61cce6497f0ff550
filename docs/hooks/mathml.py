r"""Mathematics as MathML, at build time: pages need neither a script nor a font for it.

`pymdownx.arithmatex` finds `\(x\)` and `\[x\]` and leaves them in elements of their own.
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

MARKED = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<tex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)


def on_page_content(content: str, **kwargs: Any) -> str:
    """Renders the mathematics of a page."""
    return MARKED.sub(_render, content)


def _render(match: re.Match[str]) -> str:
    tex = " ".join(html.unescape(match["tex"]).split())
    if match["tag"] == "span":
        return to_mathml(tex, "inline")
    return f'<div class="formula">{to_mathml(tex, "block")}</div>'


def to_mathml(tex: str, display: str) -> str:
    """The MathML of a formula; raises for TeX that is not understood, which would be shown raw."""
    found = str(convert(tex, display=display))
    if "\\" in found or "<mi>&</mi>" in found:
        raise PluginError(f"Expected TeX that latex2mathml knows (got {tex!r})")
    return found
