"""Long work: bars where somebody watches; in a log, a pipe or a CI plain lines now and then, and few."""

import io
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from aiayn.config import compose
from aiayn.core import progress
from aiayn.data import prepare
from aiayn.evaluation import translate
from aiayn.report import html_report
from aiayn.tables import table2
from aiayn.training import train

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f]")


def count(what: str = "decoding", total: int | None = 300) -> None:
    with progress.counted(what, total, "sentences") as done:
        for _ in range(3):
            done(100)


def test_a_terminal_has_a_bar_that_is_gone_afterwards(terminal: Any) -> None:
    screen = terminal()
    count()
    seen = screen.read()
    assert "decoding" in seen
    assert "300/300 sentences" in seen
    assert "\x1b[?25l" in seen  # the cursor, hidden meanwhile
    assert seen.endswith("\x1b[?25h\r\x1b[1A\x1b[2K")


@pytest.mark.parametrize(("name", "value"), [("CI", "true"), ("TERM", "dumb")])
def test_a_terminal_that_nobody_watches_has_no_bar(terminal: Any, monkeypatch: pytest.MonkeyPatch, name, value) -> None:
    screen = terminal()
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("FORCE_COLOR", "1")
    count()
    assert screen.read() == ""


def test_a_log_has_a_plain_line_now_and_then_and_none_of_what_is_quick(monkeypatch, capsys) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    count()
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(progress, "LOG_SECONDS", -1.0)
    count()
    lines = [f"decoding: {done} of 300 sentences\n" for done in (100, 200, 300)]
    assert capsys.readouterr() == ("", "".join(lines))
    count(total=None)
    assert capsys.readouterr().err.startswith("decoding: 100 sentences\n")


def test_of_a_stage_the_first_and_the_last_message_are_printed(capsys) -> None:
    with progress.stages("prepare") as report:
        for message in (
            "training a 37-subword vocabulary",
            *(f"train: {n} pairs encoded" for n in range(2, 19)),
            "dev: 3 pairs",
        ):
            report(message)
    said = ["training a 37-subword vocabulary", "train: 2 pairs encoded", "train: 18 pairs encoded", "dev: 3 pairs"]
    assert capsys.readouterr() == ("".join(f"prepare: {line}\n" for line in said), "")


def test_what_is_printed_goes_into_the_pipe_though_bars_are_shown(terminal: Any, capsys) -> None:
    screen = terminal()
    with progress.stages("prepare") as report, progress.counted("inside", 3, "lines") as done:
        report("to be kept")
        done(3)
    assert capsys.readouterr().out == "prepare: to be kept\n"
    seen = screen.read()
    assert "inside" in seen
    assert "prepare: to be kept" in seen  # beside the clock


@pytest.fixture
def run(finished: list[str]) -> compose.Config:
    return compose.compose_row(*finished)


def commands(run: compose.Config, folder: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, Any]]:
    """What each command that may take long shows, and the command."""
    pipe = SimpleNamespace(buffer=io.BytesIO(), isatty=lambda: False, write=str, flush=str)

    def translated() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", pipe)
            translate.main(run, io.BytesIO(b"1 2 3\n4 5\n"))

    fresh = compose.dataclasses.replace(run, prepared=str(folder))
    return {
        "prepare": ("prepare: training a 25-subword vocabulary", lambda: prepare.main(fresh)),
        "evaluate": ("decoding dev", lambda: table2.main(run)),
        "translate": ("translating", translated),
        "report": ("reading curves", lambda: html_report.collect(run)),
    }


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("command", ["prepare", "evaluate", "translate", "report", "train"])
@pytest.mark.parametrize("where", ["terminal", "log"])
def test_every_long_command_shows_a_bar_on_a_terminal_alone(
    run, toy_run, tmp_path, monkeypatch, capsys, terminal, command, where
) -> None:
    screen = terminal() if where == "terminal" else None
    known = commands(run, tmp_path / "prepared", monkeypatch)
    known["train"] = ("base: decoding", lambda: train.train(toy_run, tmp_path / "run"))
    shown, work = known[command]
    work()
    printed = capsys.readouterr()
    assert not CONTROL.search(printed.out + printed.err)
    assert len(printed.out.splitlines()) < 20
    if screen is not None:
        assert shown in screen.read()
    else:
        assert printed.err == ""
