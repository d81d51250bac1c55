"""The outcome of a sweep: each run's line says what its folder holds, and the exit code is that of the worst run."""

import pytest

from aiayn.config import folders
from aiayn.core import exit_codes, storage
from aiayn.sweep.outcome import conclude, line_of


def test_a_run_that_left_nothing_is_named_with_its_code(toy_run):
    storage.write_text(folders.run_folder(toy_run) / "config.yaml", "left by an earlier attempt")
    assert line_of(toy_run, exit_codes.STORAGE).endswith(" seed 1  failed  exit code 5; its own output says why")
    assert line_of(toy_run, exit_codes.INTERRUPTED).endswith(" seed 1  missing  after 0 updates")


@pytest.mark.parametrize(
    ("ended", "code", "said"),
    [([], 0, ""), ([0, 5, 3], 1, "2 of 7 runs failed; repeat"), ([1, 75], 75, "stopped; repeat the command")],
)
def test_an_interruption_outweighs_a_failure(ended, code, said, capsys):
    assert conclude(ended, 7) == code
    printed = capsys.readouterr().out
    assert printed.startswith(said) if said else not printed
