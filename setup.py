"""Says what pyproject.toml cannot: where the packages lie, and the description for an index.

`converters/` and `tasks/` install as subpackages of `nfn_graph`, and pyproject.toml finds packages
under their own names only. An index shows the README without the repository around it, so its
relative links become absolute if `REPOSITORY_URL` is set (such as https://HOST/OWNER/NAME), and
plain text otherwise.
"""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

ROOMS = ["converters", "tasks"]
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!https?://|#)(?P<path>[^)\s]+)\)")


def description(readme: str, repository: str) -> str:
    """The README with links that work on any page."""

    def absolute(link: re.Match[str]) -> str:
        image, text, path = link["image"], link["text"], link["path"]
        if not repository:
            return "" if image else text
        kind = "raw" if image else "blob"
        return f"{image}[{text}]({repository.rstrip('/')}/{kind}/main/{path})"

    return LINK.sub(absolute, readme)


if __name__ == "__main__":
    repository = os.environ.get("REPOSITORY_URL", "")
    setup(
        packages=[
            *find_packages(include=["nfn_graph", "nfn_graph.*"]),
            *(
                f"nfn_graph.{package}"
                for room in ROOMS
                for package in find_packages(include=[room, f"{room}.*"])
            ),
        ],
        package_dir={f"nfn_graph.{room}": room for room in ROOMS},
        long_description=description(Path("README.md").read_text("utf-8"), repository),
        long_description_content_type="text/markdown",
        project_urls={"Repository": repository} if repository else {},
    )
