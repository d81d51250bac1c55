"""`aiayn bench`: training or decoding beside the baselines; a sheet, and all numbers as JSON."""

import dataclasses
import os
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tabulate import tabulate

from aiayn.bench.cases import OURS, decoding, training
from aiayn.config.schema import Config, ConfigError
from aiayn.core import storage
from aiayn.runs.models import compute_with, processor, take_gpu, within_memory
from aiayn.training import train

PACKAGES = ("aiayn", "torch", "transformers", "ctranslate2", "numpy")
TEXT_COLUMNS = ("part", "case", "precision", "check")


def main(run: Config) -> None:
    """Measures, prints the sheets, and writes them as Markdown and all numbers as JSON."""
    if not run.model.in_table3:
        raise ConfigError(f"experiment={run.experiment}: bench measures rows of Table 3; give one, such as base")
    if run.hardware.precision == "64-true":
        raise ConfigError("hardware.precision=64-true: bench measures fp32 and bf16; leave it out")
    if run.fidelity.target_space or run.fidelity.zero_start:
        raise ConfigError("fidelity.target_space, fidelity.zero_start: the baselines have neither; use fidelity=paper")
    gpu = run.hardware.accelerator == "gpu"
    take_gpu(run.hardware)
    compute_with(run.hardware.threads)
    began, precisions = time.perf_counter(), ["bf16"] if gpu else ["fp32", "bf16"]
    if run.bench.kind == "training":
        with within_memory(run.hardware, "tokens_per_micro_batch", run.training.tokens_per_update, run.data.max_length):
            parts = {"training": training(run, precisions)}
    else:
        parts = {f"decoding, beam {n}": decoding(run, precisions, n) for n in (run.decoding.beam_size, 1)}
    rows = by_case(parts)
    device = torch.cuda.get_device_name() if gpu else "no GPU used"
    hardware = {"cpu": processor(), "cores": os.cpu_count(), "threads": run.hardware.threads, "device": device}
    versions = train.versions(PACKAGES) | {"python": platform.python_version()}
    about = {"command": sys.argv, "hardware": hardware, "versions": versions, "config": dataclasses.asdict(run)}
    made_at, seconds = datetime.now(UTC).isoformat(timespec="seconds"), round(time.perf_counter() - began, 1)
    machine = ", ".join(f"{key} {value}" for key, value in (hardware | versions).items())
    sizes = f"{run.data.vocab_size} subwords; updates of {run.training.tokens_per_update} tokens"
    head = f"{machine}\n{run.experiment} at scale {run.scale.name}; {sizes}"
    align = ["left" if name in TEXT_COLUMNS else "right" for name in rows[0]]
    table, pipes = (tabulate(rows, "keys", form, colalign=align, disable_numparse=True) for form in ("plain", "pipe"))
    command = " ".join(sys.argv).replace("'", "")  # Hydra's grammar has words in quotes
    made = f"`{command}`, {made_at}, {seconds:.0f} s."
    output, tables = Path(run.bench.output), Path(run.bench.output).with_suffix(".md")
    print(f"{head}\n{table}\n{seconds:.0f} s in all; all numbers: {output}; tables: {tables}", flush=True)
    storage.write_json(output, {"made_at": made_at, **about, "parts": parts, "seconds": seconds})
    storage.write_text(tables, "\n\n".join([f"## {run.bench.kind}, {run.experiment}", head, pipes, made]) + "\n")


def by_case(parts: dict[str, Any]) -> list[dict[str, str]]:
    """One row per case and precision: tokens/s in the fastest round, the rounds' spread, the ratio to ours."""
    rows = []
    for name, part in parts.items():
        # Seconds a token of each round: rounds hold different numbers of tokens
        rounds = {
            (line["name"], line["precision"]): np.divide(line["seconds_per_round"], part["target_tokens"])
            for line in part["lines"]
        }
        tokens_per_unit = np.mean(part["target_tokens"]) / part["units_per_round"]
        for line in part["lines"]:
            seconds, precision = rounds[line["name"], line["precision"]], line["precision"]
            least = seconds.min()
            ours = rounds.get((OURS, precision), rounds[OURS, part["lines"][0]["precision"]]).min()
            rows.append(
                {
                    "part": name,
                    "case": line["name"],
                    "precision": precision,
                    "target tok/s": f"{1 / least:,.0f}",
                    f"ms per {part['unit']}": f"{1000 * least * tokens_per_unit:,.1f}",
                    "spread": f"{seconds.max() / least - 1:.0%}",
                    "aiayn is": "" if line["name"] == OURS else f"{least / ours:.2f} x",
                    "check": ", ".join(f"{key.replace('_', ' ')} {value:.2g}" for key, value in line["checks"].items()),
                }
            )
    return rows
