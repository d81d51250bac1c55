"""Lightning callbacks: the record of updates, dev perplexity, checkpoints, stopping on a signal, the progress bar."""

import contextlib
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
import torch.distributed
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from aiayn.core import progress, storage
from aiayn.core.signals import Interrupted, StopFlag
from aiayn.evaluation.metrics import perplexity
from aiayn.runs import checkpoint, records
from aiayn.training.lightning_data import Update
from aiayn.training.lightning_model import LightningTransformer, NonFinite

FLUSH_SECONDS = 2.0
# Before the name of a device, the key under which a row has the seconds that all of its kind were at work until then.
DEVICE_SECONDS = "device_seconds/"


class Record(pl.Callback):
    """Writes `metrics.jsonl`: each update once, in order. Tensors wait unread for a flush, so that no step waits.

    A row is written only after its update is known to be finite. `device` names what this session computes on and
    `devices` how many of them; earlier sessions may have used others.
    """

    def __init__(
        self,
        path: Path,
        start: int,
        view: Callable[[dict[str, Any]], None],
        *,
        writes: bool,
        device: str,
        devices: int,
    ) -> None:
        self.path, self.view, self.writes, self.device, self.devices = path, view, writes, device, devices
        rows = [row for row in records.read_metrics(path) if row["step"] <= start]
        recorded = {row["step"] for row in rows if "train/loss" in row}
        if absent := next((step for step in range(1, start + 1) if step not in recorded), None):
            raise storage.StorageError(
                f"{path}: update {absent} is missing, but there is a checkpoint of update {start};"
                " restore the file, or delete its folder to start this run anew"
            )
        if writes:
            storage.write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
        self.start = start
        self.measured = {row["step"] for row in rows if "dev/ppl" in row}
        self.seconds = max((row.get("seconds", 0.0) for row in rows), default=0.0)
        self.source_tokens = sum(row.get("source_tokens", 0) for row in rows)
        self.target_tokens = sum(row.get("target_tokens", 0) for row in rows)
        self.device_seconds: dict[str, float] = {device: 0.0}
        for row in rows:  # later rows have what passed before in them
            self.device_seconds |= {
                key.removeprefix(DEVICE_SECONDS): value for key, value in row.items() if key.startswith(DEVICE_SECONDS)
            }
        self.waiting: list[dict[str, Any]] = []
        self.resumed = self.flushed = time.perf_counter()
        self.before, self.device_before = self.seconds, self.device_seconds[device]

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Starts the clock."""
        self.resumed = self.flushed = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Update, batch_idx: int
    ) -> None:
        """Keeps the row of this update."""
        now = time.perf_counter()
        self.seconds = self.before + now - self.resumed
        self.device_seconds[self.device] = self.device_before + self.devices * (now - self.resumed)
        self.source_tokens += batch.source_tokens
        self.target_tokens += batch.target_tokens
        self.waiting.append(
            {
                "step": batch.number + 1,
                "train/loss": (outputs["loss"], batch.target_tokens),
                "train/nats": (outputs["nats"], batch.target_tokens),
                "train/gradient_norm": (outputs["gradient_norm"], 1),
                "train/learning_rate": outputs["learning_rate"],
                "source_tokens": batch.source_tokens,
                "target_tokens": batch.target_tokens,
                "seconds": round(self.seconds, 3),
                **{f"{DEVICE_SECONDS}{device}": round(passed, 3) for device, passed in self.device_seconds.items()},
            }
        )
        if now - self.flushed > FLUSH_SECONDS:
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

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Makes the measurement that a signal cut short before this checkpoint was saved."""
        if self.record.start:
            self._measure(self.record.start)

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Update, batch_idx: int
    ) -> None:
        """Rank 0 measures; the others meet it at the next update. A signal cuts the measurement short."""
        step = batch.number + 1
        if self._is_due(step):
            cast(LightningTransformer, module).wait_for_step()
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
        self.record, self.folder, self.every, self.keep, self.last = record, folder, every, keep, last
        self.stop = stop

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Update, batch_idx: int
    ) -> None:
        """Saves after the record is on the disk, so that the record is never behind the checkpoint."""
        step = batch.number + 1
        module = cast(LightningTransformer, module)
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
        ranks = ", ".join(f"rank {rank} {found[:12]}" for rank, found in enumerate(digests))
        raise RuntimeError(f"after update {step} the ranks hold different weights ({ranks}): nothing is saved")


class Bar(pl.Callback):
    """A progress bar with tokens a second and the time left on a terminal; a line now and then in a log."""

    def __init__(self, record: Record, name: str, start: int, last: int) -> None:
        self.record, self.name, self.start, self.last = record, name, start, last
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            disable=not progress.is_terminal(sys.stdout),
        )
        self.task = self.progress.add_task(name, total=last, completed=start, speed="")
        self.logged = time.perf_counter()
        self.tokens = 0
        self.began = 0.0

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Shows the bar on rank 0."""
        self.began = time.perf_counter()
        if self.record.writes:
            self.progress.start()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Update, batch_idx: int
    ) -> None:
        """Moves it on, without reading anything from the device."""
        self.tokens += batch.target_tokens
        now = time.perf_counter()
        speed = f"{self.tokens / (now - self.began):,.0f} target tokens/s"
        self.progress.update(self.task, completed=batch.number + 1, speed=speed)
        if self.progress.disable and self.record.writes and now - self.logged > progress.LOG_SECONDS:
            self.logged = now
            left = (now - self.began) / (batch.number + 1 - self.start) * (self.last - batch.number - 1)
            print(f"{self.name}: update {batch.number + 1} of {self.last}, {speed}, {left:.0f} s left", flush=True)

    def teardown(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        """Leaves the terminal as it was."""
        self.progress.stop()

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        """Leaves it so too, before anything is said of the error: Lightning tears no callback down then."""
        self.progress.stop()
