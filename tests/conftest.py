"""One thread a test, a toy corpus, and the command line as a user runs it."""

import copy
import dataclasses
import io
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

# Two test processes share two cores; set before torch is imported, here and in every worker that a test starts.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", WANDB_SILENT="true")

# No test asks for the network, nor does a process that it starts.
sys.path.append(str(Path(__file__).with_name("children")))
os.environ.update(PYTHONPATH=os.pathsep.join([sys.path[-1], os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))

import hypothesis
import offline  # noqa: F401
import pytest
import torch

from aiayn.config import compose, folders
from aiayn.core.signals import StopFlag

torch.set_num_threads(1)
# A busy machine is no fault
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides for a corpus of digit strings and the same digits in reverse: 4001 / 41 / 43 pairs."""
    folder = tmp_path_factory.mktemp("digits")
    draw = random.Random(7)
    overrides = ["data=files", "data.name=digits", "data.vocab_size=25", "data.max_length=12", f"prepared={folder}"]
    overrides += ["data.source_language=en", "data.target_language=de"]
    overrides += ["scale.max_words=0", "scale.pairs=0"]  # whatever scale a test takes
    for split, count in (("train", 4001), ("dev", 41), ("test", 43)):
        lines = [[draw.choice("0123456789") for _ in range(draw.randint(1, 7))] for _ in range(count)]
        for side, step in (("source", 1), ("target", -1)):
            path = folder / f"{split}.{side}"
            path.write_text("".join(" ".join(line[::step]) + "\n" for line in lines))
            overrides.append(f"data.{split}_{side}={path}")
    return overrides


TINY = (
    *("scale=paper", "model.num_layers=1", "model.d_model=16", "model.d_ff=32", "model.num_heads=2", "model.d_k=3"),
    *("model.d_v=5", "wandb.mode=disabled"),
)
TOY = (
    *TINY,
    *("training.max_steps=6", "training.warmup_steps=4", "training.tokens_per_update=64"),
    *("training.checkpoint_every=1", "training.dev_every=2", "hardware.tokens_per_micro_batch=40"),
)


@pytest.fixture
def toy(digits: list[str], tmp_path: Path) -> list[str]:
    """Overrides for a run of 6 updates that takes a second: the digits, a tiny model, its own output folder."""
    return [*digits, *TOY, f"output={tmp_path}/runs"]


@pytest.fixture(scope="session")
def composed_toy(digits: list[str]) -> compose.Config:
    return compose.compose_row(*digits, *TOY)


@pytest.fixture
def toy_run(composed_toy: compose.Config, tmp_path: Path) -> compose.Config:
    """The same as a Config, composed once for all tests: Hydra takes longer than many a test."""
    return dataclasses.replace(copy.deepcopy(composed_toy), output=f"{tmp_path}/runs")


@pytest.fixture(scope="session")
def aiayn_in() -> Command:
    """Runs a command in the folder given first, for fixtures that outlive a test."""

    def run(folder: Path, *arguments: str, code: int = 0, text: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "aiayn", *arguments]
        done = subprocess.run(command, cwd=folder, input=text, capture_output=True, text=True, check=False)
        assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture
def aiayn(aiayn_in: Command, tmp_path: Path) -> Command:
    """Runs a command in an empty folder, as a user would, and returns what it printed."""
    return partial(aiayn_in, tmp_path)


@pytest.fixture
def signals() -> Iterator[None]:
    """The signal handlers as they were: a run leaves its own."""
    with StopFlag():
        yield


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Where `run_results.put` leaves made-up runs, as a sweep of `mini` would."""
    return tmp_path / "runs" / "tiny-mini"


@pytest.fixture(scope="session")
def finished(digits: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides of a run of 300 updates that is trained already and kept three checkpoints; write nothing into it."""
    from trained_runs import trained

    words = ("training.max_steps=300", "training.warmup_steps=60", "training.tokens_per_update=256")
    words += ("training.checkpoint_every=100", "training.dev_every=300")
    overrides = [*digits, *TINY, *words, f"output={tmp_path_factory.mktemp('finished')}/runs"]
    run = compose.compose_row(*overrides)
    with StopFlag():
        trained(run, folders.run_folder(run))
    return overrides


class Terminal(io.StringIO):
    """A terminal, as far as a program can ask, and what it shows."""

    def isatty(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> str:
        """All that was written, without its colours."""
        return re.sub(r"\x1b\[[\d;]*m", "", self.getvalue())


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Terminal]]:
    """Makes standard error a terminal, as where somebody watches; to be called in the test, since pytest takes it."""
    from aiayn.core import progress

    def make() -> Terminal:
        for name, value in (("TERM", "xterm"), ("CI", ""), ("COLUMNS", "120")):
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("FORCE_COLOR", raising=False)
        progress._console.cache_clear()
        screen = Terminal()
        monkeypatch.setattr(sys, "stderr", screen)
        return screen

    yield make
    progress._console.cache_clear()


class Server(ThreadingHTTPServer):
    """A web server of this machine: `files` by name, and for the next requests `faults`, one each, in place of them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files: dict[str, bytes] = {}
        self.faults: list[Callable[[Answer, bytes], None] | None] = []
        self.asked: list[tuple[str, str | None]] = []  # the name and the range of each request

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class Answer(BaseHTTPRequestHandler):
    """One request: the file, or what is left of it."""

    server: Server

    def do_GET(self) -> None:
        name, wanted = self.path.rpartition("/")[2], self.headers["Range"]
        self.server.asked.append((name, wanted))
        content = self.server.files[name]
        fault = self.server.faults.pop(0) if self.server.faults else None
        (fault or Answer.whole)(self, content)

    def whole(self, content: bytes) -> None:
        start = int((self.headers["Range"] or "bytes=0-")[6:-1])
        if start:
            total = len(content)
            self.start(206, total - start, ("Content-Range", f"bytes {start}-{total - 1}/{total}"))
        else:
            self.start(200, len(content))
        self.wfile.write(content[start:])

    def start(self, status: int, length: int, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for key, value in (("Content-Length", str(length)), *headers):
            self.send_header(key, value)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    """A web server that is gone after the test."""
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()
