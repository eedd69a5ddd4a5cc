"""The training loop: steps, validations, checkpoints, and a clean end.

Owns the order of these and the clock. Must not know how a step works, what the model is, or how progress looks.

    for each update:  samples of this rank -> Trainer.step -> metrics -> [validation] -> [checkpoint] -> stop?
"""

from __future__ import annotations

import time
from math import nan
from pathlib import Path

from hpctrain.data.text import validation_batches
from hpctrain.train.metrics import Metrics
from hpctrain.train.progress import Display, Shown, make_progress
from hpctrain.train.recipe import Write
from hpctrain.train.results import Summary, write_curve, write_sample, write_summary
from hpctrain.train.session import Session, describe

__all__ = ["Loop", "run"]


def run(session: Session) -> Summary:
    """Trains until run.steps or a stop signal, and writes the results. Collective over the world."""
    loop = Loop(session)
    try:
        for line in describe(session):
            loop.display.note(line)
        stopped = loop.train()
        summary = loop.finish(stopped)
        loop.write_memory()
        return summary
    finally:
        loop.close()


class Loop:
    """One run of the loop. All methods but `close` are collective over the world."""

    def __init__(self, session: Session) -> None:
        self.session = session
        config, rank = session.config, session.context.rank
        self.start_step = session.position.resumed_step
        self.display: Display = make_progress(config.log.progress, rank=rank, total=config.run.steps,
                                              done=self.start_step, every=config.log.every)
        self.metrics: Metrics | None = None
        session.context.world.on_root(self._open_metrics)
        self.val_loss = self.train_loss = nan
        self.step_seconds, self.new_tokens = 0.0, 0
        self.checkpoint: str | None = None
        self.saved_step = self.start_step if self.start_step else -1
        self._began, self._seconds_before = time.perf_counter(), session.position.seconds

    def write_memory(self) -> None:
        """OUT/memory.txt: planned and measured memory of the run."""
        text = self.session.trainer.memory_report()
        self.session.context.world.on_root(lambda: (self.session.directory / "memory.txt").write_text(text + "\n"))

    def _open_metrics(self) -> None:
        (self.session.directory / "summary.json").unlink(missing_ok=True)  # there is one only of a run that has ended
        self.metrics = Metrics(self.session.directory / "metrics.jsonl", self.start_step)

    def train(self) -> bool:
        """The steps. Returns whether a signal ended them early."""
        session, config = self.session, self.session.config
        sampler = session.sampler()
        for number, update in enumerate(sampler, start=1):
            if session.trainer.num_updates >= config.run.steps:
                return False
            started = time.perf_counter()
            micro_batches = [session.micro_batch(session.train.batch(ids)) for ids in update]
            result = session.trainer.step(micro_batches)
            session.position.counter = sampler.state(number)
            self._note_step(result.loss, result.weight, result.lr, result.gradient_norm, result.skipped,
                            time.perf_counter() - started)
            step = result.update
            if result.skipped:
                continue
            self.trace(step, len(micro_batches), stop=result.stop)
            if config.log.evaluate_every and step % config.log.evaluate_every == 0 and step < config.run.steps:
                self.evaluate(config.data.validation_samples)
            if config.checkpoint.every and step % config.checkpoint.every == 0:
                self.save()
            if result.stop and step < config.run.steps:
                # Said before the checkpoint: after Ctrl-C, mpirun soon stops to pass on what we print.
                self.display.note(f"asked to stop at step {step} of {config.run.steps}: saving. Go on with the same "
                                  "command and --resume auto, on any number of ranks")
                return True
        raise AssertionError("the sampler has no end")

    def _note_step(self, loss: float, weight: float, lr: float, norm: float, skipped: str, seconds: float) -> None:
        position, step = self.session.position, self.session.trainer.num_updates
        self.step_seconds += seconds
        self.new_tokens += int(weight)
        position.tokens += int(weight)
        position.seconds = self._seconds_before + time.perf_counter() - self._began
        self.train_loss = loss
        rate = self.new_tokens / self.step_seconds
        if self.metrics is not None:
            self.metrics.write(step=step, loss=loss, lr=lr, gradient_norm=norm, tokens=position.tokens,
                               samples=position.counter, seconds=round(position.seconds, 4),
                               step_seconds=round(seconds, 6), **({"skipped": skipped} if skipped else {}))
        done = max(1, step - self.start_step)
        left = (position.seconds - self._seconds_before) / done * (self.session.config.run.steps - step)
        self.display.show(Shown(step, loss, lr, norm, rate, left))

    def trace(self, step: int, num_micro_batches: int, *, stop: bool) -> None:
        """The trace of this step, if it is the one that the config wants; the last one may come early by a signal."""
        pipelined, p, steps = self.session.pipelined, self.session.config.pipeline, self.session.config.run.steps
        if pipelined is not None and p.trace is not None and (
                step == (p.trace_step or steps) or (stop and p.trace_step is None)):
            self.display.note(pipelined.write_trace(Path(p.trace), num_micro_batches))

    def evaluate(self, limit: int) -> None:
        """Loss over `limit` validation samples (0: all), shared out over the data axis."""
        session = self.session
        batches = validation_batches(session.validation, session.batch.micro, rank=session.trainer.rank,
                                     size=session.batch.data, limit=limit)
        result = session.trainer.evaluate(session.micro_batch(sample) for sample in batches)
        self.val_loss = result.loss
        step = session.trainer.num_updates
        if self.metrics is not None:
            self.metrics.write(step=step, val_loss=result.loss, val_tokens=int(result.weight))
        self.display.note(f"step {step}  validation loss {result.loss:.4f} nats per byte "
                          f"(bigram entropy {session.bigram_entropy:.4f})")

    def save(self) -> None:
        """A checkpoint of this step, unless it is there."""
        step = self.session.trainer.num_updates
        if step != self.saved_step:
            self.checkpoint = str(self.session.save())
            self.saved_step = step

    def finish(self, stopped: bool) -> Summary:
        """The last validation, checkpoint and results; after a stop signal only what cannot wait."""
        world, display = self.session.context.world, self.display
        if not stopped:
            self.evaluate(0)
        self.save()
        summary = self._summary(finished=not stopped)
        with self.session.writing(summary.finished and self.session.config.log.sample_bytes > 0) as write:
            lines = world.on_root(lambda: self._write_results(summary, write))
        display.close()
        for line in lines:
            display.note(line)
        return summary

    def _write_results(self, summary: Summary, write: Write | None) -> list[str]:
        session, config = self.session, self.session.config
        lines = [f"checkpoint   {summary.checkpoint}"] if summary.checkpoint else []
        path = session.directory / "summary.json"
        write_summary(summary, path)
        lines.append(f"summary      {path}")
        if config.log.curve:
            lines.append(write_curve(session))
        if summary.finished and config.log.sample_bytes and write is not None:
            lines.append(write_sample(session, write))
        if summary.finished:
            assert summary.val_loss is not None
            better = "below" if summary.val_loss < summary.bigram_entropy else "not below"
            lines.append(f"validation loss {summary.val_loss:.4f} nats per byte, {better} the bigram entropy "
                         f"{summary.bigram_entropy:.4f} of the same text")
        return lines

    def _summary(self, *, finished: bool) -> Summary:
        session, position = self.session, self.session.position
        position.seconds = self._seconds_before + time.perf_counter() - self._began
        return Summary(
            name=session.config.run.name, finished=finished, steps=session.trainer.num_updates,
            train_loss=None if self.train_loss != self.train_loss else self.train_loss,
            val_loss=None if self.val_loss != self.val_loss else self.val_loss,
            bigram_entropy=session.bigram_entropy, ranks=session.context.size, parameters=session.num_parameters,
            tokens=position.tokens, seconds=round(position.seconds, 3),
            tokens_per_second=round(self._rate(), 1),
            resumed_step=self.start_step, checkpoint=self.checkpoint)

    def _rate(self) -> float:
        """Tokens per second of this start's steps; where there were none, of the whole history."""
        position = self.session.position
        return self.new_tokens / self.step_seconds if self.step_seconds else position.tokens / position.seconds

    def close(self) -> None:
        """Ends the display and closes the metrics. Local."""
        self.display.close()
        if self.metrics is not None:
            self.metrics.close()
