"""SLURM's warning before its time limit puts the job back into the queue."""

import os
import subprocess


def requeue_after(asked: str) -> None:
    """Requeues this SLURM job when the signal is SLURM's warning, SIGUSR1, and this is the job's first task.

    To be called when all is on the disk. Prints in one line what came of it.
    """
    in_first_task = "SLURM_JOB_ID" in os.environ and os.environ.get("SLURM_PROCID", "0") == "0"
    if asked == "SIGUSR1" and in_first_task:
        print(_requeue())


def _requeue() -> str:
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=True)
    except FileNotFoundError:
        return f"SLURM job {job} is not requeued: scontrol is not on the PATH; submit it again"
    except subprocess.CalledProcessError as error:
        return f"SLURM job {job} is not requeued: {' '.join(error.stderr.split())[:200]}; submit it again"
    return f"SLURM job {job} is requeued"
