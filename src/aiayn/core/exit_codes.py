"""The exit codes of every command and worker."""

DONE, FAILED, WRONG_CONFIGURATION, NON_FINITE, BAD_DATA, STORAGE = range(6)
INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h: repeat the command to resume
OUTPUT_CLOSED = 141  # as a shell reports SIGPIPE: the reader of the output has left
# As `--help` explains them
EXPLAINED = {
    DONE: "done",
    FAILED: "failed",
    WRONG_CONFIGURATION: "wrong configuration or usage",
    NON_FINITE: "non-finite",
    BAD_DATA: "bad data",
    STORAGE: "storage",
    INTERRUPTED: "interrupted: repeat to resume",
    OUTPUT_CLOSED: "output closed",
}
