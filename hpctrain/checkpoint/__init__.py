"""Checkpoints: logical tensors in HDF5 files, written and read raw, on any number of ranks.

Owns the format `hpctrain-ckpt` version 1 (docs/checkpoint_format.md): who writes which bytes (`schema`, `layout`), the
file skeletons (`template`, `index`), the save (`write`, `commit`, `keep`), the load (`find`, `read`) and the check
(`validate`, `verify`). It must not know any array library, MPI, a model or an optimizer: tensors come as bytes with a
name, a dtype and a shape, and other ranks only through a `collectives.Group`. h5py is loaded on first use.
"""

from hpctrain.checkpoint.find import find
from hpctrain.checkpoint.read import Checkpoint
from hpctrain.checkpoint.schema import Piece, TensorSpec, Want
from hpctrain.checkpoint.write import Saver

__all__ = ["Checkpoint", "Piece", "Saver", "TensorSpec", "Want", "find"]
