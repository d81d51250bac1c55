"""`aiayn` and `python -m aiayn`: a signal is one line from here on, before anything that takes time is imported."""

from aiayn.core import signals


def main() -> None:
    """Runs the command that `sys.argv` names and exits with its code."""
    with signals.interrupting(), signals.reported():
        from aiayn import cli

        cli.main()


if __name__ == "__main__":
    main()
