"""A sweep whose runs another launcher starts: submitit, Ray."""

from collections.abc import Callable

from aiayn.config import folders
from aiayn.config.schema import Config, ConfigError
from aiayn.core.exit_codes import FAILED
from aiayn.core.storage import StorageError
from aiayn.runs import jobs
from aiayn.sweep.outcome import conclude, line_of


def unfinished(runs: list[Config]) -> list[int]:
    """The numbers of the runs that have no result; of those with one folder, one."""
    numbers = {folders.run_folder(run): number for number, run in enumerate(runs)}.values()
    return [number for number in numbers if not jobs.is_finished(runs[number])]


def hand_over(runs: list[Config], launch: Callable[[list[int]], list[int]]) -> int:
    """Has another launcher begin what is unfinished, and says what became of it. Returns the exit code of the whole."""
    waiting, total = unfinished(runs), len({folders.run_folder(run) for run in runs})
    print(f"{total} runs, {total - len(waiting)} finished before", flush=True)
    begun, lines, ended = [], [], []
    for number in waiting:
        try:
            jobs.check_folder(runs[number])
            begun.append(number)
        except (ConfigError, StorageError, OSError) as error:
            ended.append(FAILED)
            lines.append(f"{folders.name(runs[number])}  failed  {error}")
    codes = launch(begun) if begun else []
    lines += [line_of(runs[number], code) for number, code in zip(begun, codes, strict=True)]
    for number, line in enumerate(lines, total - len(waiting) + 1):
        print(f"[{number}/{total}] {line}")
    return conclude([*ended, *codes], total)
