"""One run on this terminal: `aiayn train` without a sweep, and each task of another launcher."""

import os
import sys
import time
from functools import partial

from aiayn.config.schema import Config
from aiayn.core import signals
from aiayn.core.exit_codes import DONE, INTERRUPTED
from aiayn.runs import devices, jobs, records
from aiayn.sweep import slurm
from aiayn.training import worker


def main(run: Config) -> None:
    """Trains one run, as one of torchrun's ranks or with workers of its own, and exits with its code."""
    if "RANK" in os.environ:
        worker.leave(worker.as_rank(run))
    sys.exit(run_here(run))


def run_here(run: Config) -> int:
    """Trains one run on this terminal and returns its exit code; signals are handed on to the workers."""
    jobs.check(run)
    if jobs.says_finished(run):
        return DONE
    pool = devices.Pool(run.hardware, devices.names(run.hardware))
    with signals.StopFlag() as stop, jobs.claim(run) as held:
        # Until it was claimed another command may have begun it, or finished it
        jobs.check_folder(run)
        if jobs.says_finished(run):
            return DONE
        seeing = pool.wait(run.hardware.devices, held, partial(_stop_if_asked, stop))
        job = jobs.start(run, None, held, seeing)
        while not job.ended():
            if stop.asked:
                job.stop(stop.asked)
            time.sleep(devices.POLL_SECONDS)
        code = jobs.close(job)
    if code == INTERRUPTED:
        slurm.requeue_after(stop.asked)
    elif code != DONE and (job.folder / records.FAILURE).exists():
        print(f"aiayn: {records.read_json(job.folder / records.FAILURE)['cause']}", file=sys.stderr)
    return code


def _stop_if_asked(stop: signals.StopFlag) -> None:
    if stop.asked:
        stop.restore()
        slurm.requeue_after(stop.asked)
        stop.check()
