"""Data: from files to the token ids of one micro-batch.

Owns the token store, the order of the samples, their split over ranks and accumulation. Everything here is a function
of (seed, counter): no rank, worker or restart changes which samples a batch holds. Must not know models or engines.

    store    tokens in one file, memory-mapped       prepare  files and folders into a store
    order    the permutation of an epoch              sampler  which samples this rank runs in an update
    windows  batches of any loader, an update each    text     samples of a store as arrays; bigram entropy
"""

from hpctrain.data.sampler import Sampler

__all__ = ["Sampler"]
