"""The exit codes of every command and worker, and the errors that end one with a line."""

DONE, FAILED, WRONG_CONFIGURATION, NON_FINITE, BAD_DATA, STORAGE = range(6)
INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h: repeat the command to resume
OUTPUT_CLOSED = 141  # as a shell reports SIGPIPE: the reader of the output has left
# As `--help` explains them
EXPLAINED = dict(enumerate(("done", "failed", "wrong configuration or usage", "non-finite", "bad data", "storage")))
EXPLAINED |= {INTERRUPTED: "interrupted: repeat to resume", OUTPUT_CLOSED: "output closed"}


class ExplainedError(Exception):
    """An error that a user can cause: it is said in one line, without a traceback."""

    exit_code = FAILED
