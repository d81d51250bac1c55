"""What the values of a run have to satisfy, each alone and together."""

import math
import re
from pathlib import Path

from aiayn.config.schema import BEYOND, HEAD_WIDTH, NAME, ROWS, Config, ConfigError, Model, leaves

_OF_TRANSFORMER = ("d_ff", "num_heads", "d_k", "d_v")


def checked(config: Config) -> Config:
    """The same config, every value inside its range; ConfigError names the first that is not."""
    in_range(config)
    if config.experiment not in ROWS + BEYOND:
        raise ConfigError(
            f"experiment={config.experiment!r}: must be one of {', '.join(ROWS + BEYOND)} (docs/developing.md says how"
            " to add a row)"
        )
    _parts_suit(config.model)
    if config.model.d_model % 2:
        raise ConfigError(
            f"model.d_model={config.model.d_model}: must be even (sinusoids come in pairs, an LSTM's encoder has two"
            " directions); change it or scale.width"
        )
    fidelity = config.fidelity
    ways = {"sinusoids": "alternating", "target_space": False, "zero_start": False}
    other = [key for key, paper in ways.items() if getattr(fidelity, key) != paper]
    if config.model.kind != "transformer" and other:
        raise ConfigError(
            f"fidelity.{other[0]}={getattr(fidelity, other[0])}: applies to the Transformer only; with"
            f" model.kind={config.model.kind} use fidelity=paper"
        )
    if 0 < fidelity.embedding_rows < config.data.vocab_size:
        raise ConfigError(
            f"fidelity.embedding_rows={fidelity.embedding_rows}: must be at least"
            f" data.vocab_size={config.data.vocab_size}, or 0 for as many rows as subwords"
        )
    unread = [key for key, value in vars(config.data).items() if re.match("(train|dev|test)_", key) and value]
    if unread and not config.data.train_source:
        raise ConfigError(
            f"data.{unread[0]}={getattr(config.data, unread[0])}: is read only with data.train_source;"
            " give all six files (data=files)"
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
    if config.hardware.compile and config.hardware.accelerator == "cpu":
        raise ConfigError("hardware.compile=true: must be false on a CPU, whose own way torch cannot compile")
    if config.decoding.compile and not config.model.in_table3:
        raise ConfigError("decoding.compile=true: only the parts of Table 3 can be compiled; use false")
    if config.decoding.precision != "full" and config.hardware.precision == "64-true":
        raise ConfigError(
            f"decoding.precision={config.decoding.precision}: must be full with hardware.precision=64-true"
        )
    if config.decoding.compile and config.hardware.accelerator == "gpu":
        raise ConfigError("decoding.compile=true: is for a CPU; on a GPU use false")
    if config.decoding.compile and (config.decoding.precision == "bf16" or config.hardware.precision == "64-true"):
        raise ConfigError("decoding.compile=true: is for 32 bits; with decoding.precision=bf16 or 64-true use false")
    if config.bench.d_model % HEAD_WIDTH:
        raise ConfigError(
            f"bench.d_model={config.bench.d_model}: must be a multiple of {HEAD_WIDTH}, the width of a head"
        )
    if Path(config.bench.output).suffix == ".md" or not config.bench.output:
        raise ConfigError(
            f"bench.output={config.bench.output!r}: must name a .json file; the tables are written to .md beside it"
        )
    if config.bench.neighbourhood % 2 == 0:
        raise ConfigError(
            f"bench.neighbourhood={config.bench.neighbourhood}: must be odd, a token and as many before it as after it"
        )
    return config


def in_range(config: Config) -> Config:
    """The same config when every value stands in its own range, whatever the others are; otherwise ConfigError."""
    for key, value, meta in leaves(config):
        if "choices" in meta and value not in meta["choices"]:
            raise ConfigError(f"{key}={value!r}: must be one of {', '.join(meta['choices'])}")
        if "name" in meta and not NAME.fullmatch(value):
            raise ConfigError(
                f"{key}={value!r}: must be 1 to 64 letters, digits, '_', '-' or '.', beginning with a letter or digit"
            )
        if "low" in meta and value is not None and not (meta["low"] <= value <= meta["high"] and value < meta["below"]):
            upper = f"below {meta['below']:g}" if meta["below"] < math.inf else f"at most {meta['high']:.10g}"
            raise ConfigError(
                f"{key}={value}: must be at least {meta['low']:g}" + (f" and {upper}" if "inf" not in upper else "")
            )
    return config


def _parts_suit(model: Model) -> None:
    """ConfigError names the first part that the others leave no room for."""
    if model.kind != "transformer":
        only: dict[str, str | int] = {"positions": "none", "scores": "dot", "residual": "none"}
        only |= dict.fromkeys(_OF_TRANSFORMER, 0)
        wrong = [key for key, value in only.items() if getattr(model, key) != value]
        if wrong:
            named = ", ".join(f"model.{key}={getattr(model, key)}" for key in wrong)
            suited = " ".join(f"model.{key}={only[key]}" for key in wrong)
            raise ConfigError(
                f"{named}: not for model.kind={model.kind};"
                f" use {suited}, or experiment=s_{model.kind}, which sets them all"
            )
    for key in _OF_TRANSFORMER if model.kind == "transformer" else ():
        if getattr(model, key) == 0:
            raise ConfigError(f"model.{key}=0: must be at least 1 with model.kind=transformer")
    if model.positions == "relative" and model.scores != "scaled":
        raise ConfigError(
            f"model.scores={model.scores}: model.positions=relative adds to scaled dot products; use scaled"
        )
    if model.residual == "positions" and model.positions not in ("sinusoids", "learned"):
        raise ConfigError(
            f"model.residual=positions: model.positions={model.positions} has no encoding to add to the input of a"
            " layer; use model.positions=sinusoids or learned"
        )
