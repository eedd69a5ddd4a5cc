"""The optimizer on host memory: AdamW alone, and the whole phase between backward and the next forward.

    python bench/optimizer.py            50 M parameters, 1 and 2 threads
    python bench/optimizer.py --quick    5 M

All contenders work on the same float32 memory in turn. `bare step` is AdamW alone: 28 bytes a parameter must move (four
arrays are read, three written). `whole phase` is what mixed precision does in a step: divide by the weight and the loss
scale, test for overflow, clip by the norm, update, write the bfloat16 parameters. hpctrain needs no zeroed gradients
(the first micro-batch is assigned); a contender of its own zeroes them anyway, as torch's do.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from harness import Row, alternate, report, row

from hpctrain.arrays import arrays_of
from hpctrain.contracts import UpdateNumbers
from hpctrain.optim.clip import NORMS, gradient_norm, update_scale
from hpctrain.optim.flat import FlatOptimizer
from hpctrain.optim.groups import resolve_groups
from hpctrain.optim.options import AdamW
from hpctrain.optim.own import OwnBuffer
from hpctrain.optim.schedule import Constant
from hpctrain.plan.flat import flat_layouts
from hpctrain.plan.placement import Placement

FLOOR = "memory: 28 B a parameter at the rate of x *= c"
SEPARATE = "torch fused, separate passes"
OPTIONS = AdamW(lr=1e-5, weight_decay=0.01)
DIVISOR, CLIP = 64.0 * 2**10, 1.0  # weight times loss scale; a norm that clips

Contenders = dict[str, Callable[[int], Any]]


class Memory:
    """What all contenders work on."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.count = count
        self.parameters = torch.randn(count, generator=generator)
        self.fresh = torch.randn(count, generator=generator)
        self.gradients = self.fresh.clone()
        self.states = [torch.full((count,), 1e-3), torch.full((count,), 1e-3)]
        self.copy = torch.zeros(count, dtype=torch.bfloat16)

    def renew(self) -> None:
        """Gradients as a backward leaves them; not timed."""
        self.gradients.copy_(self.fresh)


def torch_adamw(memory: Memory) -> tuple[torch.optim.Optimizer, torch.nn.Parameter]:
    """torch's fused AdamW on the memory."""
    parameter = torch.nn.Parameter(memory.parameters)
    parameter.grad = memory.gradients
    optimizer = torch.optim.AdamW([parameter], lr=OPTIONS.lr, weight_decay=OPTIONS.weight_decay, fused=True)
    optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": memory.states[0],
                                  "exp_avg_sq": memory.states[1]}
    return optimizer, parameter


def deepspeed_adam(memory: Memory) -> Callable[[int], Any]:
    """DeepSpeed's AVX kernel on the memory; builds it at the first call."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameter = torch.nn.Parameter(memory.parameters)
    parameter.grad = memory.gradients
    optimizer = DeepSpeedCPUAdam([parameter], lr=OPTIONS.lr, weight_decay=OPTIONS.weight_decay, adamw_mode=True)
    optimizer.state[parameter] = {"step": 1, "exp_avg": memory.states[0], "exp_avg_sq": memory.states[1]}
    return lambda i: optimizer.step()


def bare_steps(memory: Memory) -> Contenders:
    """AdamW alone."""
    numbers = UpdateNumbers("adamw", OPTIONS.lr, step=2, weight_decay=OPTIONS.weight_decay)
    columns = (memory.parameters, memory.gradients, *memory.states)

    def ours(arrays: list[Any]) -> Callable[[int], Any]:
        p, g, m, v = arrays
        return lambda i: arrays_of(p).update(numbers, [p], [g], [[m], [v]])

    optimizer, _ = torch_adamw(memory)
    contenders: Contenders = {
        "hpctrain (torch arrays)": ours(list(columns)),
        "hpctrain (NumPy arrays, 1 thread)": ours([t.numpy() for t in columns]),
        "torch AdamW(fused=True)": lambda i: optimizer.step(),
    }
    if find_spec("deepspeed"):
        contenders["DeepSpeedCPUAdam"] = deepspeed_adam(memory)
    return contenders


def whole_phases(memory: Memory) -> Contenders:
    """Everything between backward and the next forward."""
    arrays = arrays_of(memory.parameters)
    placement = Placement("all", (memory.count,), "float32")
    (layout,) = flat_layouts([placement])
    own = OwnBuffer(layout, "float32", ((0, memory.count),), [memory.parameters], [memory.copy])
    flat = FlatOptimizer(arrays, OPTIONS, resolve_groups([placement], OPTIONS, [], Constant()), [own])

    def ours(zero: bool) -> None:
        norm = gradient_norm(NORMS["l2"].partial(arrays, [memory.gradients]), DIVISOR)
        assert norm < float("inf"), "no overflow"
        flat.apply(1, update_scale(norm, DIVISOR, CLIP), [[memory.gradients]])
        if zero:
            arrays.fill(memory.gradients, 0)

    optimizer, parameter = torch_adamw(memory)

    def separate(unscale: Callable[[], bool]) -> None:
        assert unscale(), "no overflow"
        torch.nn.utils.clip_grad_norm_([parameter], CLIP)
        optimizer.step()
        memory.copy.copy_(memory.parameters)
        optimizer.zero_grad(set_to_none=False)

    def scale_then_look() -> bool:
        memory.gradients.mul_(1 / DIVISOR)
        return bool(torch.isfinite(memory.gradients).all())

    def scale_and_look() -> bool:  # the one pass of torch.amp.GradScaler
        found = torch.zeros(1)
        torch._amp_foreach_non_finite_check_and_unscale_([memory.gradients], found, torch.tensor(1 / DIVISOR))
        return not found.item()

    return {
        "hpctrain": lambda i: ours(False),
        "hpctrain, gradients zeroed": lambda i: ours(True),
        SEPARATE: lambda i: separate(scale_then_look),
        "torch fused, GradScaler's pass": lambda i: separate(scale_and_look),
    }


def measure(memory: Memory, num_threads: int, rounds: int) -> list[Row]:
    """All rows of one number of threads."""
    torch.set_num_threads(num_threads)
    scratch = torch.ones(memory.count)
    work = f"AdamW, {memory.count // 1_000_000} M float32, {num_threads} thread{'s' * (num_threads > 1)}"
    bare = alternate(memory.renew, bare_steps(memory) | {FLOOR: lambda i: scratch.mul_(1.0000001)}, rounds)
    bare[FLOOR] = [seconds * 28 / 8 for seconds in bare[FLOOR]]
    phase = alternate(memory.renew, whole_phases(memory), rounds)
    rows = [row(f"{work}: bare step", c, "ms", (1e3 * t for t in ts)) for c, ts in bare.items()]
    rows += [row(f"{work}: whole phase", c, "ms", (1e3 * t for t in ts)) for c, ts in phase.items()]
    for contender in [c for c in phase if c != SEPARATE]:
        ratios = (s / t for s, t in zip(phase[SEPARATE], phase[contender], strict=True))
        rows.append(row(f"{work}: {SEPARATE} / contender", contender, "ratio", ratios))
    return rows


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="5 M parameters instead of 50 M")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    memory = Memory(5_000_000 if options.quick else 50_000_000)
    report("optimizer", [r for n in options.threads for r in measure(memory, n, options.rounds)])


if __name__ == "__main__":
    main()
