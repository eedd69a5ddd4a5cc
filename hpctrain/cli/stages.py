"""The stages that a config's pipeline cuts its model into, for the tables of `hpctrain plan`.

Owns who holds which layers, parameters and activations. The plan, its proof and the bounds come from `train.pipeline`,
as in training. Loads no array library.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from hpctrain.plan.pipeline.plan import PipelinePlan
from hpctrain.plan.pipeline.proof import Proof
from hpctrain.plan.pipeline.simulate import Timeline, simulate
from hpctrain.plan.pipeline.stash import peak_bytes

if TYPE_CHECKING:
    from hpctrain.config.records import Config
    from hpctrain.plan.batch import Batch
    from hpctrain.train.pipeline import Pipelining

__all__ = ["Stages"]


@dataclass(frozen=True)
class Stages:
    """A model cut for a plan.

    Attributes:
        plan, proof: of a step.
        layers: for each stage of the model its layers, by name.
        parameters: for each the names of its parameters.
        activations: for each the elements that one forward keeps.
    """

    plan: PipelinePlan
    proof: Proof
    layers: tuple[tuple[str, ...], ...]
    parameters: tuple[tuple[str, ...], ...]
    activations: tuple[int, ...]

    @classmethod
    def of(cls, config: Config, batch: Batch, pipeline: Pipelining) -> Stages:
        """As training cuts it; where training measures first, by parameters."""
        from hpctrain.train.pipeline import cut, layer_costs
        from hpctrain.train.recipe import make_shape

        shape = make_shape(config)
        layers = layer_costs(config)
        bounds = cut(config, pipeline.plan.depth, layers, measured=False)
        names, users = list(shape.steps()), list(shape.steps().values())
        kept = shape.step_activations(batch.micro, config.length)
        stages = list(pairwise(bounds))
        return cls(pipeline.plan, pipeline.proof, tuple(tuple(names[a:b]) for a, b in stages),
                   tuple(tuple(dict.fromkeys(name for layer in users[a:b] for name in layer)) for a, b in stages),
                   tuple(sum(kept[a:b]) for a, b in stages))

    def held_by(self, place: int) -> frozenset[str]:
        """The parameters of one rank of the pipeline."""
        return frozenset(name for part in self.plan.parts_of(place) for name in self.parameters[part])

    @cached_property
    def tied(self) -> frozenset[str]:
        """The parameters that several stages have."""
        counts = Counter(name for names in self.parameters for name in names)
        return frozenset(name for name, count in counts.items() if count > 1)

    @cached_property
    def stashed(self) -> tuple[int, ...]:
        """For each rank of the pipeline, most elements of activations at a time.

        Between its two parts a backward keeps about as much as before it (the factors of the weights' gradients).
        """
        kept = self.activations * self.plan.copies
        return peak_bytes(self.plan, kept, kept)

    @cached_property
    def timeline(self) -> Timeline:
        """A step in which all stages take equal times."""
        return simulate(self.plan)
