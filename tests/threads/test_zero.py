"""All stages of ZeRO equal one process and each other, whatever is shared, accumulated, tied, frozen or empty."""

from __future__ import annotations

import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import parity
import pytest
import torch

import hpctrain
import hpctrain.numpy
import hpctrain.torch
from hpctrain.errors import ConfigError, UnsupportedError
from hpctrain.runtime.step import Trainer
from hpctrain.transport.threads import run_threads

Zero = hpctrain.Zero
STAGES = [Zero(stage, share, accumulate, threshold=8, bucket_bytes=100)
          for stage, share, accumulate in [(0, "auto", "reduce"), (1, "auto", "reduce"), (2, "auto", "reduce"),
                                           (2, "auto", "buffer"), (3, "node", "reduce"), (3, "node", "buffer"),
                                           (3, "none", "reduce"), (3, "none", "buffer")]]
NAMES = [f"{z.stage}-{z.share}-{z.accumulate}" for z in STAGES]


@pytest.mark.parametrize("zero", STAGES, ids=NAMES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_numpy_network_equals_one_process(num_ranks: int, zero: Zero) -> None:
    for optimizer, accumulation, dtype in [("adamw", 2, "float64"), ("sgd", 1, "float64"), ("adamw", 3, "float32")]:
        run_threads(num_ranks, lambda t: parity.numpy_case(parity.context_of(t), optimizer, dtype, accumulation, 0.5,
                                                           zero=zero))


@pytest.mark.parametrize("zero", STAGES, ids=NAMES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_torch_module_equals_one_process(num_ranks: int, zero: Zero) -> None:
    cases = [("adamw", torch.float64, 2, 7), ("sgd", torch.float64, 1, 3), ("adamw", torch.float32, 3, 7)]
    for optimizer, dtype, accumulation, num_samples in cases:  # 3 samples on 4 ranks: one has none
        run_threads(num_ranks, lambda t: parity.torch_case(parity.context_of(t), optimizer, dtype, accumulation, 0.5,
                                                           num_samples, zero=zero))


class SharedMemoryOnly:
    """Chooses shared memory wherever it is offered: one order of additions for all reductions."""

    def choose(self, operation: str, *args: Any, ways: frozenset[str] = frozenset()) -> Any:
        ways = ways or next((a for a in args if isinstance(a, frozenset)), ways)
        plan = {"broadcast": "ring", "all_reduce": "ring", "reduce_scatter": "pairwise", "all_gather": "ring"}
        return SimpleNamespace(algorithm="shared memory" if "shared memory" in ways else plan[operation])


def trained(transport: Any, zero: Zero, *, accumulation: int = 1, dtype: torch.dtype = torch.float32,
            samples: int = 7, **options: Any) -> parity.Trace:
    """A run whose reductions all add in the same order."""
    context = parity.context_of(transport)
    context.world.choose_by(SharedMemoryOnly())
    module = parity.TinyNet(dtype)
    module.unused.requires_grad_(False)  # what never comes keeps buckets waiting, in memory that is not shared
    model = hpctrain.torch.adapt(module, parity.torch_loss)
    return parity.train(context, model, parity.global_batches(5, samples, dtype), accumulation,
                        optimizer=hpctrain.AdamW(lr=0.02), zero=zero, **options)


def assert_bitwise(traces: list[list[parity.Trace]]) -> None:
    first = traces[0][0]
    for trace in (t for ranks in traces for t in ranks):
        assert trace.losses == first.losses
        for kind in ("gradients", "weights"):
            mine, theirs = getattr(trace, kind), getattr(first, kind)
            assert [n for n in theirs if not np.array_equal(mine[n], theirs[n])] == []


def adding_alike(num_ranks: int, accumulation: int) -> list[list[Zero]]:
    """The stages by their order of additions: an owner begins with its own, and spread units have other owners; with
    accumulation, some add micro-batches before ranks, and some after.
    """
    kinds: dict[Any, list[Zero]] = {}
    for z in STAGES:
        spread = z.share == "none" and num_ranks > 2
        kinds.setdefault((spread, z.accumulate if accumulation > 1 and z.stage > 1 else "buffer"), []).append(z)
    return list(kinds.values())


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stages_are_bitwise_equal(num_ranks: int, accumulation: int, dtype: torch.dtype) -> None:
    for same in adding_alike(num_ranks, accumulation):
        assert_bitwise([run_threads(num_ranks, lambda t, z=z: trained(t, z, accumulation=accumulation, dtype=dtype))
                        for z in same])


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_half_precision_with_a_master_is_bitwise_equal_at_all_stages(num_ranks: int) -> None:
    half = hpctrain.Precision(compute="bfloat16")
    wide = run_threads(num_ranks, lambda t: trained(t, STAGES[0]))[0]
    for same in adding_alike(num_ranks, 1):
        traces = [run_threads(num_ranks, lambda t, z=z: trained(t, z, precision=half)) for z in same]
        assert_bitwise(traces)
        np.testing.assert_allclose(traces[0][0].losses, wide.losses, rtol=2e-2)
        assert traces[0][0].losses != wide.losses


def test_clipping_counts_each_element_once() -> None:
    """The norm over own ranges is the norm of the whole gradient, at every stage, for every kind of norm."""
    for kind, order in (("l2", 2), ("l1", 1), ("inf", np.inf)):
        for zero in STAGES:
            for trace in run_threads(3, lambda t, z=zero, k=kind: trained(t, z, norm_kind=k, clip_norm=0.1)):
                whole = np.concatenate([g.reshape(-1) for g in trace.gradients.values()]).astype(np.float64)
                assert trace.norms[0] == pytest.approx(np.linalg.norm(whole, order), rel=1e-5)


class Slow:
    """A model that is slow on one rank, after it was told to begin its backward."""

    def __init__(self, model: Any, seconds: float) -> None:
        self._model, self._seconds = model, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def backward(self, *args: Any) -> Any:
        time.sleep(self._seconds)
        return self._model.backward(*args)


@pytest.mark.parametrize("zero", [z for z in STAGES if z.stage == 3], ids=lambda z: f"{z.share}-{z.accumulate}")
@pytest.mark.parametrize("slow", ["backward", "update"])
def test_nobody_reads_what_is_half_updated(zero: Zero, slow: str) -> None:
    """One rank is late with its backward, or with its update, which the others' next forward must not overtake."""
    batches = parity.global_batches(4, 6, torch.float64)
    truth = run_threads(1, lambda t: parity.train(
        parity.context_of(t), hpctrain.torch.adapt(parity.TinyNet(), parity.torch_loss), batches, 1,
        optimizer=hpctrain.AdamW(lr=0.02)))[0]

    def run(transport: Any) -> None:
        context, late = parity.context_of(transport), 0.03 * (transport.rank == 1)
        model = hpctrain.torch.adapt(parity.TinyNet(), parity.torch_loss)
        trainer = Trainer(context, Slow(model, late) if slow == "backward" else model,
                          optimizer=hpctrain.AdamW(lr=0.02), zero=zero)
        apply = trainer.optimizer.apply

        def late_apply(*args: Any) -> None:
            time.sleep(late)
            apply(*args)

        if slow == "update":
            trainer.optimizer.apply = late_apply  # type: ignore[method-assign]
        losses = [trainer.step(parity.micro_batches(b, context.rank, context.size, 1)).loss for b in batches]
        np.testing.assert_allclose(losses, truth.losses, rtol=1e-10)

    run_threads(3, run)


class Counting:
    """A transport that counts the bytes it sends in data messages, and shares no memory."""

    native, shares, concurrent = None, False, True

    def __init__(self, transport: Any) -> None:
        self._transport, self.sent = transport, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def place(self, memory: memoryview) -> None:
        return None

    def send(self, data: memoryview, destination: int, tag: int) -> Any:
        self.sent += len(data) if len(data) > 64 else 0  # the joint decision and the like are small
        return self._transport.send(data, destination, tag)


def even_network() -> Any:
    """Layers whose elements divide by 2, 3 and 4, without padding."""
    n, generator = hpctrain.numpy, np.random.default_rng(1)
    parameters = [n.Parameter(generator.normal(size=shape)) for shape in [(96, 96), (96,), (96, 96), (96, 96)]]
    return n.network([n.Linear(parameters[0], parameters[1]), n.Tanh(), n.Linear(parameters[2]), n.Gelu(),
                      n.Linear(parameters[3])], n.squared_error)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize(("stage", "accumulation", "factor"), [
    (0, 1, 2), (0, 2, 2), (1, 1, 2), (1, 2, 2), (2, 1, 2), (2, 2, 3), (3, 1, 3), (3, 2, 6)])
def test_bytes_on_the_wire(num_ranks: int, stage: int, accumulation: int, factor: int) -> None:
    """2 (n-1)/n per parameter at stages 0 to 2 and 3 (n-1)/n at stage 3 (arXiv 1910.02054, section 7)."""
    def run(transport: Any) -> None:
        counting = Counting(transport)
        model = even_network()
        trainer = Trainer(parity.context_of(counting), model, optimizer=hpctrain.AdamW(),
                          zero=Zero(stage, "none", threshold=0, bucket_bytes=1))
        batch = (np.ones((2, 96)), np.zeros((2, 96)))
        count = sum(p.count for p in model.placements)
        trainer.step([batch] * accumulation)  # the first pass is learnt, which takes words
        for _ in range(2):
            before = counting.sent
            trainer.step([batch] * accumulation)
            assert counting.sent - before == factor * (num_ranks - 1) * count // num_ranks * 8

    run_threads(num_ranks, run)


def test_zero_options_name_themselves() -> None:
    for options, word in [({"stage": 4}, "zero.stage = 4"), ({"share": "nod"}, "'node'"),
                          ({"threshold": -1}, "threshold"),
                          ({"accumulate": "no"}, "'reduce' or 'buffer'"), ({"bucket_bytes": 0}, "bucket_bytes")]:
        with pytest.raises(ConfigError, match=word):
            Zero(**options)


def test_nodes_with_other_numbers_of_ranks_are_refused_on_all_ranks() -> None:
    def run(transport: Any) -> None:
        def make(share: str) -> Trainer:
            model = hpctrain.torch.adapt(parity.TinyNet(), parity.torch_loss)
            return Trainer(parity.context_of(transport), model, optimizer=hpctrain.AdamW(),
                           zero=Zero(3, share, threshold=0))

        with pytest.raises(ConfigError, match="'none' or 'auto'"):
            make("node")
        assert make("auto")._flat.units is not None

    run_threads(3, run, ranks_per_node=2)


@pytest.mark.parametrize("accumulate", ["reduce", "buffer"])
@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(2, 1), (4, 2), (6, 3), (6, 2)])
def test_once_per_node_on_several_nodes_equals_one_process(num_ranks: int, ranks_per_node: int,
                                                           accumulate: str) -> None:
    zero = Zero(3, "node", accumulate, bucket_bytes=100)
    for accumulation in (1, 2):
        run_threads(num_ranks, lambda t: parity.torch_case(parity.context_of(t), "adamw", torch.float64, accumulation,
                                                           0.5, zero=zero), ranks_per_node=ranks_per_node)


def test_once_per_node_in_half_precision_on_several_nodes() -> None:
    half = hpctrain.Precision(compute="bfloat16")
    spread, nodes = ([run_threads(4, lambda t, s=share: trained(t, Zero(3, s, threshold=0), precision=half),
                                  ranks_per_node=2)] for share in ("none", "node"))
    for a, b in zip(spread[0], nodes[0], strict=True):
        np.testing.assert_allclose(a.losses, b.losses, rtol=1e-2)
        assert all(np.array_equal(b.weights[n], nodes[0][0].weights[n]) for n in b.weights)


def test_spread_parameters_are_not_there_outside_of_a_pass() -> None:
    def run(transport: Any) -> None:
        network = parity.numpy_network("float64")
        before = {p.name: network.parameter(p.name).copy() for p in network.placements}
        trainer = Trainer(parity.context_of(transport), network, optimizer=hpctrain.AdamW(),
                          zero=Zero(3, "none", threshold=0))
        with pytest.raises(UnsupportedError, match=r"Trainer\.parameters"):
            network.parameter("1.weight")
        with pytest.raises(UnsupportedError, match=r"Trainer\.gathered"):
            network.predict(np.zeros((1, 2), int))
        with trainer.gathered():
            network.predict(np.zeros((1, 2), int))
            assert all(np.array_equal(network.parameter(name), value) for name, value in before.items())
        with pytest.raises(UnsupportedError):
            network.parameter("1.weight")
        assert {name for name, _ in trainer.parameters()} == before.keys()

    run_threads(2, run)


def noted(log: list[str], name: str, call: Any) -> Any:
    """`call`, which is noted in `log`."""
    def calling(unit: int) -> Any:
        log.append(f"{name} {unit}")
        return call(unit)

    return calling


def test_the_next_unit_comes_while_this_one_computes() -> None:
    def run(transport: Any) -> list[str]:
        network, log = even_network(), list[str]()
        trainer = Trainer(parity.context_of(transport), network, optimizer=hpctrain.AdamW(),
                          zero=Zero(3, "none", threshold=0))
        units = trainer._flat.units
        assert units is not None
        for owner, name in ((units, "_start"), (network, "open"), (network, "close")):
            setattr(owner, name, noted(log, name.strip("_"), getattr(owner, name)))
        trainer.step([(np.ones((2, 96)), np.zeros((2, 96)))])
        del log[:]
        trainer.step([(np.ones((2, 96)), np.zeros((2, 96)))])
        return log

    order = (0, 1, 2, 2, 1, 0)
    expected = ["start 0", "open 0"]
    for unit, following in pairwise(order):
        expected += [f"start {following}", f"close {unit}", f"open {following}"]
    assert run_threads(2, run) == [[*expected, "close 0"]] * 2


class Wandering:
    """A model whose units are watched in another order from the given pass on."""

    def __init__(self, model: Any, turns: int) -> None:
        self._model, self._left = model, turns

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, *args: Any, **options: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            self._model._before(1)
            self._model._after(1)
        return self._model.forward(*args, **options)


@pytest.mark.parametrize("turns", [0, 1])
def test_another_way_through_the_model_is_refused(turns: int) -> None:
    def run(transport: Any) -> None:
        model = Wandering(parity.numpy_network("float64"), turns if transport.rank else 99)
        trainer = Trainer(parity.context_of(transport), model, optimizer=hpctrain.AdamW(),
                          zero=Zero(3, "none", threshold=0))
        batch = (np.zeros((1, 2), int), np.zeros(1, int))
        for _ in range(2):
            trainer.step([batch])

    with pytest.raises(UnsupportedError, match="different ways" if turns == 0 else "another way than the first"):
        run_threads(2, run)


def test_evaluation_with_different_numbers_of_batches() -> None:
    batch = parity.global_batches(1, 8, torch.float64)[0]
    pieces = [tuple(t[i : i + 1] for t in batch) for i in range(8)]
    shares = [pieces[:5], pieces[5:], []]

    def run(transport: Any, zero: Zero) -> float:
        model = hpctrain.torch.adapt(parity.TinyNet(), parity.torch_loss)
        trainer = Trainer(parity.context_of(transport), model, optimizer=hpctrain.AdamW(), zero=zero)
        return [trainer.evaluate(iter(shares[transport.rank])).loss for _ in range(2)][1]

    losses = {loss for zero in STAGES for loss in run_threads(3, lambda t, z=zero: run(t, z))}
    assert len(losses) == 1


GROUPS = [hpctrain.ParameterGroup("no decay", ("*bias",), lr=0.01, weight_decay=0.0,
                                  schedule=hpctrain.WarmupLinear(2, 8)), hpctrain.ParameterGroup("empty", ("none",))]


@pytest.mark.parametrize("optimizer", [hpctrain.AdamW(lr=0.02), hpctrain.LAMB(lr=0.02), hpctrain.Muon(lr=0.02)],
                         ids=["adamw", "lamb", "muon"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_groups_and_whole_tensors_at_every_stage(num_ranks: int, optimizer: Any) -> None:
    """Optimizers that need whole tensors get them; each element follows the settings of its group."""
    batches = parity.global_batches(4, 7, torch.float64)

    def run(transport: Any, zero: Zero) -> parity.Trace:
        model = hpctrain.torch.adapt(parity.TinyNet(), parity.torch_loss)
        return parity.train(parity.context_of(transport), model, batches, 2, optimizer=optimizer, zero=zero,
                            groups=GROUPS, clip_norm=0.5)

    truth = run_threads(1, lambda t: run(t, Zero()))[0]
    for zero in STAGES:
        for trace in run_threads(num_ranks, lambda t, z=zero: run(t, z)):
            parity.assert_same(trace, truth, 1e-9)
