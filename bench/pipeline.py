"""One training step of a GPT cut into stages: hpctrain's schedules against torch.distributed.pipelining's, over gloo.

    python bench/pipeline.py

GPT of 8 layers, width 256, 256 tokens; 16 sequences in 8 micro-batches; SGD. Contenders alternate step by step inside
one MPI job; there are several jobs, since where a process's memory lies makes a per cent or two. `compute only`: every
rank runs its stage of the first schedule, forward and backward of all micro-batches and the update, on tensors of its
own, and nothing is sent. Ratios to it are taken within each round. `of its bound` is that ratio divided by what the
schedule's bubble allows: 1 + (ranks - 1) / (chunks x 8), and 1 where a backward has two parts. DeepSpeed takes part
where it is installed. All contenders' first loss must be the same.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from importlib.util import find_spec
from math import isclose
from typing import Any, NamedTuple

from harness import Row, alternate, report, row, run_job, start_gloo

LAYERS, WIDTH, LENGTH, VOCABULARY, HEADS = 8, 256, 256, 256, 8
BATCH, MICRO_BATCHES = 16, 8
LEARNING_RATE = 1e-3
BOUND = "compute only"


class Contender(NamedTuple):
    """`chunks`: stages a rank; `split`: a backward in two parts, so that no bubble need be there."""

    schedule: str
    chunks: int = 1
    split: bool = False


OURS = {f"hpctrain {schedule}": Contender(schedule, *rest) for schedule, *rest in [
    ("gpipe",), ("1f1b",), ("interleaved", 2), ("zb-h1", 1, True), ("zb-h2", 1, True), ("zb-v", 2, True),
    ("dualpipe", 1, True), ("dualpipe-v", 2, True)]}
TORCH = {f"torch {name} (gloo)": Contender(schedule, *rest) for name, schedule, *rest in [
    ("GPipe", "ScheduleGPipe"), ("1F1B", "Schedule1F1B"), ("interleaved", "ScheduleInterleaved1F1B", 2),
    ("interleaved zero-bubble", "ScheduleInterleavedZeroBubble", 2, True), ("ZBV", "ScheduleZBVZeroBubble", 2, True),
    ("DualPipeV", "ScheduleDualPipeV", 2, True)]}
DEEPSPEED = {"DeepSpeed PipelineModule (gloo)": Contender("1f1b")} if find_spec("deepspeed") else {}
CONTENDERS = {BOUND: Contender(""), **TORCH, **DEEPSPEED, **OURS}

Step = Callable[[Any, Any], float | None]  # (tokens, targets) of a batch -> mean loss, None where it is not known


def chain() -> Any:
    """The GPT as a list of layers with the same values on every rank and for every contender: 8 blocks and two ends."""
    import hpctrain.torch
    from hpctrain.models.gpt import GPT, GPTShape

    model = GPT(GPTShape(VOCABULARY, context=LENGTH, width=WIDTH, layers=LAYERS, heads=HEADS, positions="learned",
                         tied=False))
    return hpctrain.torch.layers(model, model.steps())


def bounds_of(num_stages: int) -> tuple[int, ...]:
    """As many blocks in each stage; the ends go with the first and the last."""
    cuts = [1 + LAYERS * stage // num_stages for stage in range(1, num_stages)]
    return (0, *cuts, LAYERS + 2)


def module_of(stage: int, num_stages: int) -> Any:
    """A stage as a torch module."""
    import torch

    bounds = bounds_of(num_stages)

    class Part(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.runs = chain().layers[bounds[stage]: bounds[stage + 1]]
            self.parts = torch.nn.ModuleList(part for layer in self.runs for part in layer.parts.values())

        def forward(self, x: Any) -> Any:
            for layer in self.runs:
                x = layer.run(*layer.parts.values(), x)
            return x

    return Part()


def mean_loss(logits: Any, targets: Any) -> Any:
    """Cross-entropy a token."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def updated(step: Step, parameters: list[Any]) -> Step:
    """`step`, then SGD."""
    import torch

    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE, fused=True)

    def full(x: Any, y: Any) -> float | None:
        loss = step(x, y)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return full


def compute_only(rank: int, size: int) -> Step:
    """Forward and backward of one stage on tensors of its own."""
    import torch

    module = module_of(rank, size)

    def step(x: Any, y: Any) -> None:
        for tokens, targets in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True):
            given = tokens if rank == 0 else torch.randn(*tokens.shape, WIDTH).requires_grad_()
            outputs = module(given)
            if rank == size - 1:
                loss = mean_loss(outputs, targets) / MICRO_BATCHES
                loss.backward()
                loss.item()
            else:
                outputs.backward(torch.ones_like(outputs))

    return updated(step, list(module.parameters()))


def torch_schedule(contender: Contender, rank: int, size: int) -> Step:
    """A schedule of torch.distributed.pipelining."""
    import torch
    from torch.distributed.pipelining import PipelineStage, schedules

    num_stages = size * contender.chunks
    folded = contender.schedule in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    mine = [rank, num_stages - 1 - rank] if folded else [rank + size * c for c in range(contender.chunks)]
    modules = [module_of(stage, num_stages) for stage in mine]
    stages = [PipelineStage(module, stage, num_stages, torch.device("cpu"))
              for module, stage in zip(modules, mine, strict=True)]
    made = getattr(schedules, contender.schedule)(stages if contender.chunks > 1 else stages[0], MICRO_BATCHES,
                                                  loss_fn=mean_loss)

    def step(x: Any, y: Any) -> float | None:
        given = (x,) if 0 in mine else ()
        if num_stages - 1 not in mine:
            made.step(*given)
            return None
        losses: list[Any] = []
        made.step(*given, target=y, losses=losses)
        return float(sum(loss.item() for loss in losses) / MICRO_BATCHES)

    return updated(step, [p for module in modules for p in module.parameters()])


def our_schedule(contender: Contender, context: Any) -> Step:
    """A schedule of hpctrain."""
    import hpctrain.torch
    from hpctrain.models.gpt import loss_of_logits, tokens_of

    layers, bounds = chain(), bounds_of(context.size * contender.chunks)
    chunks = contender.chunks if contender.schedule == "interleaved" else None
    trainer = context.pipeline(
        lambda s: hpctrain.torch.stage(layers, bounds, s, loss_of_logits, inputs=tokens_of),
        hpctrain.Pipeline(contender.schedule, chunks=chunks), optimizer=hpctrain.SGD(lr=LEARNING_RATE))

    def step(x: Any, y: Any) -> float:
        return float(trainer.step(zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True)).loss)

    return step


def deepspeed_pipeline(size: int) -> Step:
    """DeepSpeed's PipelineModule, without the clipping that it does unless told otherwise."""
    import deepspeed
    import torch
    from deepspeed.pipe import PipelineModule

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo", verbose=False)
    net = PipelineModule(layers=[module_of(layer, LAYERS) for layer in range(LAYERS)], num_stages=size,
                         loss_fn=mean_loss, partition_method="uniform", activation_checkpoint_interval=0)
    config = {"train_batch_size": BATCH, "train_micro_batch_size_per_gpu": BATCH // MICRO_BATCHES,
              "gradient_accumulation_steps": MICRO_BATCHES, "gradient_clipping": 0.0, "steps_per_print": 10**9}
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=LEARNING_RATE, fused=True)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)

    def step(x: Any, y: Any) -> float:
        batches = zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True)
        return float(engine.train_batch(data_iter=batches))

    return step


def make(name: str, context: Any) -> Step:
    """The step of a contender."""
    contender = CONTENDERS[name]
    if name in OURS:
        return our_schedule(contender, context)
    if name in TORCH:
        return torch_schedule(contender, context.rank, context.size)
    return deepspeed_pipeline(context.size) if name in DEEPSPEED else compute_only(context.rank, context.size)


def worker(names: list[str], rounds: int) -> None:
    """One MPI rank of a job; rank 0 prints the seconds of each contender's steps, the slowest rank's."""
    import torch

    import hpctrain

    context = hpctrain.start()
    torch.set_num_threads(1)
    start_gloo(context)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    steps, first = {}, {}
    for name in names:
        steps[name] = make(name, context)
        first[name] = steps[name](x, y)
    times = alternate(context.world.barrier, {n: (lambda i, f=f: f(x, y)) for n, f in steps.items()}, rounds)
    everyone = context.world.exchange([times, first])
    if context.rank == 0:
        losses = {n: next((e[1][n] for e in everyone if e[1][n] is not None), None) for n in names}
        known = {n: loss for n, loss in losses.items() if loss is not None}
        if not all(isclose(loss, next(iter(known.values())), rel_tol=1e-5) for loss in known.values()):
            raise RuntimeError(f"contenders disagree about the first loss: {known}")
        slowest = {n: [max(t) for t in zip(*(e[0][n] for e in everyone), strict=True)] for n in names}
        print(json.dumps(slowest), flush=True)
    torch.distributed.destroy_process_group()


def rows_of(times: dict[str, list[float]], size: int) -> list[Row]:
    """The rows of all jobs on `size` ranks."""
    work = f"{size} ranks"
    rows = [row(f"{work}: step", name, "ms", (1e3 * t for t in ts)) for name, ts in times.items()]
    for name, ts in times.items():
        if name != BOUND and BOUND in times:
            ratios = [t / b for t, b in zip(ts, times[BOUND], strict=True)]
            contender = CONTENDERS[name]
            allowed = 1.0 if contender.split else 1 + (size - 1) / (contender.chunks * MICRO_BATCHES)
            rows.append(row(f"{work}: step / {BOUND}", name, "ratio", ratios))
            rows.append(row(f"{work}: of its bound", name, "ratio", (r / allowed for r in ratios)))
    return rows


def main() -> None:
    """Runs all jobs, or one rank of one with --worker."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--rounds", type=int, default=5, help="of a job")
    parser.add_argument("--jobs", type=int, default=3, help="for each number of ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    options = parser.parse_args()
    if options.worker:
        worker(options.only, options.rounds)
        return
    rows: list[Row] = []
    for num_ranks in options.ranks:
        times: dict[str, list[float]] = {name: [] for name in options.only}
        for _ in range(options.jobs):
            (found,) = run_job(num_ranks, [__file__, "--worker", "--rounds", str(options.rounds), "--only",
                                           *options.only])
            for name, seconds in found.items():
                times[name] += seconds
        rows += rows_of(times, num_ranks)
    report("pipeline", rows)


if __name__ == "__main__":
    main()
