"""A worker process, one a device: `python -m aiayn.training.worker <run folder>`.

It is bound to its parent before anything slow. torchrun may start one too, with the words of `aiayn train`.
"""

import contextlib
import faulthandler
import multiprocessing.util
import os
import sys
from pathlib import Path
from typing import NoReturn

from aiayn.config.schema import Config
from aiayn.core import exit_codes, signals, storage


def main(folder: Path) -> int:
    """Trains the run of a folder and returns the exit code."""
    signals.die_with_parent()
    faulthandler.enable()  # a worker that crashes or is aborted leaves in its log where it was
    with signals.interrupting(), signals.reported():
        storage.open_standard_streams()
        from aiayn.training import train  # takes seconds

        return train.main(folder)


def as_rank(run: Config) -> int:
    """Trains as one of torchrun's ranks, which were all given the same words; returns the exit code."""
    from aiayn.config import folders
    from aiayn.runs import devices, jobs, records
    from aiayn.training import train

    if "TORCHELASTIC_RUN_ID" in os.environ:  # else the parent may be a shell that is left
        signals.die_with_parent(os.getppid())
    jobs.check(run)
    devices.names(run.hardware)
    folder = folders.run_folder(run)
    if jobs.says_finished(run):
        return exit_codes.DONE
    # torchrun stops all ranks once it sees that one has ended: training heeds that, the line that says why does not
    with signals.StopFlag(), jobs.claim(run) if os.environ["RANK"] == "0" else contextlib.nullcontext():
        if os.environ["RANK"] == "0":
            jobs.check_folder(run)  # until it was claimed another command may have begun another run there
            if jobs.is_finished(run):  # the other ranks do not know, and would wait for this one
                raise storage.InUse(f"{folder}: another command has just finished it; nothing is left to do")
            jobs.begin(run, folder)
        code = train.main(folder, run)
        known = (folder / records.FAILURE).exists()  # which a full disk may have no room for
        if code not in (exit_codes.DONE, exit_codes.INTERRUPTED) and known and os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"aiayn: {records.read_json(folder / records.FAILURE)['cause']}", file=sys.stderr)
    return code


def leave(code: int) -> NoReturn:
    """Ends this process at once: W&B's own cleaning up at exit would wait for a service that may never answer."""
    sys.stdout.flush()
    sys.stderr.flush()
    # Frees the semaphores of a pool that a signal has ended: the end below leaves them, and a warning would name them
    multiprocessing.util._run_finalizers()  # type: ignore[attr-defined]
    os._exit(code)


if __name__ == "__main__":
    leave(main(Path(sys.argv[1])))
