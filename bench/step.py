"""One training step of a data-parallel GPT: hpctrain against torch DistributedDataParallel (gloo).

    python bench/step.py

Contenders alternate step by step inside one MPI job: the same model, data and fused AdamW. `no exchange` is the same
step in which every rank trains alone: the bound. Ratios are taken within each round and their median is a row of its
own. Peak memory is measured in jobs of one contender each.
"""

from __future__ import annotations

import argparse
import json
import resource
from collections.abc import Callable
from typing import Any

from harness import Row, alternate, report, row, run_job, start_gloo

#: regime -> (layers, width, sequence length, global batch: sequences; 0 = one a rank)
REGIMES = {"compute-bound": (6, 256, 256, 16), "communication-bound": (8, 512, 256, 0)}
CONTENDERS = ("no exchange", "torch DDP (gloo)", "hpctrain")
LEARNING_RATE = 1e-3
TORCH_ADAMW = {"lr": LEARNING_RATE, "weight_decay": 0.01, "fused": True}


def make_model(regime: str) -> Any:
    """The GPT of a regime, with the same values on every rank and for every contender."""
    import torch

    from hpctrain.models.gpt import GPT, GPTShape

    layers, width, length, _ = REGIMES[regime]
    torch.manual_seed(0)
    return GPT(GPTShape(256, context=length, width=width, layers=layers, heads=8, positions="learned", tied=False))


def total_loss(module: Any, batch: Any) -> Any:
    """The sum of the loss terms of a batch."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(module(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")


def our_step(model: Any, context: Any, **options: Any) -> Callable[[Any], Any]:
    """hpctrain's step; `options` are the trainer's."""
    import hpctrain.torch

    adapted = hpctrain.torch.adapt(model, lambda m, b: (total_loss(m, b), b[1].numel()))
    trainer = context.trainer(adapted, optimizer=hpctrain.AdamW(lr=LEARNING_RATE, weight_decay=0.01), **options)
    return lambda batch: trainer.step([batch])


def make_step(contender: str, regime: str, context: Any) -> Callable[[Any], Any]:
    """A function that trains one step on a batch (x, y)."""
    import torch

    model = make_model(regime)
    if contender == "hpctrain":
        return our_step(model, context)
    module: Any = model
    if contender.startswith("torch DDP"):
        module = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return torch_step(module, torch.optim.AdamW(model.parameters(), **TORCH_ADAMW))


def torch_step(module: Any, optimizer: Any, *, zero: bool = True) -> Callable[[Any], Any]:
    """torch's usual step; `zero`: gradients stay and are zeroed."""

    def step(batch: Any) -> Any:
        optimizer.zero_grad(set_to_none=not zero)
        loss = total_loss(module, batch) / batch[1].numel()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def make_batches(regime: str, rank: int, size: int, count: int) -> list[Any]:
    """This rank's share of `count` global batches of random bytes."""
    import torch

    _, _, length, batch = REGIMES[regime]
    rows = batch // size if batch else 1
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(256, (count, rows, length + 1), generator=generator)
    return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]


def worker(regime: str, contenders: list[str], rounds: int, make: Callable[..., Callable[[Any], Any]]) -> None:
    """One MPI rank of a job; rank 0 prints the rows. `make(contender, regime, context)` gives a step."""
    import torch

    import hpctrain

    context = hpctrain.start()
    torch.set_num_threads(1)
    if any("gloo" in c for c in contenders):
        start_gloo(context)
    batches = make_batches(regime, context.rank, context.size, 4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    steps = {c: make(c, regime, context) for c in contenders}
    calls = {c: (lambda i, f=f: f(batches[i % len(batches)])) for c, f in steps.items()}
    times = alternate(context.world.barrier, calls, rounds)
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    everyone = context.world.exchange([times, growth])
    if context.rank == 0:
        slowest = {c: [max(t) for t in zip(*(e[0][c] for e in everyone), strict=True)] for c in contenders}
        print_rows(f"{regime}, {context.size} ranks", slowest, max(e[1] for e in everyone))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def print_rows(work: str, times: dict[str, list[float]], growth: float) -> None:
    """Rows of one job as JSON lines."""
    rows = [row(f"{work}: step", c, "ms", (1e3 * t for t in ts)) for c, ts in times.items()]
    bound = times.get(CONTENDERS[0], [])
    rows += [row(f"{work}: step / no exchange", c, "ratio", (t / b for t, b in zip(ts, bound, strict=True)))
             for c, ts in times.items() if bound and c != CONTENDERS[0]]
    if len(times) == 1:
        rows = [row(f"{work}: peak memory growth", next(iter(times)), "MiB", [growth])]
    for r in rows:
        print(json.dumps(r), flush=True)


def main(name: str, file: str, contenders: tuple[str, ...], make: Callable[..., Callable[[Any], Any]],
         doc: str) -> None:
    """Runs all jobs of benchmark `name`, or one rank of one with --worker."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--worker", nargs="+", metavar=("REGIME", "CONTENDER"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--regimes", nargs="+", default=list(REGIMES), choices=list(REGIMES))
    parser.add_argument("--no-memory", action="store_true", help="only times")
    options = parser.parse_args()
    if options.worker:
        worker(options.worker[0], options.worker[1:], options.rounds, make)
        return
    rows: list[Row] = []
    for regime in options.regimes:
        for num_ranks in options.ranks:
            rows += run_job(num_ranks, [file, "--rounds", str(options.rounds), "--worker", regime, *contenders])
            for contender in () if options.no_memory else contenders:
                rows += run_job(num_ranks, [file, "--rounds", "3", "--worker", regime, contender])
    report(name, rows)


if __name__ == "__main__":
    main("step", __file__, CONTENDERS, make_step, __doc__)
