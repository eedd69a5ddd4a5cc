"""Your own torch model and data on any number of ranks: a regression that resumes on any other number.

    mpirun -n 2 python scripts/bring_your_own_model.py [DIRECTORY [UPDATES]]
"""

import sys

import torch

import hpctrain
import hpctrain.torch
from hpctrain.data import Sampler


def make_dataset() -> tuple[torch.Tensor, torch.Tensor]:
    """1000 points of a curve; every rank makes the same ones."""
    x = torch.linspace(-3, 3, 1000).unsqueeze(1)
    return x, torch.sin(x)


def loss(module: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """The sum of the loss terms, and how many they are."""
    x, y = batch
    return ((module(x) - y) ** 2).sum(), len(x)


def main(root: str, updates: int = 300) -> None:
    """Trains for `updates` updates in all, counting those of earlier runs."""
    context = hpctrain.start()
    x, y = make_dataset()
    module = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    trainer = context.trainer(hpctrain.torch.adapt(module, loss), optimizer=hpctrain.AdamW(lr=1e-2),
                              schedule=hpctrain.WarmupCosine(warmup=20, total=updates), clip_norm=1.0)
    data = trainer.resume(root) or {"start": 0}
    sampler = Sampler(len(x), global_batch=50, rank=context.rank, size=context.size, seed=1, **data)
    for k, micro_batches in enumerate(sampler, start=1):
        if trainer.num_updates >= updates:
            break
        result = trainer.step([(x[ids], y[ids]) for ids in micro_batches])
        if context.rank == 0 and result.update % 50 == 0:
            print(f"update {result.update}: loss {result.loss:.5f}, gradient norm {result.gradient_norm:.3f}")
        if result.update % 100 == 0 or result.stop:
            trainer.save(root, data={"start": sampler.state(k)})
        if result.stop:
            break


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/bring_your_own_model", *map(int, sys.argv[2:3]))
