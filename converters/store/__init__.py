"""The store keeps many networks in few files, for `nfn-graph convert` and the zoo builders.

    store.json                      the version of the format, and a description of the contents
    architectures/NAME.json         a layout, which all networks of an architecture share
    weights/SHARD.safetensors       `NAME/float32` is `[networks, entries]`: one row per network
    metadata/SHARD.parquet          the table, with one row per network
    shards/SHARD.json               sizes and checksums of both files, written last

A shard is valid once its record in `shards/` exists, which is written last and atomically. So a
process that is killed leaves only complete shards.
"""

from nfn_graph.converters.store.dataset import WeightDataset
from nfn_graph.converters.store.reader import Store
from nfn_graph.converters.store.verification import find_damage
from nfn_graph.converters.store.writer import StoreWriter

__all__ = ["Store", "StoreWriter", "WeightDataset", "find_damage"]
