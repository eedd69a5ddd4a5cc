"""What a run leaves behind at its end: summary, curve and a sample of text.

Owns these files' content. Must not know the loop. All functions are for one rank; the others wait.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from hpctrain.train.recipe import Write
from hpctrain.train.session import Session

__all__ = ["Summary", "write_curve", "write_sample", "write_summary"]


@dataclass(frozen=True)
class Summary:
    """The numbers of a run. Losses and the bigram entropy are in nats per byte (per token of the store).

    `val_loss` is that of the whole validation text once the run is finished. `seconds` and `tokens` count the whole
    history of a resumed run, validation and checkpoints included; `tokens_per_second` is that of the steps of the last
    start (of the whole history where it had nothing left to do), over all its `ranks`.
    """

    name: str
    finished: bool
    steps: int
    train_loss: float | None
    val_loss: float | None
    bigram_entropy: float
    ranks: int
    parameters: int
    tokens: int
    seconds: float
    tokens_per_second: float
    resumed_step: int
    checkpoint: str | None


def write_summary(summary: Summary, path: Path) -> None:
    """The summary as JSON; replaced in one piece."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def write_curve(session: Session) -> str:
    """Draws the curve; returns the line to show, which says why if there is no curve."""
    from hpctrain.train.curve import draw_curve

    directory = session.directory
    picture = directory / "curve.png"
    try:
        draw_curve(directory / "metrics.jsonl", picture, title=session.config.run.name,
                   bigram_entropy=session.bigram_entropy)
    except ImportError:
        return "no curve.png: matplotlib is not installed (pip install 'hpctrain[plot]')"
    return f"curve        {picture}"


def write_sample(session: Session, write: Write) -> str:
    """Lets the model go on from a piece of validation text; returns the line to show."""
    log = session.config.log
    path = session.directory / "sample.txt"
    prompt = bytes(int(token) for token in session.validation.tokens[:min(64, session.validation.length)])
    text = write(prompt, log.sample_bytes, log.temperature, session.config.run.seed)
    shown = [part.decode("utf-8", "replace").replace("\0", "\n[end of document]\n") for part in (prompt, text)]
    path.write_text(f"--- given (from the validation text)\n{shown[0]}\n--- written by the model\n{shown[1]}\n",
                    encoding="utf-8")
    return f"sample       {path}"
