"""A corpus of 97, 13 and 11 pairs, prepared with a small vocabulary; and archives."""

import io
import tarfile
from pathlib import Path
from typing import Any

from aiayn.config.schema import Scale
from aiayn.data.dataset import Dataset
from aiayn.data.encoding import encode_corpus
from aiayn.data.parallel_text import SPLITS, Files, fingerprints

MAX_LENGTH = 23


def selecting(max_words: int = 0, pairs: int = 0) -> Scale:
    return Scale(max_words=max_words, pairs=pairs, max_train_words=0)


def prepare_here(folder: Path, text: Path, **changed: Any) -> Dataset:
    splits = {split: [Files(text / f"{split}.en", text / f"{split}.de")] for split in SPLITS}
    settings = {"vocab_size": 41, "max_length": MAX_LENGTH, "progress": lambda message: None}
    settings |= {"moses": None, "scale": selecting()} | changed
    return encode_corpus(folder, fingerprints(splits), lambda: splits, **settings)


def packed(path: Path, members: dict[str, bytes]) -> Path:
    """An archive of files and of one link."""
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w:gz" if path.suffix == ".tgz" else "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return path
