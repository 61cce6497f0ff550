"""Finds the packages: `converters/` and `tasks/` install as subpackages of `nfn_graph`."""

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
