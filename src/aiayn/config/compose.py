"""Composes a run: `conf/`, `experiments/` and overrides become one checked, scaled Config; only commands see Hydra."""

import dataclasses
import itertools
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from aiayn.config.checks import checked, in_range
from aiayn.config.schema import ROWS, Config, ConfigError, leaves, nearest, result_affecting, vary

# As text/train.en and news.pt-BR.tok.gz end
_LANGUAGE = re.compile(r"\.(?!gz|xz)([a-z]{2}([-_][A-Za-z]+)?)(\.\w{3,}|(?i:\.gz|\.xz|\.7z))*$")
# How OmegaConf names the kinds of values, and how we do
_KINDS = {"to Integer": "a whole number", "to Float": "a number", "valid bool": "true or false", "to string": "text"}
_STRUCTURE = OmegaConf.structured(Config)


@cache
def register() -> None:
    """Makes `experiments/` a Hydra group and `sweeps/` primary configs, without headers in the files."""
    store = ConfigStore.instance()
    for name, row in read_folder("experiments").items():
        store.store(name, {"experiment": name, **row}, group="experiment", package="_global_", provider="aiayn")
    for name, sweep in read_folder("sweeps").items():
        store.store(name, sweep, provider="aiayn")


def convert(composed: DictConfig) -> Config:
    """The run that Hydra composed: merged into the schema, scaled, checked. ConfigError in one line."""
    own = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
    plain = cast(dict[str, Any], OmegaConf.to_container(own))
    if isinstance(plain.get("data"), dict):
        _complete(plain["data"])
    # In range before scaling too, which makes at least 1 of everything
    typed, given = in_range(_typed(plain)), dict(_flat(plain))
    for key, value, meta in leaves(typed):
        # Hydra reads 2024_11_23 as 20241123
        if isinstance(value, str) and isinstance(given.get(key), bool | int | float):
            raise ConfigError(f"{key}={given[key]}: must be text; quote what looks like a number: {key}=\"'...'\"")
        if "path" in meta and value.startswith("~"):
            home, (section, _, name) = os.path.expanduser(value), key.rpartition(".")
            if home == value:
                raise ConfigError(f"{key}={value}: no such home folder; a folder of that name is {key}=./{value}")
            setattr(getattr(typed, section) if section else typed, name, home)
    run = checked(scaled(typed), typed)
    plain_row = unscaled(run.experiment, run)
    theirs, scaled_to, same = (result_affecting(of) for of in (plain_row, run, scaled(plain_row)))
    for key, given in result_affecting(typed).items():
        if given not in (theirs[key], scaled_to[key]) and scaled_to[key] == same[key]:
            what = f"{same[key]} once scaled, like {run.experiment}'s own {theirs[key]}"
            raise ConfigError(f"{key}={given}, {what}; leave it out, or give a value farther from it")
    return run


def read(path: Path) -> Config:
    """The run that a `config.yaml` in a run folder describes: scaled already. ConfigError if it is none of ours."""
    try:
        text = path.read_text("utf-8-sig")
        # Aliases would let a few lines grow without bound, and no file of ours has any
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise ConfigError("it holds an alias")
        plain = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(text)))
        # Written resolved; what is read here must not look into this process's environment
        if any("${" in str(value) for _, value in _flat(plain)):
            raise ConfigError("it holds an interpolation")
        # What other commands measure and reckon with says nothing of a run; another version may have other keys there
        plain |= {name: dataclasses.asdict(getattr(compose_row(), name)) for name in ("bench", "plan")}
        return checked(_typed(plain))
    except (ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
        cause = " ".join(str(error).split())[:300]
        raise ConfigError(f"{path} is damaged: {cause}; put the file back, or delete that folder") from error


def to_yaml(config: Config) -> str:
    """The text of a run folder's `config.yaml`: `read` gives the same Config back."""
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


@cache
def compose_row(*overrides: str) -> Config:
    """The run that these overrides describe, composed without a command line."""
    register()
    begun = GlobalHydra.instance().is_initialized()
    with nullcontext() if begun else initialize_config_module("aiayn.conf", version_base="1.3"):
        return convert(compose("config", list(overrides)))


@cache
def rows(fidelity: str = "paper", names: tuple[str, ...] = ROWS) -> dict[str, Config]:
    """The 20 rows, or others, at the paper's own scale, in the paper's order."""
    base = compose_row("scale=paper", f"fidelity={fidelity}")
    return {name: checked(unscaled(name, base)) for name in names}


def row(name: str, like: Config) -> Config:
    """The row as it stands, scaled; data, scale, hardware and fidelity as in `like`. ConfigError if it is none."""
    return checked(scaled(unscaled(name, like)))


def scaled(config: Config) -> Config:
    """The same row at the size of its `scale`: the only place where a factor meets a value."""
    scale = config.scale
    # Rows (A) and (B) are about the size of heads, which a scale may leave as it is
    heads = dict.fromkeys(("d_k", "d_v"), scale.head_width)
    sizes = {"num_layers": scale.layers, "d_model": scale.width, "d_ff": scale.width, **heads}
    steps = dict.fromkeys(("max_steps", "dev_every", "checkpoint_every"), scale.steps)
    counts = {"warmup_steps": scale.warmup, "tokens_per_update": scale.batch, **steps}

    def times(part: object, factors: dict[str, float]) -> dict[str, float]:
        values = {key: getattr(part, key) for key in factors}
        return {key: max(min(value, 1), round(value * factors[key])) for key, value in values.items()}

    rate = {"learning_rate_factor": config.training.learning_rate_factor * scale.learning_rate}
    return vary(config, model=times(config.model, sizes), training=times(config.training, counts) | rate)


_BOTH = re.compile(r"(?i)\.(tsv|csv|jsonl|tmx)(?:\.(gz|xz|bz2))?$")
# The pairs of a file `f` in Python, by formats that hold both sides
_PAIRS = {
    "tsv": r'line.split("\t") for line in f',
    "csv": "csv.reader(f)",
    "jsonl": 'd.get("translation", d).values() for d in map(json.loads, f)',
    "tmx": '["".join(s.itertext()) for s in u.iter("seg")] for u in xml.parse(f.buffer).iter("tu")',
}


def _complete(data: dict[str, Any]) -> None:
    """Fills in the files of prefixes, and the languages that files' names end with; or ConfigError with a command."""
    if data.get("train_source") and "train" not in data:
        raise ConfigError(f"data.train_source={data['train_source']}: text of your own needs data=files")
    for split, side in itertools.product(("train", "dev", "test"), ("source", "target")):
        key, spoken = f"{split}_{side}", f"{side}_language"
        prefix, path = str(data.get(split, "")), str(data.get(key))
        if both := _BOTH.search(prefix) or _BOTH.search(path):
            script = (
                "import csv, json, sys, xml.etree.ElementTree as xml; f = sys.stdin; sides ="
                f' open("{split}.source", "w"), open("{split}.target", "w"); [print(*str(text).split(), file=side)'
                f" for pair in ({_PAIRS[both[1].lower()]}) for side, text in zip(sides, pair)]"
            )
            unpacked = {"gz": "zcat", "xz": "xzcat", "bz2": "bzcat"}.get((both[2] or "").lower(), "cat")
            command = f"{unpacked} {shlex.quote(both.string)} | python3 -X utf8 -c '{script}'"
            raise ConfigError(f"{both.string} has both sides; this makes {split}.source and {split}.target: {command}")
        if data.get(spoken) == "???" and (ending := _LANGUAGE.search(path)):
            data[spoken] = ending[1]
    languages = {side: data.get(f"{side}_language") for side in ("source", "target")}
    for split, side in itertools.product(("train", "dev", "test"), ("source", "target")):  # now all languages are known
        key = f"{split}_{side}"
        if (ending := _LANGUAGE.search(str(data.get(key)))) and languages[side] != ending[1] in languages.values():
            raise ConfigError(f"data.{key}={data[key]}: ends in the other side's language; swap or rename the files")
        if data.get(split):
            path = f"{data[split]}.{languages[side]}"
            if data[key] not in ("???", path):
                raise ConfigError(f"data.{key}={data[key]}: data.{split}={data[split]} means {path}; give only one")
            data[key] = path
    if data.get("source_language") == "???" and not any(data.get(split) for split in ("train", "dev", "test")):
        data["source_language"] = "und"  # undetermined, of ISO 639: SentencePiece needs no language


def _typed(plain: dict[str, Any]) -> Config:
    for key, value in _flat(plain):
        if value == "???":
            raise ConfigError(f"{key} has no value: give {key}=...{', such as en or de' * key.endswith('_language')}")
    try:
        return cast(Config, OmegaConf.to_object(OmegaConf.merge(_STRUCTURE, plain)))
    except OmegaConfBaseException as error:
        key = str(error.full_key or error.key)
        if "not in" in str(error):
            raise ConfigError(f"{key} is not a key of the configuration: {nearest(key)}") from error
        given = dict(_flat(plain)).get(key)
        kind = next((name for word, name in _KINDS.items() if word in str(error)), "")
        if "whole" in kind and isinstance(given, float) and given.is_integer() and given < 1e13:  # such as 1e5
            kind += f": {key}={given:.0f}"
        raise ConfigError(
            f"{key}={given}: must be {kind}" if kind else f"{key}: {str(error).splitlines()[0]}"
        ) from error


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        yield from _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]


def unscaled(name: str, like: Config) -> Config:
    """The row as the files have it, unscaled; data, scale and hardware as in `like`, and fidelity by its name."""
    return dataclasses.replace(like, experiment=name, **_own_sections(name, like.fidelity.name))


@cache
def _own_sections(name: str, fidelity: str) -> dict[str, Any]:
    chosen = {"fidelity": read_folder("conf", "fidelity")[fidelity]}
    parts = (read_folder("conf")["config"], chosen, read_folder("experiments")[name])
    whole = cast(DictConfig, OmegaConf.merge(*parts))
    own = ["model", "training", "decoding", "paper", "published", "fidelity"]
    typed = cast(DictConfig, OmegaConf.merge(_STRUCTURE, OmegaConf.masked_copy(whole, own)))
    return {key: OmegaConf.to_object(typed[key]) for key in own}


@cache
def read_folder(folder: str, *below: str) -> dict[str, Any]:
    """What the YAML files of a folder of ours hold, by name: `read_folder("conf", "data")`."""
    files = sorted(Path(str(resources.files(f"aiayn.{folder}")), *below).glob("*.yaml"))
    return {file.stem: OmegaConf.to_container(OmegaConf.load(file)) for file in files}
