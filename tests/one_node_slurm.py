"""A SLURM of one node, started for the tests from what Debian's slurm-wlm and munge install, and stopped after them."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
# Two cores; a job in `high` takes them from one in `low`, which goes back into the queue
CONF = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort=16817
SlurmdPort=16818
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SchedulerParameters=sched_interval=1,bf_interval=1
MinJobAge=3600
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=120
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9
"""


def is_installed() -> bool:
    return all(map(shutil.which, PROGRAMS)) and os.geteuid() == 0


@contextmanager
def one_node_slurm(folder: Path) -> Iterator[Path]:
    """Yields the path of its slurm.conf."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    conf, host, munge = folder / "slurm.conf", os.uname().nodename.partition(".")[0], folder / "munge"
    conf.write_text(CONF.format(folder=folder, host=host))
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o600)
    files = {"key-file": folder / "key", "socket": f"{munge}.socket", "log-file": f"{munge}.log"}
    files |= {"pid-file": f"{munge}.pid", "seed-file": f"{munge}.seed"}
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    daemons = [
        ["munged", "--foreground", "--force", *(f"--{key}={value}" for key, value in files.items())],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", host],
    ]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for words in daemons:
            with (folder / f"{words[0]}.out").open("wb") as out:
                started.append(subprocess.Popen(words, env=environment, stdout=out, stderr=out))
            time.sleep(1)
        deadline = time.monotonic() + 60
        while b"idle" not in subprocess.run(["sinfo"], env=environment, capture_output=True, check=False).stdout:
            said = [path.read_text()[-500:] for path in [*folder.glob("*.out"), *folder.glob("slurm*.log")]]
            assert time.monotonic() < deadline, said
            assert all(daemon.poll() is None for daemon in started), said
            time.sleep(0.5)
        yield conf
    finally:
        for daemon in reversed(started):
            daemon.terminate()
            daemon.wait()
