"""How training grows with row, sentence length and update; rows side by side; a corpus decoded."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from aiayn.bench.contestants import endless, synthetic_pairs
from aiayn.bench.measurement import MEGA, Point, in_processes, measure
from aiayn.bench.sheets import Sheet
from aiayn.config import compose
from aiayn.config.schema import ROWS, Config, vary
from aiayn.core import process_pool
from aiayn.cost import flops
from aiayn.evaluation.evaluate import build
from aiayn.evaluation.search import search

LENGTHS = (10, 28, 60, 120)
UPDATES = (0, 0.125, 0.25, 0.5, 1, 2)  # times training.tokens_per_update; 0: as small as sentences allow
ROUNDS = 3  # of what is compared with each other, in turn
WORDS, LONGEST = 37000, 256  # the paper's vocabulary; the longest sentence of WMT14 that is kept

Series = dict[str, Point]


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


def series(runs: dict[str, Config]) -> Series:
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


def sheet(title: str, first: str, points: Series, run: Config, *remarks: str) -> Sheet:
    """Points as a table."""
    gpu = run.hardware.accelerator == "gpu"
    peak = flops.peak_of(torch.cuda.get_device_name()) if gpu and run.hardware.precision == "bf16-mixed" else None
    rows = []
    for name, point in points.items():
        pace = point.flops / point.seconds
        row = {first: name, "params M": f"{point.parameters / MEGA:.2f}", "target tok/s": f"{point.rate:,.0f}"}
        row["source tok/s"] = f"{point.source_tokens / point.seconds:,.0f}"
        row["ms an update"] = f"{1000 * point.update_seconds:,.1f}"
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
