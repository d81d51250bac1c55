"""`aiayn prepare`: the corpus that the configuration names, downloaded, verified, cleaned, tokenized and encoded."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from aiayn.config.folders import prepared_folder
from aiayn.config.schema import Config, ConfigError, Data, language
from aiayn.core import progress
from aiayn.data import wmt14
from aiayn.data.dataset import SIDES, Dataset
from aiayn.data.encoding import encode_corpus, refuse_changed, settings_of
from aiayn.data.parallel_text import EMBEDDED, SPLITS, Files, Text, fingerprints


def check(config: Config) -> None:
    """ConfigError for text that is neither there nor to be had, before anything is written.

    DataError for text that is no longer what the corpus was prepared from: a finished run would not look at it.
    """
    data, before = config.data, _in_manifest(config, "settings")
    corpus = downloaded(data)
    identity = fingerprints(sources(data)) if corpus is None else wmt14.identity(corpus)
    if isinstance(before, dict):
        refuse_changed(prepared_folder(config), before, settings_of(identity, **_choices(config)))
    elif corpus and data.source:
        absent = [remote.url for remote in wmt14.missing(corpus, Path(data.source))]
        if absent:
            raise ConfigError(f"data.source={data.source}: lacks {', '.join(absent)}; leave it out to download them")


def sources(data: Data) -> Text:
    """The files of the three splits. ConfigError: one is missing or both sides at once, or `data.source` is given."""
    if data.source:
        raise ConfigError(f"data.source={data.source}: is read only with data={' or data='.join(wmt14.CORPORA)}")
    if data.name in EMBEDDED:
        if data.train_source:
            raise ConfigError(f"data.name={data.name}: is a corpus of this program; give text of your own another name")
        return {split: [files] for split, files in EMBEDDED[data.name].items()}
    paths = {split: [str(getattr(data, f"{split}_{side}")) for side in SIDES] for split in SPLITS}
    for split, sides in paths.items():
        for side, path in zip(SIDES, sides, strict=True):
            if not Path(path).is_file():
                missing = "is a folder, not a file" if path and Path(path).is_dir() else "no such file"
                raise ConfigError(f"data.{split}_{side}={path!r}: {missing}" + "; data=files takes six" * (not path))
        if Path(sides[0]).samefile(sides[1]):
            raise ConfigError(f"data.{split}_target={sides[1]}: is data.{split}_source too; give a file for each side")
    return {split: [Files(*map(Path, sides))] for split, sides in paths.items()}


def prepare(config: Config, report: Callable[[str], None]) -> Dataset:
    """The encoded corpus under its `prepared_folder`; made only once."""
    data = config.data
    corpus = downloaded(data)
    if corpus is None:
        text: Callable[[], Text] = partial(sources, data)
        identity = fingerprints(text())
    else:
        check(config)
        identity, text = wmt14.identity(corpus), partial(_downloaded_text, corpus, config, report)
    return encode_corpus(prepared_folder(config), identity, text, progress=report, **_choices(config))


def _choices(config: Config) -> dict[str, Any]:
    """What `encode_corpus` takes of a configuration."""
    data = config.data
    languages = language(data.source_language), language(data.target_language)
    moses = languages if config.tokenizer == "paper" else None
    return {"vocab_size": data.vocab_size, "max_length": data.max_length, "moses": moses, "scale": config.scale}


def sha256(config: Config) -> str | None:
    """The hash of the prepared corpus as its manifest has it; None where none is prepared."""
    stored = _in_manifest(config, "sha256")
    return None if stored is None else str(stored)


def _in_manifest(config: Config, key: str) -> Any:
    """What the manifest of the prepared corpus has; None where none is prepared, or it is damaged."""
    try:
        return json.loads((prepared_folder(config) / "manifest.json").read_bytes())[key]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def downloaded(data: Data) -> wmt14.Corpus | None:
    """The corpus to be downloaded, or to be read from archives; None for text that is at hand."""
    return None if data.train_source else wmt14.CORPORA.get(data.name)


def archives(config: Config) -> Path:
    """Where the archives of a downloaded corpus are: by default beside the prepared corpora, which share them."""
    return Path(config.data.source or Path(config.prepared) / "downloads")


def _downloaded_text(corpus: wmt14.Corpus, config: Config, report: Callable[[str], None]) -> Text:
    report(f"{config.data.name}: {wmt14.estimate(corpus, archives(config), Path(config.prepared), config.scale.pairs)}")
    if not config.data.source:
        wmt14.fetch(corpus, archives(config), report)
    wmt14.check(corpus.archives, archives(config), report)
    return wmt14.text(corpus, archives(config))


def main(config: Config) -> None:
    """Prepares and prints what was kept, what was dropped and why."""
    with progress.stages("prepare") as report:
        dataset = prepare(config, report)
    print(f"{dataset.folder}: {dataset.tokenizer.vocab_size} subwords, SHA-256 {dataset.sha256}")
    for split, counts in dataset.manifest["splits"].items():
        dropped = ", ".join(f"{count} {reason}" for reason, count in counts["dropped"].items() if count) or "none"
        unseen = f"unseen characters or subwords: {counts['source_unknown']} source, {counts['target_unknown']} target"
        print(f"{split}: {counts['lines']} lines, {counts['kept']} pairs kept, dropped: {dropped}; {unseen}")
