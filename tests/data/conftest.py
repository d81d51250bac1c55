"""The text of a small corpus, and the corpus prepared."""

import shutil
from pathlib import Path

import pytest

from aiayn.data.dataset import Dataset
from tests.data.small_corpus import prepare_here


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    words = ["low", "lower", "new", "newest", "wide", "wider"]
    for split, count in (("train", 97), ("dev", 13), ("test", 11)):
        rows = [[words[(i * k) % 6] for k in range(1, 2 + i % 5)] for i in range(count)]
        (folder / f"{split}.en").write_text("".join(" ".join(row) + "\n" for row in rows))
        (folder / f"{split}.de").write_text("".join(" ".join(reversed(row)) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, text) -> Dataset:
    return prepare_here(tmp_path_factory.mktemp("prepared") / "small", text)


@pytest.fixture
def copy(prepared, tmp_path) -> Path:
    return Path(shutil.copytree(prepared.folder, tmp_path / "small"))
