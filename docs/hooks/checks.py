"""What the built site must be: complete in itself, without broken links or raw markup."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError

# Attributes by which a page loads something; `a` elements only lead elsewhere.
LOADS = {"src", "srcset", "data", "poster", "background"}
RAW = re.compile(
    # The backticks of a role are gone: what they enclosed is code.
    r":(?:math|class|func|meth|mod|attr|data|exc|obj|ref):"
    r"|\.\. [\w-]+::|\\[()\[\]a-zA-Z]+|</?autoref|={5,}|`_"
)
REMOTE = re.compile(r"(?:url\(|@import\s+)[\"']?\s*(?:https?:)?//", re.IGNORECASE)


class Reader(HTMLParser):
    """Collects what a page loads, where it leads, what can be led to, and its text.

    Attributes:
        loads: Addresses that a browser fetches when it shows the page.
        links: Addresses that the page leads to.
        anchors: Places within it that have a name.
        text: What it shows, without code.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.text = ""
        self._unread = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Takes the addresses of an element."""
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self.loads += [value for name, value in given.items() if name in LOADS]
        if "href" in given and tag == "a":
            self.links.append(given["href"])
        elif "href" in given and given.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(given["href"])
        self._unread += tag in ("code", "script", "style")

    def handle_endtag(self, tag: str) -> None:
        """Ends an element."""
        self._unread -= tag in ("code", "script", "style")

    def handle_data(self, data: str) -> None:
        """Takes text."""
        if not self._unread:
            self.text += data


def faults(site: Path) -> Iterator[str]:
    """What is wrong with a built site, in words."""
    pages = {path: Reader(path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(site)
        yield from (f"{name} shows raw markup: {raw!r}" for raw in RAW.findall(page.text))
        for address in page.loads:
            if _is_remote(address):
                yield f"{name} loads {address}"
        # The page for missing addresses is served from anywhere, so its links are absolute.
        for address in [] if path.name == "404.html" else page.links + page.loads:
            if _is_remote(address) or urlsplit(address).scheme:
                continue
            there, _, anchor = unquote(address).partition("#")
            target = (path.parent / there.partition("?")[0]).resolve() if there else path
            if not target.is_file():
                yield f"{name} leads to {address}, which is not there"
            elif anchor and target in pages and anchor not in pages[target].anchors:
                yield f"{name} leads to {address}, which has no such place"
    for path in sorted(site.rglob("*.css")):
        if REMOTE.search(path.read_text("utf-8")):
            yield f"{path.relative_to(site)} loads from another host"


def _is_remote(address: str) -> bool:
    return address.startswith("//") or urlsplit(address).scheme in ("http", "https")


def on_post_build(config: MkDocsConfig, **kwargs: Any) -> None:
    """Ends the build if something is wrong."""
    found = sorted(set(faults(Path(config.site_dir))))
    if found:
        raise PluginError("\n".join(["The site is not sound:", *found]))
