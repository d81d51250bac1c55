"""`aiayn prepare`: the corpus that the configuration names, cleaned, cut into pieces and encoded."""

from collections.abc import Callable
from pathlib import Path

from aiayn.corpus import EMBEDDED, Files, fingerprints
from aiayn.dataset import SPLITS, Dataset, Origin
from aiayn.dataset import prepare as prepare_dataset
from aiayn.schema import Config, ConfigError, Data


def sources(data: Data) -> dict[str, Files]:
    """The files of the three splits. ConfigError names a missing one, or a corpus that cannot be had yet."""
    if data.name.startswith("wmt14") and not data.train_source:
        raise ConfigError(
            f"data={data.name}: its download is not written yet; give the text yourself: data=files"
            " data.train_source=... data.train_target=... data.dev_source=... and so on"
        )
    if not data.train_source and data.name == "tiny":
        return dict(EMBEDDED)
    for key in (f"{split}_{side}" for split in ("train", "dev", "test") for side in ("source", "target")):
        path = getattr(data, key)
        if not path or not Path(path).is_file():
            raise ConfigError(f"data.{key}={path!r}: no such file")
    return {
        split: Files(Path(getattr(data, f"{split}_source")), Path(getattr(data, f"{split}_target")))
        for split in ("train", "dev", "test")
    }


def prepare(config: Config, progress: Callable[[str], None]) -> Dataset:
    """The encoded corpus under `<prepared>/<data>`; nothing to do when it is there already."""
    data = config.data
    files = sources(data)
    text = {split: [files[split]] for split in SPLITS}
    return prepare_dataset(
        Path(config.prepared) / data.name,
        Origin(fingerprints(text), lambda: text),
        vocab_size=data.vocab_size,
        max_length=data.max_length,
        progress=progress,
    )


def main(config: Config) -> None:
    """Prepares and prints what was kept, what was dropped and why."""
    dataset = prepare(config, lambda message: print(f"prepare: {message}", flush=True))
    print(f"{dataset.folder}: {dataset.tokenizer.vocab_size} pieces, SHA-256 {dataset.sha256}")
    for split, counts in dataset.manifest["splits"].items():
        dropped = ", ".join(f"{count} {reason}" for reason, count in counts["dropped"].items() if count) or "none"
        unseen = f"unseen characters: {counts['source_unknown']} source, {counts['target_unknown']} target"
        print(f"{split}: {counts['lines']} lines, {counts['kept']} pairs kept, dropped: {dropped}; {unseen}")
