"""Zoos: many small networks, trained at once and written as checkpoints with a table.

.. code-block:: python

    path = build_zoo(CnnZooOptions(out=Path("zoo"), networks=500, widths=(8, 16, 32)))
    zoo = open_zoo_folder(path)  # a WeightDataset
    zoo.table            # a pyarrow table, one row per checkpoint
    zoo[0]               # a WeightGraph
"""

from pathlib import Path
from typing import Any

from nfn_graph.tasks.zoo.builder import BuildOptions, ZooBuilder
from nfn_graph.tasks.zoo.cnn import CnnZooBuilder, CnnZooOptions
from nfn_graph.tasks.zoo.folder import open_zoo_folder
from nfn_graph.tasks.zoo.inr import InrZooBuilder, InrZooOptions
from nfn_graph.tasks.zoo.render import render_networks, render_zoo
from nfn_graph.tasks.zoo.tickets import TicketZooBuilder, TicketZooOptions
from nfn_graph.tasks.zoo.transformer import TransformerZooBuilder, TransformerZooOptions

__all__ = [
    "CnnZooOptions",
    "InrZooOptions",
    "TicketZooOptions",
    "TransformerZooOptions",
    "build_zoo",
    "open_zoo_folder",
    "render_networks",
    "render_zoo",
]

_BUILDERS: dict[type[BuildOptions], type[ZooBuilder[Any, Any, Any]]] = {
    CnnZooOptions: CnnZooBuilder,
    InrZooOptions: InrZooBuilder,
    TicketZooOptions: TicketZooBuilder,
    TransformerZooOptions: TransformerZooBuilder,
}


def build_zoo(options: BuildOptions, *, source: Any = None, progress: bool = False) -> Path:
    """Trains the networks of a zoo, or what is missing of it.

    Args:
        options: What to build, and where; its type says which kind of zoo.
        source: The images or point clouds, if they are not to be read from `options.data`.
        progress: Whether to show a progress bar.

    Returns:
        The zoo's folder, for `open_zoo_folder`.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from nfn_graph.tasks.zoo import CnnZooOptions, build_zoo, open_zoo_folder
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     options = CnnZooOptions(Path(folder) / "zoo", networks=3, epochs=(1, 1))
        ...     len(open_zoo_folder(build_zoo(options)))
        3
    """
    if type(options) not in _BUILDERS:
        names = ", ".join(kind.__name__ for kind in _BUILDERS)
        raise TypeError(f"Expected options of a zoo: {names} (got {type(options).__name__})")
    return _BUILDERS[type(options)](options, source).build(progress=progress)
