"""Work of many parts: divided between processes and machines, with a bar that counts them."""

from nfn_graph.converters.jobs.engines import Engine, run_jobs
from nfn_graph.converters.jobs.parts import Part

__all__ = ["Engine", "Part", "run_jobs"]
