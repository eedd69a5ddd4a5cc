"""The contracts between engines and backends. The file to read first.

    Plans say what. Engines say how. Backends touch the world. The runtime joins them.

An engine (collectives, zero, optim, pipeline, checkpoint) is written against these protocols and has never heard of
torch or MPI. A backend (arrays, transport, adapters) fulfils one of them with one library. Neither imports the other.

Words used below. *Memory*: a writable, C-contiguous `memoryview` of bytes (format "B"). *Array*: a tensor of whatever
library; engines only slice flat (1-D, contiguous) ones and hand them back. *dtype*: a name from `hpctrain.dtypes`.
*local*: no other rank takes part. *Collective over X*: every rank of X must call, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hpctrain.plan.placement import Placement

__all__ = ["Array", "Arrays", "ArraysOf", "Model", "Native", "NativeCall", "Place", "Replicated", "Request",
           "Transport", "UpdateNumbers", "Work"]

Array = Any  # an array of some library

#: Where memory lies in what a transport allocated: (number of the allocation, offset in bytes).
Place = tuple[int, int]

#: Which arrays of a nest: all, none, or said by part (keys of a dict, positions in a list or tuple; left out: none).
Replicated = bool | Mapping[Any, Any]


class Request(Protocol):
    """One message under way, returned by `Transport.send` and `Transport.recv`. Local calls only.

    Until it is done, the buffer of a send must not be written and that of a receive neither read nor written.
    """

    def done(self) -> bool:
        """Whether the message has arrived (or may be overwritten, for a send). Never blocks; makes progress."""

    def wait(self) -> None:
        """Blocks until `done()`. Raises TransportError when the peer or the job is gone."""


@dataclass(frozen=True, slots=True)
class NativeCall:
    """One collective for the transport's own library.

    `operation` is a key of `plan.algorithms.ALGORITHMS`; `reduction` a key of `dtypes.OPERATIONS`, "" where nothing is
    added. `source` is what this rank gives and `target` what it gets: the same memory where the collective
    works in place, None where the rank gives or gets nothing. `counts` are elements a rank, None for equal parts; of an
    all-to-all, (elements to each rank, elements from each rank).
    """

    operation: str
    dtype: str = "uint8"
    reduction: str = ""
    source: memoryview | None = None
    target: memoryview | None = None
    root: int = 0
    counts: Sequence[int] | tuple[Sequence[int], Sequence[int]] | None = None


class Native(Protocol):
    """Collectives of a transport's own library. All ranks make the same calls, `run` and `start`, in the same order."""

    def offers(self, operation: str, reduction: str, dtype: str, num_bytes: int) -> bool:
        """Whether a call may be made: the same answer on all ranks. `num_bytes` is of the whole array."""

    def run(self, call: NativeCall) -> None:
        """Blocks until this rank's part is done. Raises TransportError when a peer or the job is gone."""

    def start(self, call: NativeCall) -> Request:
        """Starts it; the memory belongs to it until the request is done."""

    def barrier(self) -> None:
        """Blocks until all ranks have come; what each stored in shared memory before is then seen by all."""

    def all_gather_words(self, mine: tuple[int, int, int]) -> Sequence[tuple[int, int, int]]:
        """All ranks' three numbers of 64 bits, in rank order. As `barrier`, it orders stores to shared memory."""


class Transport(Protocol):
    """Moves bytes between the ranks of one group. It never does arithmetic and never looks inside a buffer.

    Messages between one pair of ranks with one tag arrive in the order in which they were sent. A send may complete
    only when its receive is posted (rendezvous), so nobody may count on buffering. Any length, 0 included, is legal:
    a transport cuts what its library cannot carry in one piece.
    """

    name: str
    rank: int
    size: int
    native: Native | None  # the library's own collectives; the same on all ranks
    concurrent: bool  # whether two threads of this process may call it at the same time

    def allocate(self, num_bytes: int) -> memoryview:
        """Zeroed memory that is best for this transport, aligned to 64 bytes. Collective over the group.

        Every rank asks for the same number. Freed with its last view.
        """

    def allocate_node(self, num_bytes: int) -> memoryview | None:
        """Zeroed memory that exists once per node, the same for all of its ranks; None, on all ranks alike: cannot be.

        Collective over the group; every rank asks for the same number, and claims an equal part of the pages. `place`
        does not know it. Freed with its last view on all ranks.
        """

    @property
    def shares(self) -> bool:
        """Whether some allocation may be seen by the other ranks of the node; the same on all ranks. Local."""

    def place(self, memory: memoryview) -> Place | None:
        """Where `memory` lies, if inside one allocation that the other ranks of the node see. Local."""

    def view(self, rank: int, place: Place, num_bytes: int) -> memoryview:
        """The memory at `place` of `rank`, which is on this node. Local.

        Reading and writing it needs no message, but an understanding of who does so when.
        """

    def send(self, data: memoryview, destination: int, tag: int) -> Request:
        """Starts a message to rank `destination` of this group; 0 <= tag < 32768. Local, never blocks."""

    def recv(self, data: memoryview, source: int, tag: int) -> Request:
        """Starts to receive exactly `len(data)` bytes from rank `source`. Local, never blocks."""

    def subgroup(self, ranks: Sequence[int]) -> Transport | None:
        """A transport of `ranks` (numbered in that order), or None on a rank outside. Collective over this group.

        Disjoint groups may be made in one call by ranks passing their own group's list; an empty list means none.
        """

    def node_ranks(self) -> tuple[int, ...]:
        """The ranks of this group that share this rank's node (host memory), in order. Local."""

    def abort(self, code: int) -> None:
        """Ends the whole job with exit status `code`, at once. Local; does not return on MPI."""

    def close(self) -> None:
        """Releases what the transport holds. Collective over the group."""


@dataclass(frozen=True, slots=True)
class UpdateNumbers:
    """One element-wise update as numbers. `rule` names the arithmetic and the meaning of the states.

    adamw  exp_avg, exp_avg_sq: decoupled weight decay (arXiv 1711.05101, algorithm 2), as torch.optim.AdamW
    adam   exp_avg, exp_avg_sq: weight decay is L2, added to the gradient (arXiv 1412.6980), as torch.optim.Adam
    sgd    momentum, or nothing where `momentum` is 0: buffer = momentum * buffer + g, L2 in g, as torch.optim.SGD

    `step` counts from 1. `scale` multiplies the gradients first.
    """

    rule: str
    lr: float
    step: int = 1
    scale: float = 1.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    momentum: float = 0.0
    nesterov: bool = False


class Arrays(Protocol):
    """One array library's way to hold flat buffers and do the arithmetic on them. All calls are local.

    Every `Array` argument is of this library. Flat arrays are 1-D and C-contiguous.
    """

    name: str

    def dtype(self, array: Array) -> str:
        """The dtype name of `array`. Raises UnsupportedError for a type without a name in `hpctrain.dtypes`."""

    def shape(self, array: Array) -> tuple[int, ...]:
        """The shape of `array`."""

    def is_contiguous(self, array: Array) -> bool:
        """Whether the elements lie in C order without gaps."""

    def empty(self, count: int, dtype: str) -> Array:
        """A new flat array, values undefined."""

    def zeros(self, count: int, dtype: str) -> Array:
        """A new flat array of zeros."""

    def from_memory(self, memory: memoryview, dtype: str) -> Array:
        """A flat array over `memory`, not a copy; keeps the memory alive."""

    def shaped(self, flat: Array, shape: Sequence[int]) -> Array:
        """A view of a flat array in another shape (C order)."""

    def memory(self, array: Array) -> memoryview:
        """The bytes of a C-contiguous array, not a copy, also for half types. Raises ValueError for other layouts."""

    def flat(self, array: Array) -> Array:
        """A 1-D view of a C-contiguous array, without gradient tracking."""

    def to_flat(self, array: Array) -> Array:
        """A new flat array with the logical content of an array of any layout (C order)."""

    def assign(self, target: Array, source: Array) -> None:
        """`target[...] = source` for any layout and dtype of the two (cast with one rounding); equal element counts."""

    def combine(self, operation: str, target: Array, source: Array, first: Array | None = None) -> None:
        """`target = operation(target, source)` in place; `dtypes.OPERATIONS` but "mean"; source may be narrower.

        With `first`, of target's dtype, `target = operation(first, source)` in one pass.
        """

    def scale(self, array: Array, factor: float) -> None:
        """`array *= factor` in place."""

    def fill(self, array: Array, value: float) -> None:
        """Sets every element to `value`."""

    def sum_of_squares(self, array: Array) -> float:
        """Sum of |x|^2 of a flat array, accumulated in float64 or pairwise; inf and nan come through."""

    def abs_sum(self, array: Array) -> float:
        """Sum of |x| of a flat array, accumulated in float64 or pairwise; inf and nan come through."""

    def abs_max(self, array: Array) -> float:
        """Largest |x| of a flat array, 0.0 if it is empty; nan comes through."""

    def update(self, numbers: UpdateNumbers, masters: Sequence[Array], gradients: Sequence[Array],
               states: Sequence[Sequence[Array]], copies: Sequence[Array] = ()) -> None:
        """One update of flat ranges by element-wise arithmetic. One pass over memory where possible.

        masters[i], gradients[i], states[slot][i] and copies[i] have equal lengths; the masters and the states are of
        one dtype (not float16, in which squares of gradients are lost), gradients and copies of any. The gradient is
        `scale * gradients[i]`, and that is what `gradients` hold afterwards. `copies` (empty: none) receive the updated
        masters, cast with one rounding.
        """

    def orthogonalize(self, matrix: Array, shape: tuple[int, int], num_steps: int) -> None:
        """Replaces a flat matrix (C order) by about U V^T of its singular value decomposition, in place.

        Newton-Schulz iteration with the quintic of Muon (3.4445, -4.7750, 2.0315): singular values end in about
        [0.7, 1.2]. A matrix of zeros stays so.
        """

    def set_num_threads(self, count: int) -> None:
        """Threads that this library may use for one operation in this process."""


ArraysOf = Callable[[Array], Arrays]  # finds the backend of an array, or raises UnsupportedError


class Work(Protocol):
    """An asynchronous collective, returned by the `start_*` calls of `collectives.Group`. Local calls only."""

    def done(self) -> bool:
        """Whether the result is there. Never blocks; moves the work on as far as its messages allow."""

    def wait(self) -> None:
        """Blocks until done. Works of one group must be waited for in the order in which they were started."""


class Model(Protocol):
    """What an engine sees of a model (one pipeline stage of it). Fulfilled by `adapters`.

    Attributes:
        arrays: of its parameters.
        splits: set before a forward: whether its backward will come in two parts. Only a hint: each kind of backward is
            right after any forward.
    """

    arrays: Arrays
    splits: bool

    @property
    def placements(self) -> Sequence[Placement]:
        """One record a parameter, in the model's own order; tied parameters once, with their other names."""

    def parameter(self, name: str) -> Array:
        """The parameter as the model holds it now, in any layout; not while it is closed.

        Collective where the model was built in parts (before it is bound), and local otherwise.
        """

    def bind(self, name: str, parameter: Array) -> None:
        """Makes the flat array the home of the parameter, whose values it takes, cast to the array's dtype.

        From then on the model computes with that dtype. Frozen parameters are bound like the others.
        """

    def move(self, name: str, parameter: Array) -> None:
        """From now on the parameter is this flat array, with the values that are there; its type is the bound one's.

        What it was before stays as it is: a backward may come that needs it, and moves the parameter back first.
        """

    def check(self) -> None:
        """Raises ConfigError where the parameters are no longer those that were bound (moved, thawed). Every step."""

    def buffers(self) -> Mapping[str, Array]:
        """Arrays that are saved but not trained (running statistics), by name; the model's own, not copies."""

    def forward(self, micro_batch: Any, inputs: Any = None, *, training: bool = True) -> tuple[Any, Any]:
        """Runs one micro-batch; gives (outputs, stash). The last stage's outputs are the numbers (loss_sum, weight)."""

    @property
    def replicated(self) -> Replicated:
        """Which arrays of a stage's outputs have the same bits on all ranks of its tensor group; False: none.

        They may travel in pieces, a piece a rank, so where one differs all the same, the next stage gets a mixture. Of
        such an array the next stage gives one gradient, with the same bits on all ranks of its own tensor group: that
        of the array as a whole, summed over the group. All other arrays, and their gradients, go as they are from each
        rank to the rank at its place in the next stage's group. The structure of outputs is the same on all ranks. Read
        once, when the pipeline is made.
        """

    def backward(self, stash: Any, output_grads: Any, deliver: Callable[[str, Array], None],
                 scale: float = 1.0) -> Any:
        """Computes the gradient of scale * (the stash's loss_sum); returns the inputs' gradient.

        Calls `deliver(name, gradient)` once for each trained parameter that this backward reached, in any order, as
        soon as its gradient of this backward is complete. The gradient is an array of any layout, which the callee may
        read and write until it returns; the model keeps nothing of it.
        """

    def backward_input(self, stash: Any, output_grads: Any, scale: float = 1.0) -> tuple[Any, Any]:
        """The first part of `backward`: (the inputs' gradient, what the second part needs). No gradient is delivered.

        What only the first part needs is let go of with the stash.
        """

    def backward_weight(self, rest: Any, deliver: Callable[[str, Array], None]) -> None:
        """The second part of `backward`: delivers as `backward` does, from what `backward_input` gave."""

    @property
    def units(self) -> Sequence[Sequence[str]]:
        """Names of parameters that are used together, in the model's order; each parameter is in exactly one unit."""

    def watch(self, before: Callable[[int], None], after: Callable[[int], None]) -> None:
        """From now on every pass, forward and backward, calls `before(u)` before it reads parameters of unit u.

        It calls `after(u)`, once for each `before(u)`, when it will not read them until the next `before(u)`. The order
        of the calls is the same on all ranks that run the same pass.
        """

    def open(self, unit: int) -> Sequence[Array]:
        """Memory that the model lends its closed parameters, in the order of `units[unit]`: flat, values undefined.

        The dtype of each is that of the array it was bound to last.
        """

    def close(self, unit: int) -> None:
        """The bound or open parameters of the unit give up their memory. To read one then is an error that says so."""

    def rank_state(self) -> dict[str, bytes]:
        """What differs between ranks and is worth saving: states of random generators, by name. Raw bytes."""

    def restore_rank_state(self, state: Mapping[str, bytes]) -> None:
        """Takes back what `rank_state` gave on this rank."""
