"""Stages whose hidden units are split over a tensor group, run by the engine, and the same in one process.

    y = x + tanh(x A^T) B^T + h C^T        h: the hidden values of the stage before, of which each rank has its own part

The sums over hidden units are all-reduced, so x and y are the same on all tensor ranks, and so are their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpctrain.arrays import arrays_of
from hpctrain.pipeline.pieces import Replicas
from hpctrain.pipeline.run import PipelineRun
from hpctrain.plan.mesh import Mesh
from hpctrain.plan.pipeline.catalogue import schedule
from hpctrain.plan.pipeline.forwards import forwards
from hpctrain.plan.pipeline.messages import with_messages
from hpctrain.plan.split import part

WIDTH = 5
NUMPY = arrays_of(np.empty(0))


class Block:
    """A stage on one rank. `group` None: one process has it all. `split`: otherwise each rank of the group has it all.
    """

    def __init__(self, stage: int, last: int, group: Any, hidden: int, *, split: bool = True) -> None:
        self._stage, self._last = stage, last
        self._group = group if split else None
        self.rank = 0 if group is None else group.rank
        self.part = part(hidden, group.size, group.rank) if group is not None and split else (0, hidden)
        generator = np.random.default_rng([3, stage])
        a, b, c = generator.normal(size=(3, hidden, WIDTH)) / 2
        mine = slice(*self.part)
        self._a, self._b, self._c = a[mine], b[mine].T, c[mine].T
        self.replicated = {"x": True, "mask": True, "hidden": not split}

    def _sum(self, value: np.ndarray) -> Any:
        value = np.ascontiguousarray(value)
        return value if self._group is None else self._group.all_reduce(value)

    def forward(self, micro_batch: Any, inputs: Any = None, *, training: bool = True) -> tuple[Any, Any]:
        x, mask, target = micro_batch
        h = np.zeros((len(x), 0))
        if self._stage:
            assert list(inputs) == ["x", "hidden", "mask", "rank"] and inputs["rank"].tolist() == [self.rank]
            x, h, mask = inputs["x"], inputs["hidden"], inputs["mask"]
        a = np.tanh(x @ self._a.T)
        y = x + self._sum(a @ self._b.T + (h @ self._c.T if self._stage else 0))
        stash = x, h, a, mask[:, None] * (y - target)
        if self._stage < self._last:
            return {"x": y, "hidden": a, "mask": mask, "rank": np.array([self.rank])}, stash
        return (float((mask[:, None] * (y - target) ** 2).sum() / 2), float(mask.sum())), stash

    def backward_input(self, stash: Any, output_grads: Any, scale: float = 1.0) -> tuple[Any, Any]:
        x, h, a, error = stash
        last = self._stage == self._last
        gy = scale * error if last else output_grads["x"]
        gz = (gy @ self._b + (0 if last else output_grads["hidden"])) * (1 - a ** 2)
        gx = gy + self._sum(gz @ self._a)
        grads = {"x": gx, "hidden": gy @ self._c, "mask": None, "rank": None} if self._stage else None
        return grads, (x, h, a, gy, gz)

    def backward_weight(self, rest: Any, deliver: Callable[[str, Any], None]) -> None:
        x, h, a, gy, gz = rest
        deliver(f"{self._stage}.a", gz.T @ x)
        deliver(f"{self._stage}.b", a.T @ gy)
        if self._stage:
            deliver(f"{self._stage}.c", h.T @ gy)

    def backward(self, stash: Any, output_grads: Any, deliver: Callable[[str, Any], None], scale: float = 1.0) -> Any:
        grads, rest = self.backward_input(stash, output_grads, scale)
        self.backward_weight(rest, deliver)
        return grads


@dataclass
class Seen:
    """What is compared. Fulfils `pipeline.run.Collector`."""

    loss: float = 0.0
    weight: float = 0.0
    evaluated: float = 0.0
    gradients: dict[str, np.ndarray] = field(default_factory=dict)

    def begin(self, *, completes: bool) -> None:
        pass

    def deliver(self, name: str, gradient: np.ndarray) -> None:
        self.gradients[name] = self.gradients.get(name, 0) + gradient

    def end(self) -> None:
        pass


def batch(rows: Sequence[int]) -> list[Any]:
    """A micro-batch of so many rows each: (x, mask, target)."""
    generator = np.random.default_rng(8)
    return [(generator.normal(size=(n, WIDTH)), generator.integers(0, 3, size=n), generator.normal(size=(n, WIDTH)))
            for n in rows]


def alone(num_stages: int, batches: Sequence[Any], hidden: int, scale: float) -> Seen:
    """The truth: one process, stage after stage."""
    seen = Seen()
    blocks = [Block(s, num_stages - 1, None, hidden) for s in range(num_stages)]
    for micro_batch in batches:
        value: Any = None
        stashes = []
        for block in blocks:
            value, stash = block.forward(micro_batch, value)
            stashes.append(stash)
        seen.loss += value[0]
        seen.weight += value[1]
        grads: Any = None
        for block in reversed(blocks):
            grads = block.backward(stashes.pop(), grads, seen.deliver, scale)
    seen.evaluated = seen.loss
    return seen


def case(context: Any, tensor: int, name: str, rows: Sequence[int], *, hidden: int = 4, chunks: int | None = None,
         split: bool = True, watch: Callable[[Any, Any], None] | None = None, **how: Any) -> None:
    """Equal to one process, in a second step too; size / tensor stages. Collective over the context.

    `watch(pipeline group, tensor group)` is called before anything runs; `how` are options of `Replicas`.
    """
    mesh = Mesh({"pipeline": context.size // tensor, "tensor": tensor})
    pipeline, group = (context.world.subgroup(mesh.group(context.rank, axis)) for axis in ("pipeline", "tensor"))
    if watch is not None:
        watch(pipeline, group)
    plan = schedule(name, pipeline.size, len(rows), chunks=chunks)
    last = len(plan.places) - 1
    blocks = {s: Block(s, last, group, hidden, split=split) for s in plan.stages_of(pipeline.rank)}
    run = PipelineRun(plan.places, blocks, pipeline, NUMPY, arrays_of, [True] * (last + 1),
                      Replicas(group, arrays_of, **how))
    batches, truth = batch(rows), alone(last + 1, batch(rows), hidden, 0.5)
    for _ in range(2):
        seen = Seen()
        order = with_messages(plan)[pipeline.rank]
        seen.loss, seen.weight = run.train(order, batches, seen, 0.5, lambda: None)
        seen.evaluated, _ = run.evaluate(forwards(plan.places, pipeline.size, len(rows))[pipeline.rank], batches)
        compare(seen, truth, blocks, last)


def compare(seen: Seen, truth: Seen, blocks: dict[int, Block], last: int) -> None:
    if last in blocks:
        np.testing.assert_allclose([seen.loss, seen.evaluated], [truth.loss] * 2, rtol=1e-12)
        assert seen.weight == truth.weight
    assert seen.gradients.keys() == {name for name in truth.gradients if int(name.split(".")[0]) in blocks}
    for name, gradient in seen.gradients.items():
        mine = slice(*blocks[int(name.split(".")[0])].part)
        np.testing.assert_allclose(gradient, truth.gradients[name][mine], rtol=1e-10, atol=1e-12, err_msg=name)
