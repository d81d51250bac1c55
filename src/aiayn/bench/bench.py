"""`aiayn bench`: ours and the rivals' in turn, how training grows, its profile, Table 1; tables and all numbers."""

import dataclasses
import platform
import shlex
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from aiayn.bench import growth, sheets
from aiayn.bench.contestants import decoding, synchronize, trainers, training
from aiayn.bench.growth import processes
from aiayn.bench.layer_types import layers
from aiayn.bench.sheets import Sheet, Verbatim
from aiayn.config import compose
from aiayn.config.schema import Config, ConfigError, vary
from aiayn.core import storage
from aiayn.paper.fast.process import compute_with
from aiayn.training import train

PACKAGES = ("aiayn", "torch", "transformers", "ctranslate2", "numpy")
PROFILED = 15  # operators in the table of a profile
NEWSTEST = 3000  # sentences of newstest2013

Show = Callable[[Sheet | Verbatim], None]


def cpu() -> dict[str, Any]:
    """Model, cores and bf16 instructions of the processor."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {"cpu": platform.processor(), "cores": torch.get_num_threads(), "bf16": False}
    fields = dict(line.split(":", 1) for line in text.partition("\n\n")[0].splitlines() if ":" in line)
    facts = {key.strip(): value.strip() for key, value in fields.items()}
    flags = facts.get("flags", facts.get("Features", "")).split()
    bf16 = sorted({"avx512_bf16", "amx_bf16", "bf16"} & set(flags))
    return {"cpu": facts.get("model name", platform.machine()), "cores": text.count("processor\t"), "bf16": bf16}


def main(run: Config) -> None:
    """Measures, prints the tables, and writes them as Markdown and all numbers as JSON."""
    if not run.model.in_table3:
        raise ConfigError(
            f"experiment={run.experiment}: bench measures the parts of Table 3; give one of its rows, such as base"
        )
    gpu = run.hardware.accelerator == "gpu"
    if gpu:
        if not torch.cuda.is_available():
            raise ConfigError(f"hardware={run.hardware.name}: torch sees no GPU here")
        run = growth.paper_sized(run)
    device_name = torch.cuda.get_device_name() if gpu else "no GPU used"
    result: dict[str, Any] = {
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "hardware": {**cpu(), "threads": run.hardware.threads, "device": device_name},
        "versions": dict.fromkeys(PACKAGES) | train.versions(PACKAGES) | {"python": platform.python_version()},
        "config": dataclasses.asdict(run),
        "parts": {},
    }
    console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
    console.print(_headline(run, result), markup=False)
    shown: list[Sheet | Verbatim] = []

    def show(sheet: Sheet | Verbatim) -> None:
        shown.append(sheet)
        console.print()
        console.print(sheet.terminal())
        for line in sheet.remarks:
            console.print(line, markup=False)

    contests: dict[str, Any] = {}
    output, began = Path(run.bench.output), time.perf_counter()
    for kind, measure in parts(run).items():
        part = result["parts"][kind] = measure(show)
        if "lines" in part:
            contests[kind] = part
            show(sheets.by_line(kind, part))
        elif kind == "layers":
            for sheet in sheets.by_layer(part):
                show(sheet)
        result["seconds"] = round(time.perf_counter() - began, 1)
        # After each part: a run that is stopped after ten minutes keeps the parts it had time for
        storage.write_json(output, result)
        short = [sheets.by_rival(contests)] if contests else []
        storage.write_text(output.with_suffix(".md"), markdown(run, result, [*short, *shown]))
    console.print(f"\n{result['seconds']:.0f} s in all; all numbers: {output}; tables: {output.with_suffix('.md')}")


def parts(run: Config) -> dict[str, Callable[[Show], dict[str, Any]]]:
    """What `bench.kind` asks for: each part's name, and what measures it and may show tables of its own."""
    gpu, beam = run.hardware.accelerator == "gpu", run.decoding.beam_size
    precisions = ["bf16"] if gpu else ["fp32", "medium", *(["bf16"] if cpu()["bf16"] else [])]
    groups = {"all": {"training", "decoding", "growth", "profile"}, "rivals": {"training", "decoding"}}
    chosen = groups.get(run.bench.kind, {run.bench.kind})
    found: dict[str, Callable[[Show], dict[str, Any]]] = {}
    if "training" in chosen:
        found["training"] = lambda show: apart(training, run, precisions)
        if gpu and run.experiment != "big":
            # Alone: compiling its rivals would take most of the ten minutes that there are
            found["training, big"] = lambda show: apart(training, compose.row("big", run), precisions, False)
    if "decoding" in chosen and gpu:
        found["newstest2013"] = lambda show: growth.decoded(run, NEWSTEST, run.bench.rounds, show)
    if "decoding" in chosen and not (gpu and run.bench.kind == "all"):  # in ten minutes there is no time for rivals
        of_search = [name for name in precisions if name != "medium"] + ([] if gpu else ["int8"])
        found[f"decoding, beam {beam}"] = lambda show: apart(decoding, run, of_search, beam)
        found["decoding, greedy"] = lambda show: apart(decoding, run, of_search, 1)
    if "growth" in chosen:
        # In ten minutes there is no time to compile each of twenty rows
        plain = vary(run, hardware={"compile": False})
        found["growth"] = lambda show: growth.growth(plain if run.bench.kind == "all" else run, show)
    if "profile" in chosen:
        found["profile"] = lambda show: profiles(run, [name for name in precisions if name != "medium"], show)
    if "layers" in chosen:
        found["layers"] = lambda show: apart(layers, run)
    return found


def apart(measure: Callable[..., Any], run: Config, *given: Any) -> Any:
    """What `measure` gives of the run; on a CPU in a process of its own.

    Memory that one part has left would slow the next: the processes of a search are forked from the one that measures.
    """
    if run.hardware.accelerator == "gpu":
        return _measured(measure, run, *given)
    with processes(1) as pool:
        return pool.submit(_measured, measure, run, *given).result()


def _measured(measure: Callable[..., Any], run: Config, *given: Any) -> Any:
    compute_with(run.hardware.threads)
    return measure(run, *given)


def profiled(config: Config, precision: str) -> str:
    """torch.profiler's own table of a round of our training: its operators, the longest first."""
    trainer = trainers(config, [precision], ours=True)[-1]
    trainer.run(0)
    with torch.profiler.profile() as profiler:
        trainer.run(1)
        synchronize(config.hardware.device)
    longest = "self_device_time_total" if config.hardware.accelerator == "gpu" else "self_cpu_time_total"
    return profiler.key_averages().table(sort_by=longest, row_limit=PROFILED)  # type: ignore[no-any-return]


def profiles(run: Config, precisions: list[str], show: Show) -> dict[str, Any]:
    """torch's profile of a training in each precision."""
    found = {precision: apart(profiled, run, precision) for precision in precisions}
    for precision, table in found.items():
        show(Verbatim(f"{run.bench.updates} updates in {precision}, by torch.profiler", table))
    return found


def markdown(run: Config, result: dict[str, Any], shown: list[Sheet | Verbatim]) -> str:
    """The tables under what they were measured on, the command and the date at the end."""
    command = shlex.join([*result["command"][0].split(), *result["command"][1:]])
    made = f"`{command}`, {result['made_at']}, {result['seconds']:.0f} s."
    machine, sizes = _headline(run, result).splitlines()
    title = f"## {run.experiment} at scale {run.scale.name}, {result['hardware']['threads']} threads"
    return "\n".join([title, "", f"{machine}.", f"{sizes}.", "", *(sheet.markdown() for sheet in shown), made, ""])


def _headline(run: Config, result: dict[str, Any]) -> str:
    model, hardware = run.model, result["hardware"]
    bf16 = ", ".join(hardware["bf16"]) if hardware["bf16"] else "no"
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
    return (
        f"{hardware['cpu']}, {hardware['cores']} cores, bf16: {bf16}; {hardware['device']};"
        f" {hardware['threads']} threads; {versions}\n"
        f"{run.experiment} at scale {run.scale.name}: d_model {model.d_model}, N {model.num_layers},"
        f" d_ff {model.d_ff}, h {model.num_heads}, d_k {model.d_k}, d_v {model.d_v}, {run.data.vocab_size} words;"
        f" sentences of about {run.bench.mean_length:g} tokens, updates of {run.training.tokens_per_update}"
    )
