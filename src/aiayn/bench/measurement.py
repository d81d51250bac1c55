"""A short training as `aiayn train` does it, through Lightning and all: its pace and its memory."""

import contextlib
import io
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from aiayn.bench.contestants import synchronize, synthetic_pairs
from aiayn.config.schema import Config, vary
from aiayn.core import signals
from aiayn.cost import flops
from aiayn.data.encoded import Dataset, Pairs
from aiayn.evaluation.evaluate import build
from aiayn.paper.fast.process import compute_with
from aiayn.training import train
from aiayn.training.callbacks import Record
from aiayn.training.lightning_data import Update
from aiayn.training.lightning_model import LightningTransformer

WARM_UP = 2  # updates: kernels are compiled, memory is taken
FEWEST = 3  # updates that are measured, however long they take
PATIENCE = 600.0  # seconds that one process waits for another
NEVER = 10**9
MEGA = 1e6


_others: Any = threading.Barrier(1)  # the processes that measure at once: here this one alone


@dataclass(frozen=True)
class Point:
    """What was measured of one training."""

    updates: int
    source_tokens: int
    target_tokens: int
    seconds: float
    outside_seconds: float  # of them, the host's between two steps: data, record, Lightning
    first_seconds: float  # the first update
    flops: float
    parameters: int
    peak_mb: float  # of the process, or of the GPU's memory
    before_mb: float  # what was in use before there was a model: Python and its libraries

    @property
    def rate(self) -> float:
        """Target tokens a second."""
        return self.target_tokens / self.seconds

    @property
    def update_seconds(self) -> float:
        """Seconds of an update."""
        return self.seconds / self.updates


class Enough(Exception):
    """What was to be measured is measured."""


class Stopwatch(Record):
    """Ends a training when its updates after the warm-up have taken so many seconds; writes nothing."""

    def __init__(self, folder: Path, seconds: float, together: Callable[[], object]) -> None:
        super().__init__(folder / "metrics.jsonl", 0, lambda row: None, writes=False, device="", devices=1)
        self.limit, self.together = seconds, together
        self.updates = 0
        self.first = self.inside = self.outside = self.began = self.taken = 0.0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Update, batch_idx: int) -> None:
        """Looks at the clock."""
        self.entered = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Update, batch_idx: int) -> None:
        """Counts the update, unless it belongs to the warm-up."""
        self.inside += time.perf_counter() - self.entered
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        done = batch.number + 1
        if done == 1:
            synchronize(module.device.type)
            self.first = time.perf_counter() - self.entered
        if done > WARM_UP:
            self.updates += 1
            if self.updates >= FEWEST and time.perf_counter() - self.began >= self.limit:
                self.outside = time.perf_counter() - self.began - self.inside
                synchronize(module.device.type)
                self.taken = time.perf_counter() - self.began
                raise Enough
        elif done == WARM_UP:
            self.together()
            synchronize(module.device.type)
            self.source_tokens = self.target_tokens = 0
            self.inside, self.began = 0.0, time.perf_counter()


def sentences(run: Config) -> Pairs:
    """Random sentence pairs for so many updates that an epoch's last, smaller update hardly counts."""
    return synthetic_pairs(run, 100 + int(60 * run.training.tokens_per_update / run.bench.mean_length))


def measure(run: Config) -> Point:
    """The pace and memory of a training in this process; it ends `bench.seconds` after the warm-up."""
    train.quieten()
    gpu = run.hardware.accelerator == "gpu"
    compute_with(run.hardware.threads)
    if run.hardware.compile:
        torch.compiler.reset()  # or what it keeps of other models would count against this one
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = _peak_mb(gpu)
    run = vary(run, training={"max_steps": NEVER, "dev_every": NEVER, "checkpoint_every": NEVER})
    module = LightningTransformer(build(run, run.data.vocab_size), run.training, run.seed)
    pairs, folder = sentences(run), Path(run.output)
    corpus = cast(Dataset, SimpleNamespace(pairs=lambda split: pairs))
    watch = Stopwatch(folder, run.bench.seconds, partial(_others.wait, PATIENCE))
    # The bar of a training would stand between the tables
    with signals.StopFlag() as stop, contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Enough):
        train.fit(run, folder, module, corpus, watch, 1, stop)
    rows, lengths = run.fidelity.rows(run.data.vocab_size), flops.weighted_lengths(pairs)
    work = flops.training_flops(run.model, rows, watch.source_tokens, watch.target_tokens, *lengths)
    return Point(
        watch.updates,
        watch.source_tokens,
        watch.target_tokens,
        watch.taken,
        watch.outside,
        watch.first,
        work,
        sum(parameter.numel() for parameter in module.parameters()),
        _peak_mb(gpu),
        before,
    )


def in_processes(runs: Sequence[Config]) -> list[Point]:
    """The same of each run in a process of its own, all at once."""
    with processes(len(runs)) as pool:
        return [found.result() for found in [pool.submit(measure, run) for run in runs]]


def processes(count: int) -> ProcessPoolExecutor:
    """So many processes for one task each.

    They are forked from one that has imported everything and computed nothing: they start at once, and their memory is
    their own.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or torch's profiler writes on the terminal
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return ProcessPoolExecutor(count, context, _begin, (context.Barrier(count),), max_tasks_per_child=1)


def _begin(barrier: Any) -> None:
    global _others
    _others = barrier
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    # The kernel's word would come when the server of forks dies, which lives as long as this process
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _peak_mb(gpu: bool) -> float:
    if gpu:
        return torch.cuda.max_memory_allocated() / MEGA
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MEGA
