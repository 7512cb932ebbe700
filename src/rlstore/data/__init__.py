"""Files of experience: readers, whose episodes replay storages take, and writers for what a storage holds."""

from rlstore.data.hdf5 import read_hdf5
from rlstore.data.minari import read_minari, write_minari
from rlstore.data.npz import read_npz, write_npz
from rlstore.data.parquet import read_parquet
from rlstore.data.parquet_writer import write_parquet
from rlstore.data.source import EpisodeSource

__all__ = [
    "EpisodeSource",
    "read_hdf5",
    "read_minari",
    "read_npz",
    "read_parquet",
    "write_minari",
    "write_npz",
    "write_parquet",
]
