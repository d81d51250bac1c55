"""Lightning callbacks: the record of updates, dev perplexity, checkpoints, stopping on a signal, the progress bar."""

import contextlib
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch.distributed
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from aiayn.core import progress, storage
from aiayn.core.signals import Interrupted, StopFlag
from aiayn.evaluation.metrics import perplexity
from aiayn.runs import checkpoint, records
from aiayn.training.lightning_data import Update
from aiayn.training.lightning_model import NonFinite

FLUSH_SECONDS = 2.0


class Record(pl.Callback):
    """Writes `metrics.jsonl`: each update once, in order, when it is known to be finite; no step waits for it."""

    def __init__(self, path: Path, start: int, view: Callable[[dict[str, Any]], None], writes: bool) -> None:
        self.path, self.start, self.view, self.writes = path, start, view, writes
        rows = [row for row in records.read_metrics(path) if row["step"] <= start]
        updates = {row["step"]: row for row in rows if "train/loss" in row}
        if absent := next((step for step in range(1, start + 1) if step not in updates), None):
            raise storage.StorageError(
                f"{path}: update {absent} is missing, but there is a checkpoint of update {start};"
                " restore the file, or delete its folder to start this run anew"
            )
        if writes:
            storage.write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
        for row in rows:  # a view shows each update once, and may have lost any of them
            view(row)
        self.measured = {row["step"] for row in rows if "dev/ppl" in row}
        self.source_tokens = sum(row["source_tokens"] for row in updates.values())
        self.target_tokens = sum(row["target_tokens"] for row in updates.values())
        self.seconds: float = updates.get(start, {}).get("seconds", 0.0)
        self.waiting: list[dict[str, Any]] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Starts the clock."""
        self.clock = self.flushed = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Update, batch_idx: int) -> None:
        """Keeps the row of this update."""
        now = time.perf_counter()
        self.seconds, self.clock = self.seconds + now - self.clock, now
        self.source_tokens += batch.source_tokens
        self.target_tokens += batch.target_tokens
        row = {
            "step": batch.number + 1,
            "train/loss": (outputs["loss"], batch.target_tokens),
            "train/nats": (outputs["nats"], batch.target_tokens),
            "train/gradient_norm": (outputs["gradient_norm"], 1),
            "train/learning_rate": outputs["learning_rate"],
            "source_tokens": batch.source_tokens,
            "target_tokens": batch.target_tokens,
            "seconds": round(self.seconds, 3),
        }
        self.waiting.append(row)
        if self.clock - self.flushed > FLUSH_SECONDS:
            self.flush(but=1)

    def add_dev(self, step: int, nats: float, tokens: int) -> None:
        """Keeps the dev measurement after an update, once; no step is pending. Raises NonFinite."""
        if step in self.measured:
            return
        ppl = perplexity(nats, tokens)
        if not math.isfinite(ppl):
            raise NonFinite(f"after update {step} the dev perplexity is {ppl}: the run has diverged")
        self.measured.add(step)
        self.waiting.append({"step": step, "dev/nats": nats / tokens, "dev/ppl": ppl})
        self.flush()

    def flush(self, but: int = 0) -> None:
        """Writes the rows that wait, `but` the last ones; only rank 0 does."""
        count = len(self.waiting) - but
        if self.writes and count:
            rows = [
                {key: float(value[0]) / value[1] if isinstance(value, tuple) else value for key, value in row.items()}
                for row in self.waiting[:count]
            ]
            storage.append_lines(self.path, map(json.dumps, rows))
            for row in rows:
                self.view(row)
        del self.waiting[:count]
        self.flushed = time.perf_counter()


class Dev(pl.Callback):
    """Measures the dev perplexity every so many updates, and at the end."""

    def __init__(self, record: Record, measure: Callable[[], tuple[float, int]], every: int, last: int) -> None:
        self.record, self.measure, self.every, self.last = record, measure, every, last

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Makes the measurement that a signal cut short before this checkpoint was saved."""
        if self.record.start:
            self._measure(self.record.start)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Update, batch_idx: int) -> None:
        """Rank 0 measures; the others meet it at the next update. A signal cuts the measurement short."""
        step = batch.number + 1
        if self._is_due(step):
            module.wait_for_step()
            with contextlib.suppress(Interrupted):  # `Save` is next, and leaves
                self._measure(step)

    def _is_due(self, step: int) -> bool:
        return step % self.every == 0 or step == self.last

    def _measure(self, step: int) -> None:
        if self.record.writes and self._is_due(step) and step not in self.record.measured:
            self.record.add_dev(step, *self.measure())


class Save(pl.Callback):
    """Saves a checkpoint every so many updates, at the end, and when a signal asks the run to stop."""

    def __init__(self, record: Record, folder: Path, every: int, keep: int, last: int, stop: StopFlag) -> None:
        self.record, self.folder, self.stop = record, folder, stop
        self.every, self.keep, self.last = every, keep, last

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Update, batch_idx: int) -> None:
        """Saves after the record is on the disk, so that the record is never behind the checkpoint."""
        step = batch.number + 1
        # Among several ranks all know of a request once the step in which one rank got it is no longer pending
        stop = bool(self.stop.asked) if module.ranks == 1 else module.one_wants_to_stop
        if step % self.every and step != self.last and not stop:
            return
        module.wait_for_step()
        self.record.flush()
        if module.ranks > 1:
            agree(module, step)
        if self.record.writes:
            checkpoint.save(module.saved(), checkpoint.path_of(self.folder, step))
            checkpoint.rotate(self.folder, self.keep, self.every)
        if module.ranks > 1:
            torch.distributed.barrier()  # torchrun ends the rank that writes once another has ended
        if stop and step != self.last:
            raise Interrupted(
                f"stopped by {self.stop.asked or 'another rank'} after update {step}; resume: repeat the command"
            )


def agree(module: torch.nn.Module, step: int) -> None:
    """Compares a hash of the weights between all ranks; raises RuntimeError on each of them unless all are equal."""
    digest = hashlib.sha256()
    for weight in module.state_dict().values():
        digest.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    digests: list[str] = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(digests, digest.hexdigest())
    if len(set(digests)) > 1:
        raise RuntimeError(f"after update {step} the ranks hold different weights {digests}: nothing is saved")


class Bar(pl.Callback):
    """Speed and time left, as a bar on a terminal, inside `with bar.progress`, or lines in a log; after `record`."""

    def __init__(self, record: Record, name: str, last: int) -> None:
        self.record, self.name, self.last = record, name, last
        name_column, speed_column = TextColumn("[bold]{task.description}"), TextColumn("{task.fields[speed]}")
        columns = name_column, BarColumn(), MofNCompleteColumn(), speed_column, TimeRemainingColumn()
        self.progress = Progress(*columns, disable=not (record.writes and progress.is_terminal(sys.stdout)))
        self.task = self.progress.add_task(name, total=last, completed=record.start, speed="")
        self.logged = time.perf_counter()
        self.tokens, self.seconds = record.target_tokens, record.seconds  # before this session

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Update, batch_idx: int) -> None:
        """Reads nothing from the device."""
        step, seconds = batch.number + 1, self.record.seconds - self.seconds
        speed = f"{(self.record.target_tokens - self.tokens) / seconds:,.0f} target tokens/s"
        self.progress.update(self.task, completed=step, speed=speed)
        if self.progress.disable and self.record.writes and time.perf_counter() - self.logged > progress.LOG_SECONDS:
            self.logged = time.perf_counter()
            left = seconds / (step - self.record.start) * (self.last - step)
            print(f"{self.name}: update {step} of {self.last}, {speed}, {left:.0f} s left", flush=True)
