"""The pieces of a traced graph: each runs the operations between two marks.

    graph    x -> a -> mark -> b(a) -> mark -> c(a, b)
    piece 0: x -> (a)        piece 1: (a) -> (a, b)         piece 2: (a, b) -> outputs

A value that a later piece needs is handed through all pieces between. Owns how a graph is cut, and the module that runs
a piece. Must not know stages, or how graphs are traced.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from hpctrain.adapters.torch.layers import Buffer
from hpctrain.errors import ConfigError, UnsupportedError

__all__ = ["Code", "Piece", "cut_graph"]

_ATEN = torch.ops.aten

#: The functions of torch that the operations of a graph are, where a backward has two parts (`later` knows these).
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    _ATEN.linear.default: functional.linear,
    _ATEN.addmm.default: torch.addmm,
    _ATEN.matmul.default: torch.matmul,
    _ATEN.mm.default: torch.mm,
    _ATEN.conv1d.default: functional.conv1d,
    _ATEN.conv2d.default: functional.conv2d,
    _ATEN.conv3d.default: functional.conv3d,
}


@dataclass
class Code:
    """A piece in one mode.

    `run(*tensors, *constants, *values)` gives the tuple of values handed on. `tensors` are names of parameters and
    buffers of the model, `dtypes` theirs. `taken` are the numbers of the graph's inputs that the first piece uses.
    `copied` are the numbers of values that the piece writes into: as the values are another piece's, it has copies.
    """

    run: torch.fx.GraphModule
    tensors: tuple[str, ...]
    dtypes: list[torch.dtype]
    constants: tuple[torch.Tensor, ...]
    taken: tuple[int, ...] | None
    copied: set[int] = field(default_factory=set)

    def learn(self, tensors: Sequence[torch.Tensor], values: Sequence[Any]) -> tuple[Any, ...]:
        """Runs it, and finds `copied`."""
        copies = [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
        found: tuple[Any, ...] = self.run(*tensors, *self.constants, *copies)
        self.copied |= {n for n, copy in enumerate(copies) if isinstance(copy, torch.Tensor) and copy._version > 0}
        return found

    def __call__(self, tensors: Sequence[torch.Tensor], values: Sequence[Any]) -> tuple[Any, ...]:
        """Runs it. Raises ConfigError where the tensors are no longer of the traced dtype."""
        if [tensor.dtype for tensor in tensors] != self.dtypes:
            name, now, then = next((name, tensor.dtype, dtype) for name, tensor, dtype in zip(
                self.tensors, tensors, self.dtypes, strict=True) if tensor.dtype != dtype)
            raise ConfigError(f"parameter {name!r} is {now}, and was {then} when split(...) traced the model, which "
                              "fixed it; convert the model before split(...)")
        given = [value.clone() if number in self.copied else value for number, value in enumerate(values)]
        found: tuple[Any, ...] = self.run(*tensors, *self.constants, *given)
        return found


class Piece(torch.nn.Module):
    """Runs the code of training or of evaluation, as its flag says. Has no tensors of its own.

    Args:
        names: of the tensors that it is given, in their order: those of both codes.
        codes: (in training, in evaluation).
        keys: for each mode a number of the whole graph, which goes before the values that are handed on, so that pieces
            of different traces do not meet unseen.
        begin: of the first piece, for each mode: from what the model is called with to values.
        end: of the last piece, for each mode: from values to what the model returns.
    """

    def __init__(self, names: Sequence[str], codes: tuple[Code, Code], keys: tuple[int, int],
                 begin: tuple[Callable[[Any], list[Any]], ...] = (),
                 end: tuple[Callable[[Sequence[Any]], Any], ...] = ()) -> None:
        super().__init__()
        self._names, self._codes, self._keys, self._begin, self._end = tuple(names), codes, keys, begin, end
        self._places = tuple([self._names.index(name) for name in code.tensors] for code in codes)

    def forward(self, parts: Sequence[torch.Tensor | Buffer], value: Any) -> Any:
        """A value of the piece before, or the model's input, to the next value, or the model's output."""
        mode, tensors, values = self._given(parts, value)
        found = self._codes[mode](tensors, values)
        return self._end[mode](found) if self._end else (self._keys[mode], *found)

    def learn(self, parts: Sequence[torch.Tensor | Buffer], value: Any) -> tuple[Any, ...]:
        """As `forward`, but learns what the code writes into; the last piece's values are not put together."""
        mode, tensors, values = self._given(parts, value)
        found = self._codes[mode].learn(tensors, values)
        return found if self._end else (self._keys[mode], *found)

    def __deepcopy__(self, memo: Any) -> Piece:
        """With a flag of its own; nothing else in it ever changes."""
        copied = Piece(self._names, self._codes, self._keys, self._begin, self._end)
        copied.training = self.training
        return copied

    def _given(self, parts: Sequence[torch.Tensor | Buffer], value: Any) -> tuple[int, list[torch.Tensor], list[Any]]:
        """(mode, tensors that the mode's code reads, its values)."""
        mode = 0 if self.training else 1
        taken = self._codes[mode].taken
        if taken is not None:
            flat = self._begin[mode](value)
            values = [flat[number] for number in taken]
        else:
            key, *values = value
            if key != self._keys[mode]:
                raise ConfigError("the stage before has another trace of the model than this one; call split(...) with "
                                  "the same model and an example of the same shapes on all ranks")
        chosen = [parts[place] for place in self._places[mode]]
        return mode, [part.tensor if isinstance(part, Buffer) else part for part in chosen], values


def cut_graph(module: torch.fx.GraphModule, known: Sequence[str]) -> list[Code]:
    """The pieces of a graph, in order; they hold no parameter. Local.

    `known` are the names of the model's parameters and buffers.

    Raises:
        UnsupportedError: a mark within a part of the model that runs in another mode.
    """
    mark = torch.ops.pippy._pipe_split.default
    if any(node.target is mark for inner in _graphs_within(module) for node in inner.graph.nodes):
        raise UnsupportedError("a cut is within torch.no_grad, torch.autocast, a reentrant checkpoint or another part "
                               "that torch.export takes for one operation; legal are cuts outside of these")
    nodes = [node for node in module.graph.nodes if node.op in ("call_function", "output")]
    home: dict[torch.fx.Node, int] = {}
    number = 0
    for node in nodes:
        if node.target is mark:
            number += 1
        else:
            home[node] = number
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    last_use = {node: max((home[user] for user in node.users if user in home), default=-1)
                for node in [*inputs, *home]}
    made = [*((node, -1) for node in inputs), *home.items()]
    handed = [[node for node, at in made if at < piece <= last_use[node]] for piece in range(number + 1)]
    codes = []
    for piece in range(number + 1):
        mine = [node for node in nodes if home.get(node) == piece]
        ends = handed[piece + 1] if piece < number else None
        taken = tuple(inputs.index(node) for node in handed[0]) if piece == 0 else None
        codes.append(_code(module, known, mine, handed[piece], ends, taken))
    return codes


def _code(module: torch.fx.GraphModule, known: Sequence[str], mine: Sequence[torch.fx.Node],
          begins: Sequence[torch.fx.Node], ends: Sequence[torch.fx.Node] | None,
          taken: tuple[int, ...] | None) -> Code:
    """The nodes `mine` as a function of what they read; it gives `ends`, or what the graph's output node has."""
    read = list(dict.fromkeys(node for user in mine for node in user.all_input_nodes if node.op == "get_attr"))
    found = {node: operator.attrgetter(str(node.target))(module) for node in read}
    tensors = [node for node in read if node.target in known]
    constants = [node for node in read if node.target not in known and isinstance(found[node], torch.Tensor)]
    graph = torch.fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in (*tensors, *constants, *begins)}
    inner = [node for node in read if node not in copies]  # graphs that an operation runs
    for node in (*inner, *mine):
        if node.op == "output":
            graph.output(torch.fx.node.map_arg(tuple(node.args[0]), copies.__getitem__))
            break
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].target = _FUNCTIONS.get(node.target, node.target)
        copies[node].meta = {}  # has tensors without memory, and what traced them
    if ends is not None:
        graph.output(tuple(copies[node] for node in ends))
    run = torch.fx.GraphModule({str(node.target): found[node] for node in inner}, graph)
    return Code(run, tuple(str(node.target) for node in tensors), [found[node].dtype for node in tensors],
                tuple(found[node] for node in constants), taken)


def _graphs_within(module: torch.nn.Module) -> Iterator[torch.fx.GraphModule]:
    return (inner for inner in module.modules() if inner is not module and isinstance(inner, torch.fx.GraphModule))
