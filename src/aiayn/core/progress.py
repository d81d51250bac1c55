"""Progress of long work: a bar on a terminal, a line every 15 seconds in a log, nothing for what is quick."""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TextIO

from rich import progress as ui
from rich.console import Console

LOG_SECONDS = 15.0


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream is a terminal that can move its cursor, and none that a CI has only lent."""
    return stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("CI")


def bars(*columns: ui.ProgressColumn) -> ui.Progress:
    """Bars on standard error, gone when done; silent where that is no terminal."""
    shown = is_terminal(sys.stderr)
    # What is printed meanwhile must appear above the bars, but what goes into a file or a pipe must go there
    above = shown and sys.stdout.isatty()
    return ui.Progress(*columns, console=_console(), disable=not shown, transient=True, redirect_stdout=above)


@contextmanager
def counted(what: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
    """A function to call with how many more are done; `total` is None where it is unknown."""
    columns = ui.TextColumn("{task.description}"), ui.BarColumn(), ui.MofNCompleteColumn(), ui.TextColumn(unit)
    with bars(*columns, ui.TimeRemainingColumn()) as progress:
        bar = progress.add_task(what, total=total)
        done, began = 0, time.perf_counter()
        logged = began

        def report(more: int) -> None:
            nonlocal done, logged
            done, now = done + more, time.perf_counter()
            progress.advance(bar, more)
            if progress.disable and (now - logged > LOG_SECONDS or (done == total and logged > began)):
                logged = now
                print(f"{what}: {done}{'' if total is None else f' of {total}'} {unit}", file=sys.stderr, flush=True)

        yield report


def tracked(items: Sequence[Any], what: str) -> Iterator[Any]:
    """The items, and how many of them are done."""
    with counted(what, len(items), "done") as done:
        for item in items:
            yield item
            done(1)


@contextmanager
def stages(name: str) -> Iterator[Callable[[str], None]]:
    """A function that prints what a long work is at: of messages that differ only in numbers the first and the last."""
    with bars(ui.SpinnerColumn(), ui.TextColumn("{task.description}"), ui.TimeElapsedColumn()) as progress:
        clock = progress.add_task(name, total=None)
        stage, waiting, printed = "", "", 0.0

        def report(message: str) -> None:
            nonlocal stage, waiting
            before, stage = stage, re.sub(r"\d+", "", message)
            if stage != before:
                say()
                progress.reset(clock)
            waiting = f"{name}: {message}"
            progress.update(clock, description=waiting)
            if stage != before or time.perf_counter() - printed > LOG_SECONDS:
                say()

        def say() -> None:
            nonlocal waiting, printed
            if waiting:
                print(waiting, flush=True)
            waiting, printed = "", time.perf_counter()

        try:
            yield report
        finally:
            say()


@cache
def _console() -> Console:
    """One for all bars: those of a part appear below those of the whole."""
    return Console(stderr=True)
