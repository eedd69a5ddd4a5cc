"""The face for torch users: `import hpctrain.torch`. Joins the torch adapter with arrays, groups and trainers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch

from hpctrain.adapters.torch.module import Loss, TorchModel
from hpctrain.adapters.torch.partition import (
    Collectives,
    Partitioner,
    gathered_parts,
    partitioned_parameters,
)
from hpctrain.arrays import arrays_of
from hpctrain.collectives import Group
from hpctrain.errors import ConfigError, choices, nearest
from hpctrain.runtime.step import Trainer

if TYPE_CHECKING:
    from hpctrain.runtime.context import Context

__all__ = ["adapt", "gathered", "partitioned"]


def adapt(module: torch.nn.Module, loss: Loss, *, no_decay: Sequence[str] = (),
          units: Sequence[str] = ()) -> TorchModel:
    """Makes a Model of any module. Local.

    Args:
        module: the whole model; its parameters move into flat buffers when a trainer is made.
        loss: `loss(module, micro_batch) -> (loss_sum, weight)`: the *sum* of the loss terms of this micro-batch as a
            tensor of one element, and how many terms (tokens, samples) it sums.
        no_decay: glob patterns of parameter names that weight decay is not meant for.
        units: glob patterns of module names ("" is the whole model): each such module uses all parameters beneath it,
            those of its children included. Needed with zero.stage = 3 and zero.share = "none", where parameters are
            gathered for the call of the module that uses them, if a module's forward reads parameters of its children
            directly. Blocks (children of ModuleList, Sequential and ModuleDict) do so without being told.
    """
    return TorchModel(module, loss, arrays_of(torch.empty(0)), no_decay, units)


@contextmanager
def gathered(what: Trainer | torch.nn.Module, names: Iterable[str] | None = None, *,
             modify: int | None = None) -> Iterator[None]:
    """Within it parameters are whole on every rank, to read them or to change them, at any stage of ZeRO.

    Collective: all ranks that share the parameters enter and leave it together; what happens within is local.

        with hpctrain.torch.gathered(trainer, modify=0):
            if context.rank == 0:
                torch.nn.init.zeros_(module.head.weight)

    Args:
        what: a trainer, or a module built within `partitioned` that has no trainer yet.
        names: the parameters that are wanted; None: all. Others may be there as well.
        modify: a rank whose changes are kept, by all ranks and in the optimizer's copy; only that rank may make any.
            None: no rank may.

    Raises:
        ConfigError: an unknown name, or `modify` is no rank, on all ranks alike; a change on a rank that may not make
            any, on that rank.
    """
    names = None if names is None else tuple(names)
    if isinstance(what, Trainer):
        assert isinstance(what.model, TorchModel), "a trainer of a torch module"
        with what.gathered(names, modify=modify), _unchanged(what.model.module, but=what.rank == modify):
            yield
        return
    known = [name for name, _ in what.named_parameters()]
    for name in names or ():
        if name not in known:
            raise ConfigError(f"names has {name!r}{nearest(name, known)}, which is no parameter of the module; legal "
                              f"are {choices(known[:8])} ...")
    parts = partitioned_parameters(what)
    with gathered_parts({n: p for n, p in parts.items() if names is None or n in names}, modify):
        yield


@contextmanager
def _unchanged(module: torch.nn.Module, *, but: bool) -> Iterator[None]:
    """Refuses changes that torch counted; `but`: they are allowed. Local."""
    before = {name: p._version for name, p in module.named_parameters()}
    yield
    for name, parameter in module.named_parameters():
        if parameter._version != before[name] and not but:
            raise ConfigError(f"parameter {name!r} was changed within gathered(...) on a rank that may not, and may "
                              "now differ between ranks; legal is gathered(..., modify=RANK), and changes on that rank")


@contextmanager
def partitioned(where: Context | Group) -> Iterator[None]:
    """Parameters made within it are partitioned over the ranks at once, so that no rank ever holds a whole model.

    Collective: every rank runs the same constructors on the same random numbers (seed all ranks alike). Each
    parameter is whole until the next module makes one; then each rank keeps its part. Initial values may be computed in
    any way: a partitioned parameter that is touched within the block is gathered for as long as it is used. Do not keep
    a `.data` of a parameter while the next module is built. A trainer takes the parts over, at any stage of ZeRO; until
    then the values are there within `gathered(module)` only.

    Args:
        where: the context, or the group to partition over.

    Raises:
        ConfigError: at the end, where torch's random numbers are not the same on all ranks. On all ranks alike.
    """
    group: Group = where if isinstance(where, Group) else where.world

    def gather(own: torch.Tensor, counts: Sequence[int], target: torch.Tensor) -> None:
        group.all_gather(own, counts=counts, out=target)

    def broadcast(values: torch.Tensor, root: int) -> None:
        group.broadcast(values, root)

    def same_numbers() -> None:
        states: list[Any] = group.exchange(crc32(torch.get_rng_state().numpy()))
        odd = next((rank for rank, state in enumerate(states) if state != states[0]), None)
        if odd is not None:
            raise ConfigError(f"torch's random numbers on rank {odd} are not those of rank 0; partitioned() needs the "
                              "same on all ranks: torch.manual_seed(seed) before it, on each")

    same_numbers()
    with Partitioner(Collectives(group.rank, group.size, gather, broadcast)).constructing():
        yield
    same_numbers()
