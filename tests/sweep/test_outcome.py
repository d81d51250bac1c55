"""The outcome of a sweep: each run's line says what its folder holds, and the exit code is that of the worst run."""

from collections.abc import Callable
from typing import Any

import pytest

from aiayn.config import folders
from aiayn.config.schema import Config
from aiayn.core import storage
from aiayn.runs import jobs
from aiayn.sweep.outcome import conclude, line_of


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        (jobs.STORAGE, " seed 1  failed  exit code 5; its own output says why"),
        (jobs.INTERRUPTED, " seed 1  missing  after 0 updates"),
    ],
)
def test_a_run_that_left_nothing_in_its_folder_is_named_with_its_code(code: int, ending: str, toy_run: Config) -> None:
    storage.write_text(folders.run_folder(toy_run) / "config.yaml", "left by an earlier attempt")
    assert line_of(toy_run, code).endswith(ending)


def test_a_failure_is_named_with_its_cause_and_its_log_and_a_result_with_its_figures(
    toy_run: Config, result_of: Callable[[Config], dict[str, Any]]
) -> None:
    folder = folders.run_folder(toy_run)
    storage.write_text(folder / "worker.log", "Traceback")
    jobs.record_failure(folder, jobs.NON_FINITE, "the loss is NaN")
    line = line_of(toy_run, jobs.NON_FINITE)
    assert f" seed 1  failed  the loss is NaN (exit code 3)  (log: {folder / 'worker.log'})" in line
    storage.write_json(folder / "result.json", result_of(toy_run))
    assert " seed 1  finished  PPL 2.00  BLEU 3.0" in line_of(toy_run, jobs.DONE)


@pytest.mark.parametrize(
    ("ended", "code", "said"),
    [
        ([], jobs.DONE, ""),
        ([jobs.DONE, jobs.DONE], jobs.DONE, ""),
        ([jobs.DONE, jobs.STORAGE, jobs.NON_FINITE], jobs.FAILED, "2 of 7 runs failed; repeat the command to try them"),
        ([jobs.FAILED, jobs.INTERRUPTED], jobs.INTERRUPTED, "stopped; repeat the command to go on from here"),
    ],
)
def test_the_exit_code_is_that_of_an_interruption_then_of_a_failure(
    ended: list[int], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert conclude(ended, 7) == code
    assert capsys.readouterr().out.startswith(said)
    assert bool(said) == bool(code)
