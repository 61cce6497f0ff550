"""The data that networks are trained on: images and point clouds, read from local files.

Nothing is downloaded, and nothing in a file is run. :func:`open_images` and
:func:`open_clouds` recognise the format by the files that are there.
"""

from nfn_graph.tasks.sources.clouds import Clouds, DistanceSamples, open_clouds, sample_distances
from nfn_graph.tasks.sources.image_files import open_images
from nfn_graph.tasks.sources.images import Images, SourceError

__all__ = [
    "Clouds",
    "DistanceSamples",
    "Images",
    "SourceError",
    "open_clouds",
    "open_images",
    "sample_distances",
]
