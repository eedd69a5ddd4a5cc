"""Any torch model as a chain of pieces, cut before named submodules.

    model, example -> graph in training, graph in evaluation -> pieces -> chain: a layer a piece, which has the
    parameters and buffers that the piece reads -> compared with the model on the example

Joins tracing, pieces and the chain. Must not know stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from zlib import crc32

import torch

from hpctrain.adapters.torch.layers import Buffer, Chain, Part, TorchLayer, linked
from hpctrain.adapters.torch.pieces import Code, Piece, cut_graph
from hpctrain.adapters.torch.sameness import compare, in_evaluation, observe
from hpctrain.adapters.torch.tracing import INSTEAD, Graph, Inputs, copied_arguments, marked, trace
from hpctrain.errors import ConfigError, UnsupportedError

__all__ = ["split"]


def split(model: torch.nn.Module, example: Any, at: Sequence[str]) -> Chain:
    """The model as a chain of pieces; one more than there are cuts. Local.

    The model is traced twice: with its training flags as they are, and in evaluation. Both are compared with the
    model on the example before anything else runs. Nothing in the model changes.

    Raises:
        ConfigError: a name that cannot be cut at.
        UnsupportedError: a model that cannot be traced, or whose pieces would not compute what it computes.
    """
    known = _tensors_of(model)
    with marked(model, at) as called:
        _check_called(model, example, at, called)
        in_training = trace(model, example)
        with in_evaluation(model):
            graphs = in_training, trace(model, example)
    pairs = list(zip(*(cut_graph(graph.module, [*known]) for graph in graphs), strict=True))
    layers = _layers(pairs, graphs, known)
    changed = _compare(model, layers, graphs, example)
    for name in changed:
        users = [number for number, layer in enumerate(layers) if any(
            isinstance(part, Buffer) and part.tensor is known[name].tensor for part in layer.parts.values())]
        if len(users) > 1:
            raise UnsupportedError(f"buffer {name!r} changes in a forward, and pieces {users} use it, which may be on "
                                   f"different ranks; move the cuts, or {INSTEAD}")
    _try_sizes_of_one(model, layers, graphs, example)
    return linked(layers, model)


def _tensors_of(model: torch.nn.Module) -> dict[str, Any]:
    """All parameters and buffers, by all of their names, as parts."""
    kept = model.state_dict(keep_vars=True)
    buffers = {name: Buffer(b, name in kept) for name, b in model.named_buffers(remove_duplicate=False)}
    return {**dict(model.named_parameters(remove_duplicate=False)), **buffers}


def _check_called(model: torch.nn.Module, example: Any, at: Sequence[str], called: list[str]) -> None:
    """Each module to cut at is called once."""
    args, kwargs = copied_arguments(example)
    observe(model, lambda: model(*args, **kwargs), lambda outputs: [], backward=False)
    for name in at:
        if called.count(name) != 1:
            raise ConfigError(f"at has {name!r}, which the model calls {called.count(name)} times in a forward; legal "
                              "are modules that are called once")


def _layers(pairs: Sequence[tuple[Code, Code]], graphs: tuple[Graph, Graph],
            known: Mapping[str, Any]) -> list[TorchLayer]:
    """A layer a piece. Tensors that no piece reads go where others of their module are, else to the first piece."""
    names = [list(dict.fromkeys((*ours.tensors, *theirs.tensors))) for ours, theirs in pairs]
    used = {id(_tensor(known[name])) for of_piece in names for name in of_piece}
    own = [{name.rpartition(".")[0] for name in of_piece} for of_piece in names]
    further: list[list[str]] = [[] for _ in pairs]
    for name, part in known.items():
        if id(_tensor(part)) not in used:
            used.add(id(_tensor(part)))
            home = next((n for n, modules in enumerate(own) if name.rpartition(".")[0] in modules), 0)
            further[home].append(name)
    layers = []
    keys = crc32(graphs[0].module.code.encode()), crc32(graphs[1].module.code.encode())
    for number, codes in enumerate(pairs):
        begin = tuple(graph.inputs for graph in graphs) if number == 0 else ()
        end = tuple(graph.outputs for graph in graphs) if number == len(pairs) - 1 else ()
        piece = Piece(names[number], codes, keys, begin, end)
        parts: dict[str, Part] = {f"(piece {number})": piece}
        parts.update((name, known[name]) for name in (*names[number], *further[number]))
        layers.append(TorchLayer(parts, _run))
    return layers


def _tensor(part: Any) -> torch.Tensor:
    return part.tensor if isinstance(part, Buffer) else part


def _run(piece: Piece, *rest: Any) -> Any:
    *parts, value = rest
    return piece(parts, value)


def _compare(model: torch.nn.Module, layers: Sequence[TorchLayer], graphs: tuple[Graph, Graph],
             example: Any) -> Sequence[str]:
    """The pieces compute what the model does; they learn which values they write into. Gives what buffers change."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    args, kwargs = copied_arguments(example)
    with in_evaluation(model):
        truths = [observe(model, lambda: model(*args, **kwargs), graphs[1].flat_outputs, backward=False)]
    args, kwargs = copied_arguments(example)
    truths.insert(0, observe(model, lambda: model(*args, **kwargs), graphs[0].flat_outputs, backward=True))
    for mode, graph, truth in zip(("training", "evaluation"), graphs, truths, strict=True):
        found = observe(model, partial(_learned, layers, example, mode), list, backward=mode == "training")
        wrong = compare(found, found.outputs, truth, graph.flat_outputs(truth.outputs), dtype)
        if wrong:
            raise UnsupportedError(
                f"the pieces do not compute what the model does in {mode}: {wrong}. Such are models with a backward of "
                "their own (autograd.Function, hooks of gradients, reentrant checkpoints), that write into a tensor of "
                f"which another piece has a view, or that change from call to call; move the cuts, or {INSTEAD}")
    return truths[0].changed


def _try_sizes_of_one(model: torch.nn.Module, layers: Sequence[TorchLayer], graphs: tuple[Graph, Graph],
                      example: Any) -> None:
    """Allows sizes of 1 where the example has more, if the pieces are right with them. The trace itself leaves open.

    Sizes are tried one by one, those that are the same in the example together (several inputs of one batch), and
    at last all of which none was wrong.
    """
    inputs = [graph.inputs for graph in graphs]
    free = [of_mode.free() for of_mode in inputs]
    if [*free[0].values()] != [*free[1].values()]:
        return
    symbols = list(zip(*free, strict=True))  # the name of a size in each mode
    sizes = [inputs[0].size(example, free[0][ours][0]) for ours, _ in symbols]
    together = [[pair for pair, size in zip(symbols, sizes, strict=True) if size == wanted] for wanted in set(sizes)]

    def right(which: Sequence[tuple[str, str]]) -> bool:
        try:
            _allow(inputs, which, 1)
            places = [place for ours, _ in which for place in free[0][ours]]
            _compare(model, layers, graphs, inputs[0].narrowed(example, places))
        except Exception:  # noqa: BLE001 - of the model, which may not be for such a size
            return False
        finally:
            _allow(inputs, which, 2)
        return True

    legal = {pair for trial in [*([pair] for pair in symbols), *together] if right(trial) for pair in trial}
    if legal and right([*legal]):
        _allow(inputs, [*legal], 1)


def _allow(inputs: Sequence[Inputs], symbols: Sequence[tuple[str, str]], least: int) -> None:
    for of_mode, names in zip(inputs, zip(*symbols, strict=True), strict=True):
        of_mode.allow(names, least)


def _learned(layers: Sequence[TorchLayer], example: Any, mode: str) -> Any:
    value = example
    for layer in layers:
        piece, *parts = layer.parts.values()
        piece.train(mode == "training")
        value = piece.learn(parts, value)
        piece.train()
    return value
