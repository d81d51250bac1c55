"""The corpora of WMT14: which files on which server, which members of them, and how they come to this machine."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from aiayn.core import progress, storage
from aiayn.data import download
from aiayn.data.download import Remote
from aiayn.data.parallel_text import DataError, Files, Member, Split, Text

EUROPARL = Remote(
    "http://www.statmt.org/wmt13/training-parallel-europarl-v7.tgz",
    657_632_379,
    "0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7",
)
COMMON_CRAWL = Remote(
    "http://www.statmt.org/wmt13/training-parallel-commoncrawl.tgz",
    918_311_367,
    "c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5",
)
NEWS_COMMENTARY = Remote(
    "http://www.statmt.org/wmt14/training-parallel-nc-v9.tgz",
    80_418_416,
    "cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485",
)
UNITED_NATIONS = Remote(
    "http://www.statmt.org/wmt13/training-parallel-un.tgz",
    2_365_634_246,
    "29141b5c1eba149a94f7a59d3b1a834b2e47fe0f8758d68dcd77a3d3f497ee47",
)
GIGA = Remote(
    "http://www.statmt.org/wmt10/training-giga-fren.tar",
    2_595_102_720,
    "3ff8319f6919393520559bfbc7ad6a747ec81b3abc7be9993b338d4b017b4d9a",
)
NEWSTEST = Remote(
    "http://data.statmt.org/wmt19/translation-task/dev.tgz",
    38_654_961,
    "7a7deccf82ebb05ba508dba5eb21356492224e8f630ec4f992132b029b4b25e7",
)

PREPARED_BYTES_PER_PAIR = 150  # of a training pair, about: two sentences of 32 tokens in two bytes each, two offsets


@dataclass(frozen=True)
class Part:
    """Two members of one archive: the sides of a text."""

    archive: Remote
    source: str
    target: str


@dataclass(frozen=True)
class Corpus:
    """A language pair of WMT14; `pairs` is about how many there are, for the estimate of the disk."""

    pairs: int
    train: tuple[Part, ...]
    dev: Part
    test: Part

    @property
    def splits(self) -> dict[Split, tuple[Part, ...]]:
        """The parts of each split."""
        return {"train": self.train, "dev": (self.dev,), "test": (self.test,)}

    @property
    def archives(self) -> tuple[Remote, ...]:
        """What it is read from, each once."""
        return tuple(dict.fromkeys(part.archive for parts in self.splits.values() for part in parts))


CORPORA = {
    "wmt14_en_de": Corpus(
        4_500_000,
        (
            Part(EUROPARL, "training/europarl-v7.de-en.en", "training/europarl-v7.de-en.de"),
            Part(COMMON_CRAWL, "commoncrawl.de-en.en", "commoncrawl.de-en.de"),
            Part(NEWS_COMMENTARY, "training/news-commentary-v9.de-en.en", "training/news-commentary-v9.de-en.de"),
        ),
        dev=Part(NEWSTEST, "dev/newstest2013-src.en.sgm", "dev/newstest2013-ref.de.sgm"),
        test=Part(NEWSTEST, "dev/newstest2014-deen-src.en.sgm", "dev/newstest2014-deen-ref.de.sgm"),
    ),
    # Paper: "the significantly larger WMT 2014 English-French dataset consisting of 36M sentences"; WMT14 lists 40.8 M
    "wmt14_en_fr": Corpus(
        40_800_000,
        (
            Part(EUROPARL, "training/europarl-v7.fr-en.en", "training/europarl-v7.fr-en.fr"),
            Part(COMMON_CRAWL, "commoncrawl.fr-en.en", "commoncrawl.fr-en.fr"),
            Part(UNITED_NATIONS, "un/undoc.2000.fr-en.en", "un/undoc.2000.fr-en.fr"),
            Part(NEWS_COMMENTARY, "training/news-commentary-v9.fr-en.en", "training/news-commentary-v9.fr-en.fr"),
            Part(GIGA, "giga-fren.release2.fixed.en.gz", "giga-fren.release2.fixed.fr.gz"),
        ),
        dev=Part(NEWSTEST, "dev/newstest2013-src.en.sgm", "dev/newstest2013-ref.fr.sgm"),
        test=Part(NEWSTEST, "dev/newstest2014-fren-src.en.sgm", "dev/newstest2014-fren-ref.fr.sgm"),
    ),
}


def identity(corpus: Corpus) -> dict[str, str]:
    """What identifies the corpus before anything is downloaded: archives by SHA-256, members by name."""
    members = {
        f"{split}.{side}": ", ".join(getattr(part, side) for part in parts)
        for split, parts in corpus.splits.items()
        for side in ("source", "target")
    }
    return {remote.name: remote.sha256 for remote in corpus.archives} | members


def missing(corpus: Corpus, folder: Path) -> list[Remote]:
    """The archives that are not in a folder."""
    return [remote for remote in corpus.archives if not (folder / remote.name).is_file()]


def needed(corpus: Corpus, archives: Path, pairs: int) -> tuple[int, int]:
    """Bytes that are still to be downloaded, and about what the first so many pairs, 0: all, will take prepared."""
    to_come = sum(download.missing_bytes(remote, archives) for remote in corpus.archives)
    return to_come, min(corpus.pairs, pairs or corpus.pairs) * PREPARED_BYTES_PER_PAIR


def estimate(corpus: Corpus, archives: Path, prepared: Path, pairs: int) -> str:
    """A sentence on both, and on what is free; StorageError when the disk is too small."""
    to_come, encoded = needed(corpus, archives, pairs)
    free = storage.free_bytes(prepared)
    sizes = f"{decimal(to_come)} to download, about {decimal(encoded)} prepared"
    if free >= to_come + encoded:
        return f"{sizes}; {decimal(free)} are free"
    raise storage.StorageError(
        f"{prepared}: {sizes}, but only {decimal(free)} are free: give prepared=... on a larger disk"
    )


def fetch(corpus: Corpus, downloads: Path, report: Callable[[str], None]) -> None:
    """Every archive, whole, in `downloads`; DataError says what to bring by hand when a server does not give one."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    lock = storage.lock(downloads / ".lock", wait=True, report=report)
    with lock, progress.bars(*columns, TimeRemainingColumn()) as bars:
        for remote in corpus.archives:
            if (downloads / remote.name).exists():
                continue
            to_come = download.missing_bytes(remote, downloads)
            report(f"downloading {remote.url} ({decimal(to_come)} to come of {decimal(remote.size)})")
            bar = bars.add_task(remote.name, total=remote.size, completed=remote.size - to_come)
            try:
                download.fetch(remote, downloads, lambda arrived, bar=bar: bars.update(bar, completed=arrived), report)  # type: ignore[misc]
            except download.Unavailable as error:
                by_hand = f"or bring all {len(corpus.archives)} files into one folder by hand and give it as"
                urls = " ".join(remote.url for remote in corpus.archives)
                raise DataError(f"{error}; {by_hand} data.source=FOLDER: {urls}") from error


def check(archives: Iterable[Remote], folder: Path, report: Callable[[str], None]) -> None:
    """DataError naming an archive in `folder` that is not WMT's."""
    for remote in archives:
        report(f"checking {folder / remote.name}")
        if wrong := download.difference(remote, folder / remote.name):
            raise DataError(f"{folder / remote.name}: {wrong}; replace it by {remote.url}")


def text(corpus: Corpus, folder: Path) -> Text:
    """The splits, in archives that are checked: dev is sacrebleu's wmt13, test its wmt14/full, entities resolved."""
    return {
        split: [
            Files(*(Member(folder / part.archive.name, name) for name in (part.source, part.target))) for part in parts
        ]
        for split, parts in corpus.splits.items()
    }
