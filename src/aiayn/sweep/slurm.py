"""SLURM's warning puts a job back into the queue."""

import os
import signal
import subprocess


def requeue_after(asked: str) -> None:
    """Requeues this SLURM job, whose files are on the disk, if SLURM's warning came to its first task.

    That is SIGUSR1 or, where submitit began the job, SIGUSR2, whose handler there requeues and exits.
    """
    if asked == "SIGUSR2" and "SUBMITIT_EXECUTOR" in os.environ:
        signal.raise_signal(signal.SIGUSR2)
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
