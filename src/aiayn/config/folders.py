"""Where the files of a run, of a table and of a corpus lie: their names follow from the result-affecting keys."""

import hashlib
import json
from pathlib import Path
from typing import Any

from aiayn.config.compose import scaled, unscaled
from aiayn.config.schema import Config, result_affecting, vary

# How a folder and a table name the precision of their runs.
PRECISIONS = {"32-true": "", "64-true": ".fp64", "bf16-mixed": ".bf16"}


def run_folder(config: Config) -> Path:
    """`<output>/<data>-<scale>/<row>/seed<n>`; other values than the row's own add a hash: `base+1f2e3d4c`."""
    return sweep_folder(config) / (config.experiment + variation(config)) / f"seed{config.seed}"


def sweep_folder(config: Config) -> Path:
    """`<output>/<data>-<scale>`, its data with all of `setting`: where all rows of one table lie."""
    return Path(config.output) / f"{setting(config)}-{config.scale.name}"


def other_runs(config: Config) -> str:
    """How to ask for runs in another precision, or else which other folders have runs; empty when none have."""
    others = (vary(config, hardware={"precision": other}) for other in PRECISIONS if other != config.hardware.precision)
    found = [f"hardware.precision={run.hardware.precision}" for run in others if sweep_folder(run).exists()]
    if not found:
        folders = {path.parent.parent for path in Path(config.output).glob("*/*/seed*")} - {sweep_folder(config)}
        return f"; there are runs in {', '.join(sorted(map(str, folders)))}" if folders else ""
    return f"; there are runs with {' and '.join(found)}"


def corpus_name(config: Config) -> str:
    """`data.name`, and the tokenizer behind it where it is the paper's: perplexities of two are never in one table."""
    return config.data.name + (".paper" if config.tokenizer == "paper" else "")


def prepared_folder(config: Config) -> Path:
    """`<prepared>/<data>`, with its vocabulary and the scale's selection behind it: `tiny-1000subwords-7words`."""
    scale, subwords = config.scale, config.data.vocab_size * (config.tokenizer != "paper")
    limits = {"subwords": subwords, "words": scale.max_words, "trainwords": scale.max_train_words, "pairs": scale.pairs}
    selected = "".join(f"-{count}{what}" for what, count in limits.items() if count)
    return Path(config.prepared) / f"{corpus_name(config)}{selected}"


def setting(config: Config) -> str:
    """The corpus's name; behind it fidelity and precision, where they are not the paper's and 32 bits: other tables."""
    fidelity = "" if config.fidelity.name == "paper" else f".{config.fidelity.name}"
    return corpus_name(config) + fidelity + PRECISIONS[config.hardware.precision]


def variation(config: Config) -> str:
    """Empty for a row as it stands; otherwise `+` and a hash of its own model, training, decoding or fidelity."""
    changed = differences(config)
    return f"+{hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:8]}" if changed else ""


def differences(config: Config) -> dict[str, Any]:
    """The result-affecting keys that differ from the row's, with their values after scaling."""
    own = result_affecting(scaled(unscaled(config.experiment, config)))
    return {key: value for key, value in result_affecting(config).items() if value != own[key]}


def label(config: Config) -> str:
    """A run as messages name it, but for its seed: `base+29b01223 (model.num_heads=32)`."""
    changed = ", ".join(f"{key}={value}" for key, value in differences(config).items())
    return config.experiment + variation(config) + (f" ({changed})" if changed else "")


def name(config: Config) -> str:
    """The same with its seed."""
    return f"{label(config)} seed {config.seed}"
