"""How the pace and memory of training grow with row, sentence length and update; rows side by side; a corpus decoded.

Measured on short trainings as `aiayn train` does them, through Lightning and all.
"""

import contextlib
import dataclasses
import io
import multiprocessing
import os
import resource
import signal
import statistics
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

import numpy as np
import torch

from aiayn.bench.contestants import endless, synchronize, synthetic_pairs
from aiayn.bench.sheets import Sheet
from aiayn.config import compose
from aiayn.config.schema import ROWS, Config, vary
from aiayn.core import process_pool, signals
from aiayn.cost import flops
from aiayn.data.encoded import Dataset, Pairs
from aiayn.evaluation.evaluate import build
from aiayn.evaluation.search import search
from aiayn.paper.fast.process import compute_with
from aiayn.training import train
from aiayn.training.callbacks import Record
from aiayn.training.lightning_data import Update
from aiayn.training.lightning_model import LightningTransformer

LENGTHS = (10, 28, 60, 120)
UPDATES = (0, 0.125, 0.25, 0.5, 1, 2)  # times training.tokens_per_update; 0: as small as sentences allow
ROUNDS = 3  # of what is compared with each other, in turn
WORDS, LONGEST = 37000, 256  # the paper's vocabulary; the longest sentence of WMT14 that is kept
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
    never = {"max_steps": NEVER, "dev_every": NEVER, "checkpoint_every": NEVER}
    run = vary(run, training=never, hardware={"devices": 1})
    module = LightningTransformer(build(run, run.data.vocab_size), run.training, run.seed)
    pairs, folder = sentences(run), Path(run.output)
    corpus = cast(Dataset, SimpleNamespace(pairs=lambda split: pairs))
    watch = Stopwatch(folder, run.bench.seconds, partial(_others.wait, PATIENCE))
    # The bar of a training would stand between the tables
    with signals.StopFlag() as stop, contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Enough):
        train.fit(run, folder, module, corpus, watch, stop)
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


def growth(run: Config, show: Callable[[Sheet], object]) -> dict[str, Any]:
    """Every measurement, each table shown as soon as it is there; the numbers as plain data."""
    gpu = run.hardware.accelerator == "gpu"
    update = {"tokens_per_update": run.training.tokens_per_update}
    rows = series({name: vary(compose.row(name, run), training=update) for name in ROWS})
    show(sheet(f"by row, at scale {run.scale.name}", "row", rows, run))
    lengths = series({str(length): of_length(run, length) for length in LENGTHS})
    show(sheet("by mean length of the sentences", "tokens", lengths, run))
    updates = series(of_updates(run))
    hint = ["the smallest leaves the GPU idle: its ms an update are the host's time"] if gpu else []
    show(sheet("by target tokens of an update", "tokens", updates, run, *hint))
    measured = {"rows": rows, "lengths": lengths, "updates": updates}
    result: dict[str, Any] = {
        part: {name: dataclasses.asdict(point) for name, point in points.items()} for part, points in measured.items()
    }
    if not gpu:
        result["side_by_side"], table = side_by_side(run)
        show(table)
    return result


def series(runs: dict[str, Config]) -> dict[str, Point]:
    """One point after another: in this process on a GPU, whose memory torch measures, else each in a new one."""
    found = {}
    for name, run in runs.items():
        (found[name],) = [measure(run)] if run.hardware.accelerator == "gpu" else in_processes([run])
    return found


def of_length(run: Config, length: float) -> Config:
    """The same run on sentences of another mean length, as long as an update can hold them."""
    longest = min(run.training.tokens_per_update, max(run.data.max_length, round(4 * length)))
    return vary(_holding(run, longest), bench={"mean_length": min(length, longest)})


def of_updates(run: Config) -> dict[str, Config]:
    """The same run with other sizes of an update, none of them too small for a sentence."""
    sizes = {max(run.data.max_length, round(factor * run.training.tokens_per_update)) for factor in UPDATES}
    return {str(size): vary(run, training={"tokens_per_update": size}) for size in sorted(sizes)}


def side_by_side(run: Config) -> tuple[dict[str, list[float]], Sheet]:
    """Runs of one row at once, one thread each, and one after the other with all of them: which is faster here.

    Gives the target tokens a second of all runs together, round by round.
    """
    cores = process_pool.cores()
    together, alone = f"{cores} at once, 1 thread each", f"one after the other, {cores} threads"
    found: dict[str, list[float]] = {together: [], alone: []}
    single, whole = (vary(run, hardware={"threads": threads}) for threads in (1, cores))
    for _ in range(ROUNDS):
        found[together].append(sum(point.rate for point in in_processes([single] * cores)))
        found[alone].append(in_processes([whole])[0].rate)
    rates = {name: statistics.median(rounds) for name, rounds in found.items()}
    best, other = max(rates, key=rates.__getitem__), min(rates, key=rates.__getitem__)
    remark = f"{best} is {rates[best] / rates[other]:.2f} x as fast"
    rows = [{"": name, "target tok/s of all": f"{rate:,.0f}"} for name, rate in rates.items()]
    return found, Sheet("runs of a sweep on this machine", rows, [remark])


def decoded(run: Config, sentences: int, rounds: int, show: Callable[[Sheet], object]) -> dict[str, Any]:
    """Seconds in which a corpus like newstest2013 is searched, every output as long as its source."""
    device = run.hardware.device
    pairs = synthetic_pairs(vary(run, bench={"mean_length": 28.0}), sentences)
    sources = np.split(pairs.source_ids, pairs.source_offsets[1:-1])
    model = endless(build(run, run.data.vocab_size)).to(device).eval()
    how = dataclasses.replace(run.decoding, max_extra=0, precision="bf16" if device == "cuda" else "full")
    seconds = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        found = search(model, [source[:-1] for source in sources], how, run.hardware)
        seconds.append(time.perf_counter() - began)
    tokens = sum(len(hypothesis.ids) for hypothesis in found)
    taken = statistics.median(seconds[1:])
    row = {"sentences": f"{sentences:,}", "tokens": f"{tokens:,}", "seconds": f"{taken:.2f}"}
    row |= {"sentences/s": f"{sentences / taken:,.0f}", "tok/s": f"{tokens / taken:,.0f}"}
    title = f"a corpus like newstest2013 decoded, beam {how.beam_size}, without loading, median of {rounds} rounds"
    show(Sheet(title, [row], words=()))
    return {"sentences": sentences, "tokens": tokens, "seconds_a_round": seconds[1:]}


def paper_sized(run: Config) -> Config:
    """The same row at the paper's own size, whatever the scale: what a GPU is measured on."""
    like = vary(_holding(run, LONGEST), data={"vocab_size": WORDS})
    row = compose.row(run.experiment, dataclasses.replace(like, scale=compose.rows()["base"].scale))
    update = {"tokens_per_update": round(run.training.tokens_per_update / run.scale.batch)}
    return dataclasses.replace(vary(row, training=update), decoding=run.decoding)


def sheet(title: str, first: str, points: dict[str, Point], run: Config, *remarks: str) -> Sheet:
    """Points as a table."""
    gpu = run.hardware.accelerator == "gpu"
    peak = flops.peak_of(torch.cuda.get_device_name()) if gpu and run.hardware.precision == "bf16-mixed" else None
    rows = []
    for name, point in points.items():
        pace = point.flops / point.seconds
        row = {first: name, "params M": f"{point.parameters / MEGA:.2f}", "target tok/s": f"{point.rate:,.0f}"}
        row["source tok/s"] = f"{point.source_tokens / point.seconds:,.0f}"
        row["ms an update"] = f"{1000 * point.seconds / point.updates:,.1f}"
        row["ms beside the step"] = f"{1000 * point.outside_seconds / point.updates:.2f}"
        row["TFLOP/s" if gpu else "GFLOP/s"] = f"{pace / (1e12 if gpu else 1e9):.1f}"
        if peak:
            row["of the peak"] = f"{pace / flops.TERA / peak:.1%}"
        rows.append(row | {"first update s": f"{point.first_seconds:.2f}", "peak MB": f"{point.peak_mb:,.0f}"})
    libraries = next(iter(points.values())).before_mb
    compiled = "compiled" if run.hardware.compile else "not compiled"
    remark = (
        f"GPU memory that torch took; {compiled}" if gpu else f"peak of the process, {libraries:,.0f} of it libraries"
    )
    return Sheet(title, rows, [f"peak MB: {remark}", *remarks], words=(first,))


def _holding(run: Config, longest: int) -> Config:
    tokens = max(run.hardware.tokens_per_micro_batch, longest)
    return vary(run, data={"max_length": longest}, hardware={"tokens_per_micro_batch": tokens})


def _begin(barrier: Any) -> None:
    global _others
    _others = barrier
    parent = multiprocessing.parent_process()
    assert parent is not None

    def die_with_parent() -> None:
        # The kernel's word would come when the server of forks dies, which lives as long as this process
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die_with_parent, daemon=True).start()


def _peak_mb(gpu: bool) -> float:
    if gpu:
        return torch.cuda.max_memory_allocated() / MEGA
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MEGA
