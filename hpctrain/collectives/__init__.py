"""The collectives engine: carries out the plans of `hpctrain.plan` on arrays, over a transport.

Owns the executor, the process group that users and other engines hold, and the calls by which ranks agree. Written
against the Arrays and Transport contracts; has never heard of torch or MPI.
"""

from hpctrain.collectives.group import Group

__all__ = ["Group"]
