"""A sweep as SLURM jobs: submitit gets the unfinished runs, and SLURM's warning puts a job back into the queue."""

import os
import subprocess
from collections.abc import Callable

from aiayn.config import folders
from aiayn.config.schema import Config, ConfigError
from aiayn.core.exit_codes import FAILED
from aiayn.core.storage import StorageError
from aiayn.runs import jobs
from aiayn.sweep.outcome import conclude, line_of


def hand_over(runs: list[Config], launch: Callable[[list[int]], list[int]]) -> int:
    """Has a launcher begin the unfinished runs, by number, and says what became of them; the exit code of the whole."""
    numbers = {folders.run_folder(run): number for number, run in enumerate(runs)}.values()  # one of each folder
    waiting, total = [number for number in numbers if not jobs.is_finished(runs[number])], len(numbers)
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


def requeue_after(asked: str) -> None:
    """Requeues this SLURM job, whose files are on the disk, if SLURM's warning, SIGUSR1, came to its first task."""
    job = os.environ.get("SLURM_JOB_ID")
    if asked != "SIGUSR1" or not job or os.environ.get("SLURM_PROCID", "0") != "0":
        return
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    failure = ""
    try:
        subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=True)
    except FileNotFoundError:
        failure = "scontrol is not on the PATH"
    except subprocess.CalledProcessError as error:
        failure = " ".join(error.stderr.split())[:200]
    print(f"SLURM job {job} is not requeued: {failure}; submit it again" if failure else f"SLURM job {job} is requeued")
