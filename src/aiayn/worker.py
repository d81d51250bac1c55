"""A worker process, one a device: `python -m aiayn.worker <run folder>`; bound to its parent before anything slow."""

import faulthandler
import os
import sys
from pathlib import Path

from aiayn import signals


def main(folder: Path) -> int:
    """Trains the run of a folder and returns the exit code."""
    signals.die_with_parent()
    faulthandler.enable()  # a worker that crashes or is aborted leaves in its log where it was
    from aiayn import train  # takes seconds

    return train.main(folder)


if __name__ == "__main__":
    ended = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)  # W&B's own cleaning up at exit would wait for a service that may never answer
