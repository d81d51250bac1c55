"""The outcome of the runs of a sweep: a line for each, and the exit code of the whole."""

from aiayn.config import folders
from aiayn.config.schema import Config
from aiayn.core.exit_codes import DONE, FAILED, INTERRUPTED
from aiayn.runs import records


def line_of(run: Config, code: int) -> str:
    """What became of a run that has ended with this code, in one line."""
    record = records.read_run(folders.run_folder(run))
    if record is None or (code not in (DONE, INTERRUPTED) and record.status != "failed"):
        return f"{folders.name(run)}  failed  exit code {code}; its own output says why"
    return f"{records.row_line(run, record)}{f'  (log: {record.log})' if record.log else ''}"


def conclude(ended: list[int], total: int) -> int:
    """The exit code of a sweep whose runs have ended with these; says how to go on."""
    failed = sum(code != DONE for code in ended)
    if INTERRUPTED in ended:
        print("stopped; repeat the command to go on from here")
    elif failed:
        print(f"{failed} of {total} runs failed; repeat the command to try them again")
    return INTERRUPTED if INTERRUPTED in ended else FAILED if failed else DONE
