"""How the other libraries are called, on the buffers of a `hpctrain.bench.contenders.Case`.

Each function gives the call of one operation, which returns this rank's result, or None where the library has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["PACKAGES", "PEERS"]

Call = Callable[[], Any]


def tensors(case: Any) -> tuple[Any, Any, Any]:
    """`whole`, `other` and `part` of a case as torch tensors over the same memory."""
    import numpy as np
    import torch

    def tensor(array: Any) -> Any:
        half = case.dtype == "bfloat16"
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16) if half else torch.from_numpy(array)

    return tensor(case.whole), tensor(case.other), tensor(case.part)


def gloo(case: Any, operation: str) -> Call | None:
    """torch.distributed; the process group is there already."""
    import torch.distributed as dist

    whole, other, part = tensors(case)
    own, parts, rank = whole[case.own], list(whole.chunk(case.group.size)), case.group.rank

    def reduce() -> Any:
        root = case.root()
        dist.reduce(whole, root)
        return case.whole if rank == root else None

    def scatter() -> Any:
        root = case.root()
        dist.scatter(part, parts if rank == root else None, root)
        return case.part

    def gather() -> Any:
        root = case.root()
        dist.gather(part, parts if rank == root else None, root)
        return case.whole if rank == root else None

    def send_recv() -> Any:
        if rank > 1 or case.group.size == 1:
            return None
        if rank == 0:
            dist.send(whole, 1)
            dist.recv(other, 1)
        else:
            dist.recv(other, 0)
            dist.send(other, 0)
        return case.other

    return {
        "all_reduce": returning(lambda: dist.all_reduce(whole), case.whole),
        "reduce_scatter": returning(lambda: dist.reduce_scatter_tensor(part, whole), case.part),
        "all_gather": returning(lambda: dist.all_gather_into_tensor(whole, own), case.whole),
        "all_to_all": returning(lambda: dist.all_to_all_single(other, whole), case.other),
        "broadcast": returning(lambda: dist.broadcast(whole, case.root()), case.whole),
        "reduce": reduce, "scatter": scatter, "gather": gather, "send_recv": send_recv,
    }.get(operation)


def deepspeed(case: Any, operation: str) -> Call | None:
    """Its shared-memory kernel for inference, which has an all-reduce only."""
    import deepspeed.comm

    if operation != "all_reduce":
        return None
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo", verbose=False)
    whole = tensors(case)[0]
    return returning(lambda: deepspeed.comm.inference_all_reduce(whole), case.whole)


def horovod(case: Any, operation: str) -> Call | None:
    """In-place all-reduce; the operations that it has in place only."""
    import horovod.torch as hvd

    hvd.init()
    whole = tensors(case)[0]
    if operation != "all_reduce":
        return None
    name = f"{case.dtype} {case.num_bytes} {case.ordinary}"
    return returning(lambda: hvd.allreduce_(whole, op=hvd.Sum, name=name), case.whole)


def returning(call: Call, result: Any) -> Call:
    """A call that gives the array that it wrote, for the check."""

    def both() -> Any:
        call()
        return result

    return both


PEERS: dict[str, Callable[[Any, str], Call | None]] = {"torch gloo": gloo, "DeepSpeed shm": deepspeed,
                                                       "Horovod": horovod}
PACKAGES = {"DeepSpeed shm": "deepspeed", "Horovod": "horovod"}
