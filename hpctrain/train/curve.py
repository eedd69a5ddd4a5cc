"""The metrics of a run as a picture.

Owns the look of the learning curve. Must not know how the numbers came about. Needs matplotlib.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpctrain.train.metrics import read_metrics

__all__ = ["draw_curve"]


def draw_curve(metrics: Path, picture: Path, *, title: str, bigram_entropy: float) -> None:
    """Draws training and validation loss over the updates, and the bigram entropy as the line to beat, as PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps, validations = read_metrics(metrics)
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="update", ylabel="loss (nats per byte)", title=title)
    x, loss = [line["step"] for line in steps], [line["loss"] for line in steps]
    axes.plot(x, loss, color="tab:blue", alpha=0.3, linewidth=0.8)
    axes.plot(x, _smoothed(loss), color="tab:blue", label="training (running mean)")
    axes.plot([v["step"] for v in validations], [v["val_loss"] for v in validations], "o-", color="tab:orange",
              markersize=4, label="validation")
    axes.axhline(bigram_entropy, color="gray", linestyle="--", label=f"bigram entropy {bigram_entropy:.3f}")
    axes.grid(alpha=0.3)
    axes.legend()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120, format="png")


def _smoothed(values: list[Any], keep: float = 0.9) -> list[float]:
    """Running mean with the bias of its start taken out."""
    result, mean = [], 0.0
    for count, value in enumerate(values, start=1):
        mean = keep * mean + (1 - keep) * value
        result.append(mean / (1 - keep**count))
    return result
