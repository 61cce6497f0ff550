"""The store keeps many networks in few files, for `nfn-graph convert` and the zoo builders.

    store.json                      the version of the format, and what is in the store
    architectures/NAME.json         a layout, once for all networks that have it
    weights/SHARD.safetensors       `NAME/float32` is `[networks, entries]`: one row per network
    metadata/SHARD.parquet          a row of the table per network
    shards/SHARD.json               sizes and checksums of both, written last

A shard counts when its record in `shards/` is there, which is written last and in one step. So
a process that is killed leaves whole shards only.
"""

from nfn_graph.converters.store.dataset import WeightDataset
from nfn_graph.converters.store.reader import Store
from nfn_graph.converters.store.verification import find_damage
from nfn_graph.converters.store.writer import StoreWriter

__all__ = ["Store", "StoreWriter", "WeightDataset", "find_damage"]
