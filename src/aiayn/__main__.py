"""`aiayn` and `python -m aiayn`: a signal is one line from here on, before anything that takes time is imported."""

from aiayn.core import signals
from aiayn.core.exit_codes import INTERRUPTED


def main() -> None:
    """Runs the command that `sys.argv` names and exits with its code."""
    try:
        with signals.interrupting(), signals.reported():
            from aiayn import cli

            cli.main()
    except SystemExit as exit:
        if exit.code == INTERRUPTED:
            from aiayn.training import worker

            worker.leave(INTERRUPTED)  # at once: threads that search have heard of no signal
        raise


if __name__ == "__main__":
    main()
