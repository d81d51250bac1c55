"""The devices of this machine: how many there are, and locks that give each GPU to one run at a time."""

import errno
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import islice

from aiayn.config.schema import ConfigError, Hardware
from aiayn.core.process_pool import cores

# Below the ephemeral ports, which kernels hand out: a rank binds its port seconds after it was chosen
PORTS = range(20000, 30000)
POLL_SECONDS = 0.1


def names(hardware: Hardware, limit: int = 0) -> list[str]:
    """The devices here for such runs: groups of cores, or `limit`; GPUs by UUID, then shares of them up to `limit`.

    ConfigError for runs that would share GPUs and ask for several each.
    """
    if hardware.accelerator == "gpu":
        seen = gpus()
        if limit > len(seen) and hardware.devices > 1:
            cause = f"must be at most {len(seen)}, the GPUs that torch sees: runs that share a GPU use one each"
            raise ConfigError(f"hydra.launcher.devices={limit}: {cause}; or give hardware.devices=1")
        shares = range(max(1, -(-limit // len(seen))))
        return [f"{gpu} share {share}" if share else gpu for share in shares for gpu in seen][: max(limit, len(seen))]
    return [str(number) for number in range(limit or max(hardware.devices, cores() // hardware.threads))]


def warn_of_threads(hardware: Hardware, devices: int) -> None:
    """One line where a CPU has fewer cores than so many devices have threads: they would wait for each other."""
    if hardware.accelerator == "cpu" and hardware.threads * devices > cores():
        asked = f"hardware.threads={hardware.threads} on {devices} device{'s' if devices > 1 else ''}"
        print(f"aiayn: {asked}: more threads than the {cores()} cores here, which takes longer", file=sys.stderr)


def gpus() -> list[str]:
    """The GPUs that a worker would see, as CUDA_VISIBLE_DEVICES names them; ConfigError with torch's reason if none."""
    listed = "(f'GPU-{torch.cuda.get_device_properties(n).uuid}' for n in range(torch.cuda.device_count()))"
    code = f"import torch; torch.cuda.init(); print(*{listed})"
    # Another process asks, so that this one starts no CUDA of its own
    asked = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    if asked.returncode:
        reason = asked.stderr.strip().rpartition("\n")[2].partition(": ")[2]
        remedy = "give hardware=cpu, for a run trained in bf16 hardware.precision=bf16-mixed too"
        raise ConfigError(f"hardware=gpu: torch sees no GPU here: {reason}; {remedy}")
    return asked.stdout.split()


class Pool:
    """Devices of which one command may use `limit`, each for a run at a time; no other command has its GPUs too."""

    def __init__(self, hardware: Hardware, names: list[str], limit: int = 0) -> None:
        """ConfigError when a run asks for more than there are, or than the limit."""
        self.gpu, self.names, self.limit = hardware.accelerator == "gpu", names, limit or len(names)
        if hardware.devices > self.limit:
            seen = "hydra.launcher.devices" if limit else "all devices" + " that torch sees" * self.gpu
            raise ConfigError(f"hardware.devices={hardware.devices}: must be at most {self.limit}, {seen}")
        self.shared = any(" " in name for name in names)  # a GPU may have several runs at a time
        self.taken: set[str] = set()

    def take(self, count: int, held: ExitStack) -> dict[str, str] | None:
        """Takes devices until `held` is closed: the environment that shows them alone; None while they are not free."""
        if len(self.taken) + count > self.limit:
            return None
        with ExitStack() as stack:
            free = (name for name in self.names if name not in self.taken)
            got = list(islice((name for name in free if not self.gpu or _locked(name, stack)), count))
            if len(got) < count:
                return None
            self.taken.update(got)
            stack.callback(self.taken.difference_update, got)
            held.enter_context(stack.pop_all())
        # With all of them the workers see what this process sees, under whatever name
        seen = ",".join(name.partition(" ")[0] for name in got)
        return {"CUDA_VISIBLE_DEVICES": seen} if self.gpu and len(got) < len(self.names) else {}

    def wait(self, count: int, held: ExitStack, check: Callable[[], None] = lambda: None) -> dict[str, str]:
        """What `take` gives, as soon as so many are free; says once that it waits. `check` may raise meanwhile."""
        seeing = self.take(count, held)
        if seeing is None:
            print("waiting for a GPU: other commands have them", file=sys.stderr, flush=True)
        while seeing is None:
            check()
            time.sleep(POLL_SECONDS)
            seeing = self.take(count, held)
        return seeing


def port(held: ExitStack) -> int:
    """A port where the ranks of one run meet, kept from every other run of this machine until `held` is closed."""
    for number in PORTS:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", number))
            if _locked(f"port {number}", held):
                return number
    cause = f"no port from {PORTS[0]} to {PORTS[-1]} is free for ranks to meet"
    raise ConfigError(f"hardware.devices: {cause}; use 1 device")


def _locked(name: str, stack: ExitStack) -> bool:
    """A name in the kernel: no file that another user could not open, and gone with the process that holds it."""
    if sys.platform != "linux":
        return True
    lock = stack.enter_context(socket.socket(socket.AF_UNIX))
    try:
        lock.bind(f"\0aiayn device {name}")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise
    return True
