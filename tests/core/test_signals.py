"""A signal sets a flag and nothing else; outside such a block it ends whatever is at work."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from aiayn.core import signals
from aiayn.core.signals import Interrupted, StopFlag


@pytest.fixture(autouse=True)
def handlers_are_restored():
    before = [signal.getsignal(number) for number in signals.STOPPING]
    yield
    assert [signal.getsignal(number) for number in signals.STOPPING] == before


@pytest.mark.parametrize("number", signals.STOPPING)
def test_a_signal_leaves_its_name(number):
    with StopFlag() as stop:
        stop.check()
        os.kill(os.getpid(), number)
        assert stop.asked == number.name
        with pytest.raises(Interrupted, match=f"stopped by {number.name}; repeat the command"):
            stop.check()


@pytest.mark.parametrize("number", signals.STOPPING)
def test_a_signal_interrupts_what_survives_every_error(number):
    def work() -> None:
        with suppress(Exception):
            os.kill(os.getpid(), number)
            time.sleep(20)

    with pytest.raises(Interrupted, match=f"stopped by {number.name}; repeat the command"), signals.interrupting():
        work()


def test_a_repeated_request_is_ignored_and_a_new_one_is_not(monkeypatch):
    """A terminal sends Ctrl-C to a worker, and so does its parent."""
    with signals.interrupting():
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        monkeypatch.setattr(signals, "SAME_REQUEST_SECONDS", 0.0)
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGINT)


def test_it_listens_again_when_a_library_has_taken_the_signal():
    with StopFlag() as stop:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(os.getpid(), signal.SIGTERM)
        assert not stop.asked  # control
        stop.listen()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.asked == "SIGTERM"


def test_a_signal_ends_an_import_that_survives_every_exception(tmp_path):
    swallowing = "import os\ntry:\n    os.kill(os.getpid(), 15)\nexcept BaseException:\n    pass\nprint('goes on')\n"
    (tmp_path / "swallowing.py").write_text(swallowing)
    code = "from aiayn.core import signals\nwith signals.interrupting(), signals.reported():\n    {}"

    def run(body: str, stderr: int = subprocess.PIPE) -> tuple[int, str, str]:
        words = [sys.executable, "-c", code.format(body)]
        done = subprocess.run(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr

    said = "aiayn: stopped by SIGTERM; repeat the command to go on from here\n"
    assert run("import swallowing") == (75, "", said)
    reader, writer = os.pipe()
    os.close(reader)  # as in `2>&1 | head -1`
    assert run("import swallowing", writer) == (75, "", None)
    os.close(writer)
    assert run("exec(open('swallowing.py').read())") == (0, "goes on\n", "")  # control: raised outside an import
