"""Finds the packages: `converters/` and `tasks/` install as subpackages of `nfn_graph`.

`pyproject.toml` alone cannot say that: it finds packages under their own names only, so every
folder would have to be listed there by hand.
"""

from setuptools import find_packages, setup

ROOMS = ["converters", "tasks"]

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
)
