"""The face for torch users: `import hpctrain.torch`. Joins the torch adapter with arrays, groups and trainers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch

from hpctrain.adapters.torch.cut import check_bounds
from hpctrain.adapters.torch.layers import Chain, Step, chain
from hpctrain.adapters.torch.module import Loss, TorchModel
from hpctrain.adapters.torch.partition import (
    Collectives,
    Partitioner,
    gathered_parts,
    partitioned_parameters,
)
from hpctrain.adapters.torch.profile import profile as profile_chain
from hpctrain.adapters.torch.stage import Ends, TorchStage
from hpctrain.arrays import arrays_of
from hpctrain.collectives import Group
from hpctrain.errors import ConfigError, choices, nearest
from hpctrain.plan.pipeline.partition import Layer
from hpctrain.runtime.step import Trainer

if TYPE_CHECKING:
    from hpctrain.runtime.context import Context

__all__ = ["adapt", "gathered", "layers", "partitioned", "profile", "stage", "stages"]

OutputLoss = Callable[[Any, Any], tuple[torch.Tensor, float]]  # loss(outputs, micro_batch) -> (loss_sum, weight)


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


def layers(model: Any, steps: Sequence[Step] | None = None) -> Chain:
    """A model as a chain of layers, to be cut into stages. Local.

        layers(nn.Sequential(...)), layers([module, module, ...])
        layers(model, [(("embedding", "place"), embed), "blocks.0", "blocks.1", (("norm", "head"), last)])

    Args:
        model: with `steps`, any module. Without, an nn.Sequential or a list of modules, each called with what the one
            before returned, and named by their numbers. An entry of a list may also be a function without arguments
            that makes a module: it is called only where the stage of the layer is made, and should seed its values.
        steps: the model in the order of execution. A step is the name of a module, which is called with the value of
            the step before; or (names, function), for `function(*modules, value) -> value`, which must reach the model
            in no other way. Names may be parameters', too. `models.gpt.GPT.steps()` is an example.

    Raises:
        ConfigError: an unknown name, or a parameter of the model that is in no step.
    """
    return chain(model, steps)


def stage(whole: Chain, bounds: Sequence[int] | int, number: int, loss: OutputLoss, *,
          inputs: Callable[[Any], Any] | None = None, no_decay: Sequence[str] = (),
          own_autograd: bool = False) -> TorchStage:
    """The Model of one stage of a pipeline. Local.

    Parameters are named as in the whole model. A parameter that an earlier stage has as well (tied embeddings) is
    copied, and `shared` of both stages has its name: what the stages deliver for it must be added. The stage holds its
    own modules alone, so the rest of the model is freed with the caller's last reference to it.

    Args:
        whole: what `layers` returned.
        bounds: where stages begin and end, from 0 to the number of layers, as `plan.pipeline.partition` gives them; or
            the number of stages.
        number: of the stage, from 0.
        loss: `loss(outputs, micro_batch) -> (loss_sum, weight)`, outputs being what the last layer returned; otherwise
            as the loss of `adapt`.
        inputs: `inputs(micro_batch)` is what the first layer is called with. None: the first entry of the micro-batch.
        no_decay: glob patterns of parameter names that weight decay is not meant for.
        own_autograd: whether the layers call autograd themselves (a gradient within a forward). Where backwards come in
            two parts, that is refused otherwise, and costs some time.

    Raises:
        ConfigError: bounds that do not fit the layers, or no such stage.
    """
    cuts = check_bounds(bounds, len(whole.layers))
    if not 0 <= number < len(cuts) - 1:
        raise ConfigError(f"stage = {number!r}; legal are 0 to {len(cuts) - 2}")
    ends = Ends(_first_entry if inputs is None else inputs, loss)
    return TorchStage(whole, cuts, number, ends, arrays_of(torch.empty(0)), no_decay, own_autograd=own_autograd)


def stages(whole: Chain, bounds: Sequence[int] | int, loss: OutputLoss, *,
           inputs: Callable[[Any], Any] | None = None, no_decay: Sequence[str] = (),
           own_autograd: bool = False) -> list[TorchStage]:
    """All stages, each as `stage` makes it. Local."""
    cuts = check_bounds(bounds, len(whole.layers))
    return [stage(whole, cuts, number, loss, inputs=inputs, no_decay=no_decay, own_autograd=own_autograd)
            for number in range(len(cuts) - 1)]


def _first_entry(micro_batch: Any) -> Any:
    entry = micro_batch[0]
    return entry if isinstance(entry, torch.Tensor) else torch.as_tensor(entry)


def profile(whole: Chain, micro_batch: Any, loss: OutputLoss, *, inputs: Callable[[Any], Any] | None = None,
            repeats: int = 5) -> list[Layer]:
    """Measures each layer on this machine for one micro-batch: what `plan.pipeline.partition.by_time` needs. Local.

    Times are medians of `repeats` runs after one more. The last layer's have the loss in them. Changes nothing in the
    model: no gradients, buffers or random numbers. Functions that make modules are called.
    """
    return profile_chain(whole, micro_batch, Ends(_first_entry if inputs is None else inputs, loss), repeats)


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
