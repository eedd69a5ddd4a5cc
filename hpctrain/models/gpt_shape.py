"""The parameters of the GPT by formula: names and shapes, with no array library.

Owns what `hpctrain plan` needs to count a model and its activations on a login node. A test holds it equal to the
module in `gpt`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

__all__ = ["GPTShape"]


@dataclass(frozen=True)
class GPTShape:
    """The numbers that define a GPT. `width` must be a multiple of `heads`."""

    vocabulary: int = 256
    context: int = 128
    width: int = 128
    layers: int = 4
    heads: int = 4
    positions: str = "rotary"  # or "learned"
    tied: bool = True

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every parameter, in the module's order; a tied head is the embedding, listed once."""
        width = self.width
        shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (self.vocabulary, width)}
        if self.positions == "learned":
            shapes["place.weight"] = (self.context, width)
        for layer in range(self.layers):
            block = {
                "attention_norm.weight": (width,), "attention_norm.bias": (width,),
                "qkv.weight": (3 * width, width), "qkv.bias": (3 * width,),
                "attention_out.weight": (width, width), "attention_out.bias": (width,),
                "mlp_norm.weight": (width,), "mlp_norm.bias": (width,),
                "mlp_in.weight": (4 * width, width), "mlp_in.bias": (4 * width,),
                "mlp_out.weight": (width, 4 * width), "mlp_out.bias": (width,),
            }
            shapes |= {f"blocks.{layer}.{name}": shape for name, shape in block.items()}
        shapes |= {"norm.weight": (width,), "norm.bias": (width,)}
        if not self.tied:
            shapes["head.weight"] = (self.vocabulary, width)
        return shapes

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters."""
        return sum(prod(shape) for shape in self.parameters().values())

    def steps(self) -> dict[str, tuple[str, ...]]:
        """The layers that a pipeline can be cut between, by name, with their parameters: those of `GPT.steps()`.

        A tied head has the embedding as well, so a stage of its own gets a copy.
        """
        names = list(self.parameters())
        steps = {"embedding": tuple(name for name in names if name.startswith(("embedding.", "place.")))}
        for layer in range(self.layers):
            steps[f"block {layer}"] = tuple(name for name in names if name.startswith(f"blocks.{layer}."))
        head = "embedding.weight" if self.tied else "head.weight"
        return steps | {"head": ("norm.weight", "norm.bias", head)}

    def step_activations(self, batch: int, length: int) -> tuple[int, ...]:
        """`num_activations` of each of `steps`; of these, each block has angles of its own."""
        angles = length * self.width // self.heads if self.positions == "rotary" else 0
        layer, ends = self._kept()
        return (0, *(batch * length * layer + angles for _ in range(self.layers)), batch * length * ends)

    def _kept(self) -> tuple[int, int]:
        """Elements a token that one block keeps, and that the rest does."""
        rotary = self.positions == "rotary"
        return (16 + 3 * rotary) * self.width + 4 + self.heads, 2 * self.width + 2 + self.vocabulary

    def num_activations(self, batch: int, length: int) -> int:
        """Elements that forward of (batch, length) tokens keeps for backward, with fused attention and loss.

        As in arXiv 2205.05198, section 4.1, but without dropout and attention matrix. A layer keeps 16 widths a token:
        inputs of two norms (2), of four linear layers (1 + 1 + 1 + 4), of attention (3) and of GELU (4); rotary
        positions turn copies of query and key (2) and lay attention's output out anew (1). A little for each norm (2)
        and head (1). Then the last norm, the head's input, and the loss's odds.
        """
        layer, ends = self._kept()
        angles = length * self.width // self.heads if self.positions == "rotary" and self.layers else 0
        return batch * length * (self.layers * layer + ends) + angles
