"""Times ours and the rivals in turn, round by round, and reports what each round took."""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from aiayn.bench import rivals
from aiayn.bench.contestants import OUTPUT_LENGTH, Contestant, random_updates, searchers, synchronize, trainers
from aiayn.bench.rivals import SENTENCES
from aiayn.config.schema import Config
from aiayn.core import signals
from aiayn.cost import flops

PROFILED = 15  # operators in the table


def take_turns(contestants: list[Contestant], rounds: int, device: str) -> None:
    """Times every contestant in every round, one after the other; round 0 warms up and is not counted."""
    for number in range(rounds + 1):
        for contestant in contestants:
            began = time.perf_counter()
            contestant.run(number)
            synchronize(device)
            taken = time.perf_counter() - began
            if number:
                contestant.seconds_a_round.append(taken)
            else:
                contestant.warm_up_seconds += taken


def training(config: Config, precisions: list[str], against_rivals: bool = True) -> dict[str, Any]:
    """Forward, loss, backward, Adam: what each contestant's rounds took, and how far its first result is from ours."""
    device, updates = config.hardware.device, config.bench.updates
    with _lined_up(trainers, against_rivals, config, precisions) as contestants:
        take_turns(contestants, config.bench.rounds, device)
    pairs, batches = random_updates(config)
    counted = batches[updates:]
    rectangles = [rivals.padded(batch) for batch in counted]
    source, target = [len(batch.source) for batch in counted], [len(batch.target) for batch in counted]
    cells = sum(x.source.numel() + x.target_input.numel() for x in rectangles)
    words = config.fidelity.rows(config.data.vocab_size)
    work = flops.training_flops(config.model, words, sum(source), sum(target), *flops.weighted_lengths(pairs))
    return {
        "unit": "update",
        "source_tokens": [sum(source[i : i + updates]) for i in range(0, len(source), updates)],
        "target_tokens": [sum(target[i : i + updates]) for i in range(0, len(target), updates)],
        "padded_share_of_rivals": 1 - (sum(source) + sum(target)) / cells,
        "units_a_round": updates,
        "flops_a_token": work / sum(target),
        "peak": flops.peak_of(torch.cuda.get_device_name()) if device == "cuda" else None,
        "lines": [contestant.line() for contestant in contestants],
    }


def decoding(config: Config, precisions: list[str], beam_size: int) -> dict[str, Any]:
    """Search with `beam_size` hypotheses: what each contestant's rounds took, and how many outputs equal ours."""
    with _lined_up(searchers, True, config, precisions, beam_size) as contestants:
        take_turns(contestants, config.bench.rounds, config.hardware.device)
    tokens = config.bench.updates * SENTENCES * OUTPUT_LENGTH
    return {
        "unit": "batch",
        "source_tokens": [tokens] * config.bench.rounds,
        "target_tokens": [tokens] * config.bench.rounds,
        "padded_share_of_rivals": 0.0,
        "units_a_round": config.bench.updates,
        "lines": [contestant.line() for contestant in contestants],
    }


def profiled(config: Config, precision: str) -> str:
    """torch.profiler's own table of a round of our training: its operators, the longest first."""
    trainer = trainers(config, [precision], ours=True)[-1]
    trainer.run(0)
    with torch.profiler.profile() as profiler:
        trainer.run(1)
        synchronize(config.hardware.device)
    longest = "self_device_time_total" if config.hardware.accelerator == "gpu" else "self_cpu_time_total"
    return profiler.key_averages().table(sort_by=longest, row_limit=PROFILED)  # type: ignore[no-any-return]


@contextmanager
def _lined_up(
    line_up: Callable[..., list[Contestant]], against_rivals: bool, config: Config, precisions: list[str], *given: Any
) -> Iterator[list[Contestant]]:
    """Ours and the rivals, ready to run, precision by precision.

    On a CPU the rivals are in a process of their own, as their users have them: ours has settings of torch and of the
    system's memory that would help them too.
    """
    with ExitStack() as stack:
        contestants = line_up(config, precisions, *given, ours=True)
        if against_rivals and config.hardware.accelerator == "gpu":
            contestants += line_up(config, precisions, *given, ours=False)
        elif against_rivals:
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(1, context, signals.serve, (os.getpid(),)))
            for rival in pool.submit(_line_up_in_process, line_up, config, precisions, *given).result():
                contestants.append(replace(rival, run=partial(_asked_to_run, pool, rival.run)))
        yield sorted(contestants, key=lambda contestant: precisions.index(contestant.precision))


def _asked_to_run(pool: ProcessPoolExecutor, run: Callable[[int], None], number: int) -> None:
    pool.submit(run, number).result()


_rivals: list[Contestant] = []  # in the rivals' process


def _line_up_in_process(line_up: Callable[..., list[Contestant]], config: Config, *given: Any) -> list[Contestant]:
    torch.set_num_threads(config.hardware.threads)
    _rivals.extend(line_up(config, *given, ours=False))
    return [replace(rival, run=partial(_run_in_process, index)) for index, rival in enumerate(_rivals)]


def _run_in_process(index: int, number: int) -> None:
    _rivals[index].run(number)
