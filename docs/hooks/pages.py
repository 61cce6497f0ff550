"""Pages whose text lies elsewhere: the READMEs of benchmarks and tasks.

The site keeps the places that the files have in the repository, but that `docs/` is its root: so
links between them are right after the step from `docs/` to the root, or back, is left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
READMES = ("benchmarks", "tasks")
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
    """Links as the site needs them."""
    # A link out of the README's folder leads into docs/, which is the site's root.
    is_readme = page.file.src_uri.partition("/")[0] in READMES
    return (FROM_README if is_readme else FROM_DOCS).sub("](../" if is_readme else "](", markdown)
