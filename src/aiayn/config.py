"""Every knob: name, type, range. `conf/`, `experiments/` and overrides become one dataclass tree, scaled, checked.

YAML owns the values, these dataclasses own the types and the ranges; nothing below a command's first line sees Hydra.
"""

import dataclasses
import difflib
import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

# The paper's order.
ROWS = (
    *("base", "a_h1", "a_h4", "a_h16", "a_h32", "b_dk16", "b_dk32"),
    *("c_n2", "c_n4", "c_n8", "c_dmodel256", "c_dmodel1024", "c_dff1024", "c_dff4096"),
    *("d_dropout00", "d_dropout02", "d_smoothing00", "d_smoothing02", "e_learned_positions", "big"),
)
# Keys of a row that change no result: how often a run is measured and saved, and how it is cut into pieces.
HARMLESS = ("training.checkpoint_every", "training.keep_checkpoints", "training.dev_every", "decoding.tokens_per_batch")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class ConfigError(ValueError):
    """A value that a user can get wrong: one line naming the key, the value and what is allowed."""


def _number(low: float, high: float = math.inf, *, below: float = math.inf) -> Any:
    return field(default=MISSING, metadata={"low": low, "high": high, "below": below})


def _one_of(*choices: str) -> Any:
    return field(default=MISSING, metadata={"choices": choices})


def _name() -> Any:
    return field(default=MISSING, metadata={"name": True})


@dataclass
class Model:
    """Section 3: the sizes of the Transformer."""

    num_layers: int = _number(1, 64)
    d_model: int = _number(2, 65536)
    d_ff: int = _number(1, 262144)
    num_heads: int = _number(1, 1024)
    d_k: int = _number(1, 65536)
    d_v: int = _number(1, 65536)
    dropout: float = _number(0.0, below=1.0)
    learned_positions: bool = MISSING


@dataclass
class Training:
    """Section 5: the one recipe of all rows."""

    max_steps: int = _number(1)
    warmup_steps: int = _number(1)
    tokens_per_update: int = _number(1)
    label_smoothing: float = _number(0.0, below=1.0)
    learning_rate_factor: float = _number(0.0, 1e6)
    adam_beta1: float = _number(0.0, below=1.0)
    adam_beta2: float = _number(0.0, below=1.0)
    adam_epsilon: float = _number(0.0, 1.0)
    dev_every: int = _number(1)
    checkpoint_every: int = _number(1)
    keep_checkpoints: int = _number(1)


@dataclass
class Data:
    """Which parallel text, and how it is cut into pieces."""

    name: str = _name()
    vocab_size: int = _number(8, 1_000_000)
    max_length: int = _number(2, 100_000)
    train_source: str = MISSING
    train_target: str = MISSING
    dev_source: str = MISSING
    dev_target: str = MISSING
    test_source: str = MISSING
    test_target: str = MISSING


@dataclass
class Scale:
    """The dial that multiplies the numbers of every row alike."""

    name: str = _name()
    width: float = _number(1e-6, 1e6)
    layers: float = _number(1e-6, 1e6)
    steps: float = _number(1e-9, 1e6)
    warmup: float = _number(1e-9, 1e6)
    batch: float = _number(1e-9, 1e6)
    learning_rate: float = _number(1e-6, 1e6)


@dataclass
class Hardware:
    """Where a run computes; never what it computes."""

    name: str = _name()
    accelerator: str = _one_of("cpu", "gpu")
    devices: int = _number(1, 1024)
    precision: str = _one_of("32-true", "64-true", "bf16-mixed")
    tokens_per_micro_batch: int = _number(1)
    threads: int = _number(1, 4096)


@dataclass
class Decoding:
    """Section 6.1: the beam search."""

    beam_size: int = _number(1, 1024)
    length_penalty: float = _number(0.0, 10.0)
    max_extra: int = _number(0, 100_000)
    tokens_per_batch: int = _number(1)


@dataclass
class Wandb:
    """Where the curves are shown."""

    mode: str = _one_of("offline", "online", "disabled")
    project: str = MISSING
    entity: str | None = MISSING


@dataclass
class Bench:
    """How long `aiayn bench` measures, and on what."""

    kind: str = _one_of("all", "training", "decoding")
    mean_length: float = _number(1.0, 10_000)
    updates: int = _number(1)
    rounds: int = _number(1)
    output: str = MISSING


@dataclass
class Paper:
    """The row's own figures in Table 3."""

    ppl: float = _number(1.0)
    bleu: float = _number(0.0, 100.0)
    params_millions: int | None = None


@dataclass
class Config:
    """One run, whole."""

    experiment: str = _name()
    seed: int = _number(0, 2**31 - 1)
    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)
    data: Data = field(default_factory=Data)
    scale: Scale = field(default_factory=Scale)
    hardware: Hardware = field(default_factory=Hardware)
    decoding: Decoding = field(default_factory=Decoding)
    wandb: Wandb = field(default_factory=Wandb)
    bench: Bench = field(default_factory=Bench)
    paper: Paper = field(default_factory=Paper)
    output: str = MISSING
    prepared: str = MISSING
    split: str = _one_of("dev", "test")
    average: int = _number(1, 1000)
    format: str = _one_of("terminal", "md", "csv", "latex", "ctranslate2", "safetensors", "marian")


def register() -> None:
    """Makes `experiments/` a Hydra group and `sweeps/` primary configs, without headers in the files."""
    store = ConfigStore.instance()
    for name, row in _read_folder("experiments").items():
        store.store(
            group="experiment", name=name, node={"experiment": name, **row}, package="_global_", provider="aiayn"
        )
    for name, sweep in _read_folder("sweeps").items():
        store.store(name=name, node=sweep, provider="aiayn")


def convert(composed: DictConfig) -> Config:
    """The run that Hydra composed: merged into the schema, scaled, checked.

    Raises ConfigError, one line, for an unknown key, a missing value, a wrong type or a value out of range.
    """
    plain = OmegaConf.to_container(OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"]))
    # In range before scaling too, which makes at least 1 of everything
    return checked(scaled(_in_range(_typed(cast(dict[str, Any], plain)))))


def read(path: Path) -> Config:
    """The run that a `config.yaml` in a run folder describes: scaled already, checked again."""
    return checked(_typed(cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(path)))))


def to_yaml(config: Config) -> str:
    """The text of a run folder's `config.yaml`: `read` gives the same Config back."""
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


def compose_row(*overrides: str) -> Config:
    """The run that these overrides describe, composed without a command line."""
    register()
    if GlobalHydra.instance().is_initialized():
        return convert(compose("config", list(overrides)))
    with initialize_config_module("aiayn.conf", version_base="1.3"):
        return convert(compose("config", list(overrides)))


@cache
def rows() -> dict[str, Config]:
    """The 20 rows at the paper's own scale, in the paper's order."""
    base = compose_row("scale=paper")
    return {name: checked(_row(name, base)) for name in ROWS}


def scaled(config: Config) -> Config:
    """The same row at the size of its `scale`: the only place where a factor meets a value."""
    scale, model, training = config.scale, config.model, config.training

    def times(value: int, factor: float) -> int:
        return max(1, round(value * factor))

    return dataclasses.replace(
        config,
        model=dataclasses.replace(
            model,
            num_layers=times(model.num_layers, scale.layers),
            d_model=times(model.d_model, scale.width),
            d_ff=times(model.d_ff, scale.width),
            d_k=times(model.d_k, scale.width),
            d_v=times(model.d_v, scale.width),
        ),
        training=dataclasses.replace(
            training,
            max_steps=times(training.max_steps, scale.steps),
            warmup_steps=times(training.warmup_steps, scale.warmup),
            tokens_per_update=times(training.tokens_per_update, scale.batch),
            dev_every=times(training.dev_every, scale.steps),
            checkpoint_every=times(training.checkpoint_every, scale.steps),
            learning_rate_factor=training.learning_rate_factor * scale.learning_rate,
        ),
    )


def checked(config: Config) -> Config:
    """The same config, every value inside its range; ConfigError names the first that is not."""
    _in_range(config)
    if config.experiment not in ROWS:
        raise ConfigError(f"experiment={config.experiment!r}: must be one of {', '.join(ROWS)}")
    if config.model.d_model % 2:
        raise ConfigError(
            f"model.d_model={config.model.d_model}: must be even (sinusoids come in pairs); change it or scale.width"
        )
    if config.training.tokens_per_update < config.data.max_length:
        raise ConfigError(
            f"training.tokens_per_update={config.training.tokens_per_update}: must be at least"
            f" data.max_length={config.data.max_length}, so that every sentence fits; change one or scale.batch"
        )
    if config.hardware.tokens_per_micro_batch < config.data.max_length:
        raise ConfigError(
            f"hardware.tokens_per_micro_batch={config.hardware.tokens_per_micro_batch}: must be at least"
            f" data.max_length={config.data.max_length}"
        )
    return config


def run_folder(config: Config) -> Path:
    """`<output>/<data>-<scale>/<row>/seed<n>`; other values than the row's own add a hash: `base+1f2e3d4c`."""
    return sweep_folder(config) / (config.experiment + variation(config)) / f"seed{config.seed}"


def sweep_folder(config: Config) -> Path:
    """`<output>/<data>-<scale>`: where all rows of one table lie."""
    return Path(config.output) / f"{config.data.name}-{config.scale.name}"


def variation(config: Config) -> str:
    """Empty for a row as it stands; otherwise `+` and a hash of what was overridden in model, training or decoding."""
    own = dataclasses.asdict(scaled(_row(config.experiment, config)))
    asked = dataclasses.asdict(config)
    changed = {
        f"{section}.{key}": value
        for section in ("model", "training", "decoding")
        for key, value in asked[section].items()
        if value != own[section][key] and f"{section}.{key}" not in HARMLESS
    }
    return f"+{hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:8]}" if changed else ""


def nearest(key: str) -> str:
    """A hint at the known key that is spelt most like `key`, or where to find them all."""
    known = [name for name, _, _ in _leaves(Config())] + ["experiment", "data", "scale", "hardware"]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    if not close:
        close = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]][:1]
    return f"did you mean {close[0]}?" if close else "`--cfg job` prints every key"


def _typed(plain: dict[str, Any]) -> Config:
    for key, value in _flat(plain):
        if value == "???":
            raise ConfigError(f"{key} has no value: give {key}=...")
    try:
        return cast(Config, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), plain)))
    except OmegaConfBaseException as error:
        key = str(error.full_key or error.key)
        if "not in" in str(error):
            raise ConfigError(f"{key} is not a key of the configuration: {nearest(key)}") from error
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}") from error


def _in_range(config: Config) -> Config:
    for key, value, meta in _leaves(config):
        if "choices" in meta and value not in meta["choices"]:
            raise ConfigError(f"{key}={value!r}: must be one of {', '.join(meta['choices'])}")
        if "name" in meta and not NAME.fullmatch(value):
            raise ConfigError(
                f"{key}={value!r}: must be 1 to 64 letters, digits, '_', '-' or '.', beginning with a letter or digit"
            )
        if "low" in meta and not (meta["low"] <= value <= meta["high"] and value < meta["below"]):
            upper = f"below {meta['below']:g}" if meta["below"] < math.inf else f"at most {meta['high']:g}"
            raise ConfigError(
                f"{key}={value}: must be at least {meta['low']:g}" + (f" and {upper}" if "inf" not in upper else "")
            )
    return config


def _flat(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        found += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return found


def _leaves(part: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    found: list[tuple[str, Any, Any]] = []
    for item in dataclasses.fields(part):
        value = getattr(part, item.name)
        if dataclasses.is_dataclass(value):
            found += _leaves(value, f"{prefix}{item.name}.")
        else:
            found.append((f"{prefix}{item.name}", value, item.metadata))
    return found


def _row(name: str, like: Config) -> Config:
    """The row as `conf/config.yaml` and its own file have it, unscaled; data, scale and hardware as in `like`."""
    merged = OmegaConf.to_container(
        OmegaConf.merge(_read_folder("conf")["config"], {"experiment": name}, _read_folder("experiments")[name])
    )
    rows_own = ("experiment", "model", "training", "decoding", "paper")
    return _typed({**dataclasses.asdict(like), **{key: cast(dict[str, Any], merged)[key] for key in rows_own}})


@cache
def _read_folder(folder: str) -> dict[str, Any]:
    files = sorted(resources.files(f"aiayn.{folder}").iterdir(), key=lambda file: file.name)
    return {
        file.name.removesuffix(".yaml"): OmegaConf.to_container(OmegaConf.create(file.read_text("utf-8")))
        for file in files
        if file.name.endswith(".yaml")
    }
