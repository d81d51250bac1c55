"""`aiayn plan`: what a run or the whole table takes, and everything that would stop it later; no run is trained."""

import time
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from aiayn.bench.cases import Trainer, random_updates
from aiayn.config import compose, folders
from aiayn.config.schema import ROWS, Config, ConfigError, vary
from aiayn.core.storage import disk_of, free_bytes
from aiayn.cost import device_schedule, flops
from aiayn.cost.device_schedule import Turn
from aiayn.cost.estimate import GIGA, CorpusStatistics, Estimate, corpus_statistics, estimate
from aiayn.data.parallel_text import DataError
from aiayn.runs import devices, jobs
from aiayn.runs.models import build, compute_with


def rows(run: Config) -> list[Config]:
    """The 20 rows with data, scale, hardware, fidelity of `run`; `run` alone when it varies one or is none of them."""
    if folders.variation(run) or run.experiment not in ROWS:
        return [run]
    own = compose.row(run.experiment, run).training
    given = {key: value for key, value in vars(run.training).items() if value != getattr(own, key)}
    return [vary(compose.row(name, run), training=given) for name in ROWS]


def sustained(run: Config, corpus: CorpusStatistics) -> float:
    """The share of its peak that a core of this machine sustains now, in updates of base at the scale of `run`."""
    compute_with(run.hardware.threads)
    # An update of the paper's would take minutes; a token's sentence is longer than the mean sentence
    limit, length = min(run.training.tokens_per_update, max(1_000, run.data.max_length)), corpus.target_length
    bench = {"rounds": 3, "updates": 1, "mean_length": max(length / 1.43, 1.0)}
    base, data = compose.scaled(compose.unscaled("base", run)), {"vocab_size": corpus.vocab_size or run.data.vocab_size}
    base = vary(base, training={"tokens_per_update": limit}, data=data, bench=bench)
    updates, precision = random_updates(base), "bf16" if run.hardware.precision == "bf16-mixed" else "fp32"
    trainer, seconds_per_token = Trainer(build(base, base.data.vocab_size), updates, precision, base), []
    for number, update in enumerate(updates):
        began = time.thread_time()  # without what this thread waits for a core
        trainer.run(number)
        seconds_per_token.append((time.thread_time() - began) * run.hardware.threads / update.target_tokens)
    work = flops.training_flops(base.model, base.fidelity.rows(base.data.vocab_size), 1, 1, length, length)
    return work / min(seconds_per_token) / (flops.CORE.peak * flops.TERA)


class Disk(NamedTuple):
    """A disk that is to be written to: the keys that name it, and bytes, needed and free."""

    keys: str
    needed: float
    free: int


def disks(planned: list[Estimate], corpus: CorpusStatistics, available: int) -> list[Disk]:
    """The disk of the runs, each at work with one checkpoint more, and that of the corpus, which may be the same."""
    left = [row for row in planned if not jobs.is_finished(row.run)]
    being_written = sorted((row.checkpoint for row in left), reverse=True)[:available]
    runs = sum(row.disk for row in left) + sum(being_written)
    run = planned[0].run
    output, prepared = Path(run.output), Path(run.prepared)
    keys = f"output={run.output}", f"prepared={run.prepared}"
    if disk_of(output) == disk_of(prepared):
        return [Disk(" and ".join(keys), runs + corpus.to_write, free_bytes(output))]
    return [Disk(keys[0], runs, free_bytes(output)), Disk(keys[1], corpus.to_write, free_bytes(prepared))]


def fitting(row: Estimate, corpus: CorpusStatistics, limit: float) -> str:
    """What makes a run fit `limit` bytes: the largest half, quarter and so on of its micro-batch that does, if any."""
    run = row.run
    tokens = min(run.hardware.tokens_per_micro_batch, run.training.tokens_per_update)
    while (tokens := tokens // 2) >= run.data.max_length:
        if estimate(vary(run, hardware={"tokens_per_micro_batch": tokens}), corpus).memory <= limit:
            return f"give {tokens}"
    return "no value fits, give another plan.gpu"


def refusals(planned: list[Estimate], written: list[Disk], corpus: CorpusStatistics) -> list[str]:
    """Everything that would stop a run later: folders of other runs, too little memory, too little disk."""
    found = []
    for row in planned:
        try:
            jobs.check_folder(row.run)
        except ConfigError as error:
            found.append(str(error))
        limit = flops.device(row.run.hardware, row.run.plan.gpu).memory
        if limit and row.memory > limit * GIGA:
            found.append(
                f"hardware.tokens_per_micro_batch={row.run.hardware.tokens_per_micro_batch}: {row.name} takes about"
                f" {row.memory / GIGA:.1f} GB, a {row.run.plan.gpu} has {limit:g}; {fitting(row, corpus, limit * GIGA)}"
            )
    for disk in written:
        if disk.needed > disk.free:
            fewer = ", or lower training.keep_checkpoints" if disk.keys.startswith("output") else ""
            found.append(
                f"{disk.keys}: about {disk.needed / GIGA:.1f} GB are to be written and {disk.free / GIGA:.1f} are free"
                f" there; give a larger disk{fewer}"
            )
    return found


def main(run: Config) -> None:
    """Prints the plan, then raises what stands in its way: ConfigError, or DataError for damaged text."""
    failure: ConfigError | DataError | None = None
    try:
        corpus = corpus_statistics(run)
    except (ConfigError, DataError) as error:
        failure = error
        corpus = CorpusStatistics(found="not usable, as the last line says; lengths are assumed")
    hardware, device = run.hardware, flops.device(run.hardware, run.plan.gpu)
    available = run.plan.gpus if hardware.accelerator == "gpu" else len(devices.names(hardware))
    if hardware.devices > available:
        raise ConfigError(f"plan.gpus={available}: must be at least hardware.devices={hardware.devices}")
    basis = device.basis if run.plan.efficiency is None else "given"
    efficiency = run.plan.efficiency or (device.efficiency if device.memory else sustained(run, corpus))
    planned = [estimate(vary(row, plan={"efficiency": efficiency}), corpus) for row in rows(run)]
    most = device_schedule.most_of_one(hardware, available)
    seconds = {row.name: row.seconds for row in planned}
    turns = device_schedule.best_schedule(seconds, hardware.devices, most, available)
    assigned = {turn.name: {"devices": len(turn.devices)} for turn in turns}
    planned = [estimate(vary(row.run, hardware=assigned[row.name]), corpus) for row in planned]
    written = disks(planned, corpus, available)
    print("\n".join(text(planned, turns, corpus, available, written, basis)))
    refused = refusals(planned, written, corpus)
    if len(refused) + bool(failure) > 1:
        print("\n".join(f"REFUSED: {line}" for line in refused))
    if failure:
        raise failure
    if refused:
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        raise ConfigError(refused[0] + more)
    known = ["configuration", *(["data"] if corpus.complete else []), *(["memory"] if device.memory else [])]
    unknown = "" if corpus.complete else "; the data is not, it is still to be downloaded"
    unknown += "" if device.memory else "; memory is not, on a CPU"
    print(f"Nothing stands in the way: {', '.join(known)} and disk are checked{unknown}.")


def duration(seconds: float) -> str:
    """Hours, or minutes for less than two of them."""
    return f"{seconds / 3600:,.1f} h" if seconds >= 7200 else f"{seconds / 60:.1f} min"


def text(
    planned: list[Estimate], turns: list[Turn], corpus: CorpusStatistics, available: int, disks: list[Disk], basis: str
) -> list[str]:
    """The plan as lines; `basis` says where the efficiency is from."""
    run = planned[0].run
    device = flops.device(run.hardware, run.plan.gpu)
    cores = 1 if run.hardware.accelerator == "gpu" else run.hardware.threads
    core = "CPU core" if cores == 1 else f"group of {cores} CPU cores"
    unit, peak = run.plan.gpu if run.hardware.accelerator == "gpu" else core, device.peak * cores
    head = ["row", "params M", "FLOP", "steps", "tokens M", "GB", "devices", "on one", "on all"]
    lines = []
    for row in planned:
        cells = [row.name, f"{row.parameters / 1e6:.2f}", flops.power(row.flops), f"{row.run.training.max_steps:,}"]
        cells += [f"{row.tokens / 1e6:,.1f}", f"{row.memory / GIGA:.2f}", str(row.run.hardware.devices)]
        lines.append([*cells, duration(row.seconds), duration(row.seconds / row.run.hardware.devices)])
    tokens, work, seconds = (sum(getattr(row, key) for row in planned) for key in ("tokens", "flops", "seconds"))
    whole = ["all", "", flops.power(work), "", f"{tokens / 1e6:,.1f}", "", ""]
    lines.append([*whole, duration(seconds), duration(device_schedule.length(turns))])
    align = ["left", *["right"] * (len(head) - 1)]
    table = tabulate([head, *lines], tablefmt="plain", colalign=align, disable_numparse=True).splitlines()
    known = "of the prepared corpus" if corpus.vocab_size else "assumed"
    per_epoch, first = corpus.target_tokens, planned[0]
    epochs = f"; {first.tokens / per_epoch:.1f} epochs of {first.name}" if per_epoch else ""
    queues = [
        [f"{turn.name} until {duration(turn.end)}" for turn in turns if number in turn.devices]
        for number in range(available)
    ]
    return [
        f"Plan at scale {run.scale.name} on {folders.setting(run)}: {len(planned)} rows, one seed each,"
        " no run is trained",
        *table,
        f"{available} x {unit}: peak {peak:g} TFLOP/s, training sustains {run.plan.efficiency:.0%}, {basis}.",
        f"Lengths {known}: {corpus.source_length:.1f} source and {corpus.target_length:.1f} target tokens,"
        f" weighted by tokens{epochs}.",
        "GB: on each device, estimated. Left out: evaluation, start-up and traffic between devices that share a row.",
        *(
            f"Disk: {disk.needed / GIGA:.2f} GB to be written, {disk.free / GIGA:.1f} GB free for {disk.keys}."
            for disk in disks
        ),
        f"Data: {corpus.found}.",
        "Schedule, longest first, as a sweep on one machine with these devices works through it:",
        *(f"  {unit} {number}: {', '.join(queue) or 'idle'}" for number, queue in enumerate(queues)),
    ]
