"""`aiayn bench`: tokens a second in training and decoding, ours and the rivals', from the same run."""

import dataclasses
import platform
import statistics
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from aiayn import storage
from aiayn.contest import OURS, decoding, training
from aiayn.linear import compute_with
from aiayn.schema import Config, ConfigError

PACKAGES = ("aiayn", "torch", "transformers", "ctranslate2", "numpy")


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


def table(title: str, part: dict[str, Any]) -> Table:
    """One kind of work as the terminal shows it."""
    unit = part["unit"]
    shown = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("", "precision"):
        shown.add_column(column)
    for column in ("target tok/s", "source tok/s", f"ms an {unit}" if unit == "update" else "ms a batch", "aiayn is"):
        shown.add_column(column, justify="right")
    shown.add_column("check")
    ours = {line["precision"]: line["seconds_a_round"] for line in part["lines"] if line["name"] == OURS}
    for line in part["lines"]:
        base = ours.get(line["precision"], ours["fp32"])
        ratio = statistics.median(theirs / own for theirs, own in zip(line["seconds_a_round"], base, strict=True))
        rates = (_rate(part[f"{side}_tokens"], line["seconds_a_round"]) for side in ("target", "source"))
        milliseconds = 1000 * statistics.median(line["seconds_a_round"]) / part["units_a_round"]
        shown.add_row(
            line["name"],
            line["precision"],
            *(f"{rate:,.0f}" for rate in rates),
            f"{milliseconds:,.1f}",
            "" if line["name"] == OURS else f"{ratio:.2f} x",
            ", ".join(f"{name.replace('_', ' ')} {value:.2g}" for name, value in line["checks"].items()),
        )
    return shown


def verdict(part: dict[str, Any]) -> list[str]:
    """Ours beside the fastest rival: both in fp32, then each in its fastest precision."""
    lines = []
    for what, chosen in (
        ("fp32", [x for x in part["lines"] if x["precision"] == "fp32" or "float32" in x["name"]]),
        ("each in its fastest precision", part["lines"]),
    ):
        rates = {(x["name"], x["precision"]): _rate(part["target_tokens"], x["seconds_a_round"]) for x in chosen}
        own = max(rate for (name, _), rate in rates.items() if name == OURS)
        best, rate = max(((key, rate) for key, rate in rates.items() if key[0] != OURS), key=lambda item: item[1])
        lines.append(f"{what}: {own / rate:.2f} x the fastest rival ({' '.join(best)}, {rate:,.0f} target tokens/s)")
    return lines


def main(config: Config) -> None:
    """Measures, prints the tables and writes all numbers as JSON."""
    compute_with(config.hardware.threads)
    device = "cuda" if config.hardware.accelerator == "gpu" else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"hardware={config.hardware.name}: torch sees no GPU here")
    precisions = ["fp32", "medium", *(["bf16"] if device == "cuda" or cpu()["bf16"] else [])]
    result: dict[str, Any] = {
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "hardware": {**cpu(), "threads": config.hardware.threads, "device": _device_name(device)},
        "versions": {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()},
        "config": dataclasses.asdict(config),
        "parts": {},
    }
    console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
    console.print(_headline(config, result))
    kinds: dict[str, Callable[[], dict[str, Any]]] = {}
    if config.bench.kind != "decoding":
        kinds["training"] = lambda: training(config, precisions, device)
    if config.bench.kind != "training":
        kinds[f"decoding, beam {config.decoding.beam_size}"] = lambda: decoding(
            config, precisions, device, config.decoding.beam_size
        )
        kinds["decoding, greedy"] = lambda: decoding(config, precisions, device, 1)
    for kind, measure in kinds.items():
        part = result["parts"][kind] = measure()
        counted = f"{part['units_a_round']} {part['unit']}{'e' if part['unit'] == 'batch' else ''}s a round"
        console.print()
        console.print(table(f"{kind}: {counted}, median of {config.bench.rounds} rounds", part))
        console.print(f"padded share of the rivals' tokens {part['padded_share_of_rivals']:.1%}, of ours none")
        for line in verdict(part):
            console.print(line)
    storage.write_json(Path(config.bench.output), result)
    console.print(f"\nall numbers: {config.bench.output}")


def _headline(config: Config, result: dict[str, Any]) -> str:
    model, hardware = config.model, result["hardware"]
    bf16 = ", ".join(hardware["bf16"]) if hardware["bf16"] else "no"
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
    return (
        f"{hardware['cpu']}, {hardware['cores']} cores, bf16: {bf16}; {hardware['device']};"
        f" {hardware['threads']} threads; {versions}\n"
        f"{config.experiment} at scale {config.scale.name}: d_model {model.d_model}, N {model.num_layers},"
        f" d_ff {model.d_ff}, h {model.num_heads}, d_k {model.d_k}, d_v {model.d_v}, {config.data.vocab_size} words;"
        f" sentences of about {config.bench.mean_length:g} tokens, updates of {config.training.tokens_per_update}"
    )


def _rate(tokens: list[int], seconds: list[float]) -> float:
    return statistics.median(count / taken for count, taken in zip(tokens, seconds, strict=True))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "no GPU used"
