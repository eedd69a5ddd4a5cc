"""One rank's part of a pipeline: the methods of all actions, for the stages that the rank holds.

    2F1   inputs of stage 2 -> model -> outputs, stash        2SA1  outputs to the next stage       2RA1  inputs
    2B1   gradient of the outputs, stash -> gradient of       2SG1  ... of the inputs, to the       2RG1  ... of the
          the inputs, of the parameters                             stage before                          outputs

With several copies of the model each has its own stages, one after the other, and its own part of the micro-batches.
Neighbours on one rank hand nests over as they are. A stash is let go of at the end of its backward, or of the first
part of it. Where nothing up to a stage is trained, or no gradient of its outputs comes, its backwards do nothing.
Knows models, messages and the actions; the order of the actions is given.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from hpctrain.collectives import Group
from hpctrain.collectives.group import NUM_CHANNELS
from hpctrain.contracts import Array, Arrays, ArraysOf
from hpctrain.dtypes import dtype_of
from hpctrain.errors import UnsupportedError
from hpctrain.pipeline.buffers import Buffers
from hpctrain.pipeline.executor import execute
from hpctrain.pipeline.messages import GradientReceiver, GradientSender, Link, Receiver, Sender
from hpctrain.pipeline.nest import Form
from hpctrain.pipeline.pieces import Replicas
from hpctrain.pipeline.stage import Stage
from hpctrain.plan.pipeline.messages import Channel
from hpctrain.plan.pipeline.stash import Peak
from hpctrain.plan.pipeline.trace import Span
from hpctrain.plan.schedule import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    OptimizerStep,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    SendActivation,
    SendGrad,
)

__all__ = ["Collector", "PipelineRun", "channel_numbers"]

_Key = tuple[int, int]  # (stage, micro-batch)


class _Rest(NamedTuple):
    """What the first part of a backward left for the second, which may be None; no `_Rest`: there is no second."""

    content: Any


class Collector(Protocol):
    """Where gradients of parameters go."""

    def begin(self, *, completes: bool) -> None:
        """A backward of a stage begins; `completes`: its last one of the step."""

    def deliver(self, name: str, gradient: Array) -> None:
        """As `Model.backward` calls it."""

    def end(self) -> None:
        """The backward is over."""


class PipelineRun:
    """The stages of one rank. All methods are local but `train` and `evaluate`: collective over `group`.

    Args:
        places: the rank of each stage, copy by copy.
        models: the models of this rank's stages; those of two copies of a stage may be one.
        group: one rank a place.
        arrays, arrays_of: of this rank's models; of any array.
        trained: for each stage of one copy whether it has trained parameters; the same on all ranks.
        replicas: the tensor group that has this rank's stages, where there is one; its ranks make each pass together.

    Attributes:
        peaks: for each stage of this rank, the most stashes there were at one time in the last `train`.
        spans: what ran when in the last `train`, in seconds since it began on this rank.
        aligned: whether all ranks wait for each other at the beginning, so that their times can be compared.
    """

    def __init__(self, places: Sequence[int], models: Mapping[int, Stage], group: Group, arrays: Arrays,
                 arrays_of: ArraysOf, trained: Sequence[bool], replicas: Replicas | None = None) -> None:
        self._places, self._models, self._group, self._rank = tuple(places), dict(models), group, group.rank
        self._depth = len(trained)
        self._reached = [any(trained[: stage % self._depth + 1]) for stage in range(len(places))]
        self._buffers = Buffers(arrays)
        self._make_channels(group, arrays, arrays_of, replicas if replicas and replicas.group.size > 1 else None)
        self._start(())
        self.peaks: dict[int, Peak] = {}
        self.spans: list[Span] = []
        self.aligned = False

    def _make_channels(self, group: Group, arrays: Arrays, arrays_of: ArraysOf, replicas: Replicas | None) -> None:
        numbers = channel_numbers(self._places, self._depth)

        def link(channel: Channel, peer: int) -> Link:
            return Link(group, arrays, self._buffers, peer, numbers[channel], deque(), replicas)

        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}
        self._gradient_senders: dict[int, GradientSender] = {}
        self._gradient_receivers: dict[int, GradientReceiver] = {}
        for stage, model in self._models.items():
            before, after = stage - 1, stage + 1
            if not self._is_first(stage) and self._places[before] != self._rank:
                self._receivers[stage] = Receiver(link(("activation", before), self._places[before]))
                self._gradient_senders[stage] = GradientSender(link(("grad", stage), self._places[before]), arrays_of)
            if not self._is_last(stage) and self._places[after] != self._rank:
                needs = _is_float if self._reached[stage] else _never
                self._senders[stage] = Sender(link(("activation", stage), self._places[after]), arrays_of, needs,
                                              model.replicated if replicas is not None else False)
                self._gradient_receivers[stage] = GradientReceiver(link(("grad", after), self._places[after]))

    def _is_first(self, stage: int) -> bool:
        """Whether it is the first of its copy."""
        return stage % self._depth == 0

    def _is_last(self, stage: int) -> bool:
        """Whether it is the last of its copy, which has the loss."""
        return (stage + 1) % self._depth == 0

    def _start(self, order: Sequence[Action]) -> None:
        """A pass begins."""
        self._inputs: dict[_Key, Any] = {}
        self._outputs: dict[_Key, Any] = {}
        self._output_grads: dict[_Key, Any] = {}
        self._input_grads: dict[_Key, Any] = {}
        self._received_forms: dict[_Key, Form] = {}
        self._sent_forms: dict[_Key, Form] = {}
        self._stashes: dict[int, dict[int, Any]] = {stage: {} for stage in self._models}
        self._rests: dict[int, dict[int, _Rest | None]] = {stage: {} for stage in self._models}
        self._terms = [0.0, 0.0]
        self._to_come: dict[tuple[type, int], deque[int]] = defaultdict(deque)
        for action in order:
            if isinstance(action, RecvActivation | RecvGrad):
                self._to_come[type(action), action.stage].append(action.micro_batch)
        self._split = {(a.stage, a.micro_batch) for a in order if isinstance(a, BackwardInput)}
        for stage, receiver in self._receivers.items():
            if self._to_come[RecvActivation, stage]:
                receiver.expect()

    # Passes -----------------------------------------------------------------------------------------------------------

    def train(self, order: Sequence[Action], batches: Sequence[Any], gradients: Collector, scale: float,
              reduce: Callable[[], None], update: Callable[[], None] | None = None) -> tuple[float, float]:
        """Does all actions of `order` (with messages); gives (loss_sum, weight) of what this rank saw of them.

        `scale` multiplies the loss, `reduce` is the reduction of all gradients, `update` an update; None: it is left to
        the caller.
        """
        self._start(order)
        self._batches, self._gradients, self._scale, self._training = batches, gradients, scale, True
        self.peaks = {stage: Peak(0, 0) for stage in self._models}
        self.spans, self._began = [], self._beginning()
        methods: dict[type, Callable[[Any], None]] = {
            Forward: self._forward, Backward: self._backward, BackwardInput: self._backward_input,
            BackwardWeight: self._backward_weight}
        timed = {kind: partial(self._timed, method) for kind, method in methods.items()}
        execute(order, {**timed, **self._message_methods(), ReduceGrads: lambda action: reduce(),
                        OptimizerStep: lambda action: update() if update else None})
        return self._finish()

    def evaluate(self, order: Sequence[Action], batches: Sequence[Any]) -> tuple[float, float]:
        """The forwards of `order` (with messages), nothing kept; gives (loss_sum, weight) as seen by this rank."""
        self._start(order)
        self._batches, self._training = batches, False
        execute(order, {Forward: self._forward, **self._message_methods(), SendActivation: self._send_in_rounds})
        return self._finish()

    def _beginning(self) -> float:
        """The moment from which times count. Collective over the group where ranks are aligned."""
        if not self.aligned:
            return time.perf_counter()
        clocks: list[float] = self._group.exchange(time.perf_counter())
        one_node = len(self._group.transport.node_ranks()) == self._group.size
        return max(clocks) if one_node else time.perf_counter()  # the ranks of a node have one clock

    def _message_methods(self) -> dict[type, Callable[[Any], None]]:
        return {SendActivation: self._send_activation, RecvActivation: self._receive_activation,
                SendGrad: self._send_gradient, RecvGrad: self._receive_gradient}

    def _finish(self) -> tuple[float, float]:
        for link in [*(s.link for s in self._senders.values()), *(s.link for s in self._gradient_senders.values())]:
            link.finish()
        self._batches = ()
        self._buffers.tidy()
        return self._terms[0], self._terms[1]

    def _timed(self, method: Callable[[Any], None], action: Action) -> None:
        start = time.perf_counter() - self._began
        method(action)
        self.spans.append(Span(self._rank, action, start, time.perf_counter() - self._began))

    # Computation ------------------------------------------------------------------------------------------------------

    def _forward(self, action: Forward) -> None:
        stage, i = action.stage, action.micro_batch
        inputs = self._inputs.pop((stage, i), None)
        model = self._models[stage]
        model.splits = (stage, i) in self._split
        outputs, stash = model.forward(self._batches[i], inputs, training=self._training)
        if self._is_last(stage):
            loss_sum, weight = outputs
            self._terms[0] += float(loss_sum)
            self._terms[1] += float(weight)
        elif stage in self._senders:
            self._outputs[stage, i] = outputs
        else:
            self._inputs[stage + 1, i] = outputs
        if self._training:
            self._stashes[stage][i] = stash
            peak = self.peaks[stage]
            now = len(self._stashes[stage])
            self.peaks[stage] = Peak(max(peak.stash, now), max(peak.held, now + len(self._rests[stage])))

    def _backward(self, action: Backward) -> None:
        stage, i = action.stage, action.micro_batch
        stash = self._stashes[stage].pop(i)
        grads = self._output_grads.pop((stage, i), None)
        if self._has_gradient(stage, grads):
            self._gradients.begin(completes=action.completes)
            self._hand_back(stage, i, self._models[stage].backward(stash, grads, self._gradients.deliver,
                                                                   self._scale_of(stage)))
            self._gradients.end()

    def _backward_input(self, action: BackwardInput) -> None:
        stage, i = action.stage, action.micro_batch
        stash = self._stashes[stage].pop(i)
        grads = self._output_grads.pop((stage, i), None)
        self._rests[stage][i] = None
        if self._has_gradient(stage, grads):
            input_grads, rest = self._models[stage].backward_input(stash, grads, self._scale_of(stage))
            self._rests[stage][i] = _Rest(rest)
            self._hand_back(stage, i, input_grads)

    def _backward_weight(self, action: BackwardWeight) -> None:
        rest = self._rests[action.stage].pop(action.micro_batch)
        if rest is not None:
            self._gradients.begin(completes=action.completes)
            self._models[action.stage].backward_weight(rest.content, self._gradients.deliver)
            self._gradients.end()

    def _has_gradient(self, stage: int, grads: Any) -> bool:
        """Whether a backward of the stage has anything to do: something to train, and a gradient of its outputs."""
        return self._reached[stage] and (self._is_last(stage) or _some(grads))

    def _scale_of(self, stage: int) -> float:
        """The last stage's loss is scaled; the others' gradients of outputs are already."""
        return self._scale if self._is_last(stage) else 1.0

    def _hand_back(self, stage: int, i: int, input_grads: Any) -> None:
        """Keeps the gradient of a stage's inputs for whoever made them."""
        if self._is_first(stage) or not self._reached[stage - 1]:
            return
        if stage in self._gradient_senders:
            self._input_grads[stage, i] = input_grads
        else:
            self._output_grads[stage - 1, i] = input_grads

    # Messages ---------------------------------------------------------------------------------------------------------

    def _send_activation(self, action: SendActivation) -> None:
        stage, i = action.stage, action.micro_batch
        self._sent_forms[stage, i] = self._senders[stage].send(self._outputs.pop((stage, i)))
        if (form := self._next_gradient(stage)) is not None:
            self._gradient_receivers[stage].expect(form)

    def _send_in_rounds(self, action: SendActivation) -> None:
        """As `_send_activation`, but a rank that is faster than the next does not pile up what it sends.

        As many micro-batches as there are ranks pass all stages before the next ones (`plan.pipeline.forwards`), so
        the receivers of a round's messages need nothing of the round after it.
        """
        if action.micro_batch % self._group.size == 0:
            self._senders[action.stage].link.finish()
        self._send_activation(action)

    def _receive_activation(self, action: RecvActivation) -> None:
        stage, i = action.stage, action.micro_batch
        to_come = self._to_come[RecvActivation, stage]
        to_come.popleft()
        found = self._receivers[stage].receive(ahead=bool(to_come))
        self._inputs[stage, i], self._received_forms[stage, i] = found

    def _send_gradient(self, action: SendGrad) -> None:
        key = action.stage, action.micro_batch
        self._gradient_senders[action.stage].send(self._input_grads.pop(key, None), self._received_forms.pop(key))

    def _receive_gradient(self, action: RecvGrad) -> None:
        stage, i = action.stage, action.micro_batch
        self._to_come[RecvGrad, stage].popleft()
        form, after = self._sent_forms.pop((stage, i)), self._next_gradient(stage)
        self._output_grads[stage, i] = self._gradient_receivers[stage].receive(form, after)

    def _next_gradient(self, stage: int) -> Form | None:
        """The form of the next gradient, once it is known what comes."""
        to_come = self._to_come[RecvGrad, stage]
        return self._sent_forms.get((stage, to_come[0])) if to_come else None


def channel_numbers(places: Sequence[int], depth: int | None = None) -> dict[Channel, int]:
    """The number of each channel among those from its sender to its receiver; the same on all ranks.

    `depth` is the number of stages of one copy; None: there is one copy.

    Raises:
        UnsupportedError: more channels between two ranks than a group has.
    """
    numbers: dict[Channel, int] = {}
    counts: dict[tuple[int, int], int] = {}
    pairs = [(s, pair) for s, pair in enumerate(pairwise(places)) if (s + 1) % (depth or len(places))]
    channels: list[tuple[Channel, tuple[int, int]]] = [(("activation", s), (a, b)) for s, (a, b) in pairs]
    channels += [(("grad", s + 1), (b, a)) for s, (a, b) in pairs]
    for channel, pair in channels:
        if pair[0] != pair[1]:
            numbers[channel] = counts.get(pair, 0)
            counts[pair] = numbers[channel] + 1
    if max(counts.values(), default=0) > NUM_CHANNELS:
        raise UnsupportedError(f"{len(places)} stages need {max(counts.values())} channels from one rank to another; "
                               f"legal are {NUM_CHANNELS}: take fewer chunks")
    return numbers


def _some(nest: Any) -> bool:
    """Whether there is anything but None in the gradient of a nest."""
    if isinstance(nest, dict):
        nest = list(nest.values())
    return any(map(_some, nest)) if isinstance(nest, list | tuple) else nest is not None


def _is_float(dtype: str) -> bool:
    return dtype_of(dtype).kind == "float"


def _never(dtype: str) -> bool:
    return False
