"""One training step of a GPT at each ZeRO stage: hpctrain against what torch has, over gloo.

    python bench/zero.py

Regimes, model, data, optimizer and the bound (`no exchange`) are those of `bench/step.py`. DDP with
ZeroRedundancyOptimizer is stage 1 of torch, FSDP2 (`fully_shard`) stage 2 without and stage 3 with resharding after
forward; DeepSpeed takes part where it is installed. Peak memory growth is measured in jobs of one contender each; it
begins before the model is made.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from step import TORCH_ADAMW, main, make_batches, make_model, make_step, our_step, torch_step, total_loss

STAGES = {f"hpctrain stage {stage}": {"stage": stage} for stage in range(4)}
STAGES["hpctrain stage 3, nothing shared"] = {"stage": 3, "share": "none"}
REDUNDANCY, KEPT, RESHARDED = "torch ZeroRedundancyOptimizer (gloo)", "FSDP2 kept (gloo)", "FSDP2 resharded (gloo)"
DEEPSPEED = {f"DeepSpeed stage {stage} (gloo)": stage for stage in (1, 2, 3)} if find_spec("deepspeed") else {}
CONTENDERS = ("no exchange", "torch DDP (gloo)", REDUNDANCY, KEPT, RESHARDED, *DEEPSPEED, *STAGES)


def make(contender: str, regime: str, context: Any) -> Callable[[Any], Any]:
    """A function that trains one step on a batch (x, y)."""
    import torch

    import hpctrain

    if contender in STAGES:
        return our_step(make_model(regime), context, zero=hpctrain.Zero(**STAGES[contender]))
    if contender == REDUNDANCY:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        module = torch.nn.parallel.DistributedDataParallel(make_model(regime), gradient_as_bucket_view=True)
        return torch_step(module, ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, **TORCH_ADAMW))
    if contender in (KEPT, RESHARDED):
        from torch.distributed import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = make_model(regime)
        mesh = init_device_mesh("cpu", (context.size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=contender == RESHARDED)
        fully_shard(model, mesh=mesh, reshard_after_forward=contender == RESHARDED)
        return torch_step(model, torch.optim.AdamW(model.parameters(), **TORCH_ADAMW), zero=False)
    if contender in DEEPSPEED:
        rows = len(make_batches(regime, 0, context.size, 1)[0][0])
        return deepspeed_step(make_model(regime), DEEPSPEED[contender], rows)
    return make_step(contender, regime, context)


def deepspeed_step(model: Any, stage: int, rows: int) -> Callable[[Any], Any]:
    """DeepSpeed's step on the CPU, without the clipping that it does unless told otherwise."""
    import deepspeed
    import torch

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo", verbose=False)
    config = {"train_micro_batch_size_per_gpu": rows, "zero_optimization": {"stage": stage}, "gradient_clipping": 0.0,
              "zero_allow_untested_optimizer": True, "steps_per_print": 10**9}
    optimizer = torch.optim.AdamW(model.parameters(), **TORCH_ADAMW)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(batch: Any) -> Any:
        loss = total_loss(engine, batch) / batch[1].numel()
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


if __name__ == "__main__":
    main("zero", __file__, CONTENDERS, make, __doc__)
