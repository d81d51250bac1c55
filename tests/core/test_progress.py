"""Long work: bars where somebody watches; in a log, a pipe or a CI plain lines now and then, and few."""

import dataclasses
import re
from types import SimpleNamespace

import pytest

from aiayn.config import compose, folders
from aiayn.core import progress
from aiayn.data import prepare
from aiayn.report import html_report
from aiayn.runs import records
from aiayn.tables import table2, table3
from aiayn.training import train

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f]")


def count(total: int | None = 300):
    with progress.counted("decoding", total, "sentences") as done:
        for _ in range(3):
            done(100)


def test_a_terminal_has_a_bar_that_is_gone_afterwards(terminal):
    screen = terminal()
    count()
    seen = screen.read()
    assert "decoding" in seen
    assert "300/300 sentences" in seen
    assert "\x1b[?25l" in seen  # the cursor, hidden meanwhile
    assert seen.endswith("\x1b[?25h\r\x1b[1A\x1b[2K")


@pytest.mark.parametrize(("name", "value"), [("CI", "true"), ("TERM", "dumb")])
def test_a_terminal_that_nobody_watches_has_no_bar(terminal, monkeypatch, name, value):
    screen = terminal()
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("FORCE_COLOR", "1")
    count()
    assert screen.read() == ""


def test_a_log_has_a_plain_line_now_and_then(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    count()
    assert capsys.readouterr() == ("", "")
    clock = iter([0.0, 16.0, 17.0, 18.0, 20.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: next(clock, 99.0)))
    count()
    lines = [f"decoding: {done} of 300 sentences\n" for done in (100, 300)]
    assert capsys.readouterr() == ("", "".join(lines))
    count(total=None)
    assert capsys.readouterr().err.startswith("decoding: 100 sentences\n")


def test_of_a_stage_the_first_and_the_last_message_are_printed(capsys):
    with progress.stages("prepare") as report:
        for message in ("training", *(f"train: {n} pairs encoded" for n in range(2, 19)), "dev: 3 pairs"):
            report(message)
    said = ["training", "train: 2 pairs encoded", "train: 18 pairs encoded", "dev: 3 pairs"]
    assert capsys.readouterr() == ("".join(f"prepare: {line}\n" for line in said), "")


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("command", ["prepare", "evaluate", "report", "train"])
@pytest.mark.parametrize("where", ["terminal", "log"])
def test_long_commands_show_bars_on_a_terminal_alone(finished, toy_run, tmp_path, capsys, terminal, command, where):
    run = compose.compose_row(*finished)
    table = table3.table(run, records.read_runs(folders.sweep_folder(run)))
    fresh = dataclasses.replace(run, prepared=str(tmp_path / "prepared"))
    shown, work = {
        "prepare": ("prepare: training a vocabulary of 25 subwords", lambda: prepare.main(fresh)),
        "evaluate": ("decoding dev", lambda: table2.main(run)),
        "report": ("reading curves", lambda: html_report.sections(run, [], table, None)),
        "train": ("base: decoding", lambda: train.train(toy_run, tmp_path / "run")),
    }[command]
    screen = terminal() if where == "terminal" else None
    work()
    printed = capsys.readouterr()
    assert not CONTROL.search(printed.out + printed.err)
    assert len(printed.out.splitlines()) < 20
    assert shown in screen.read() if screen else printed.err == ""
