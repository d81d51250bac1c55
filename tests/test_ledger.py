"""The ledger of a sweep: whatever sweeps, crashes and torn files come, nothing finished is lost or done twice.

The ledger is the run folders. Workers are stood for by what they would leave behind.
"""

import dataclasses
import json
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from trained_runs import cores

from aiayn.config import compose, folders, schema
from aiayn.core import storage
from aiayn.runs import jobs, records
from aiayn.sweep import launcher

SEEDS = (1, 2, 3, 5)
OUTCOMES = ("finished", "failed", "interrupted", "killed")


class Crash(BaseException):
    """The end of the sweep's own process."""


class Ended:
    """A worker that has ended already."""

    def __init__(self, code: int) -> None:
        self.returncode = code

    def poll(self) -> int:
        return self.returncode

    wait = poll

    def send_signal(self, number: int) -> None:
        raise AssertionError("nobody is left to hear it")


def made_up(run: schema.Config) -> dict[str, Any]:
    dev = {"ppl": 2.0, "bits_per_character": 1.0, "bleu": {"paper": 3.0, "sacrebleu": 5.0, "intl": 7.0}}
    names = {"experiment": run.experiment, "seed": run.seed, "scale": run.scale.name, "data": run.data.name}
    counts = {"params": 11, "params_at_40960_rows": 13, "steps": 17, "train_seconds": 19.0}
    hashes = {"device_seconds": {"cpu": 19.0}, "sha256": {"data": "d" * 64, "tokenizer": "7" * 64}}
    made = {"schema": 1, "status": "finished", "config": dataclasses.asdict(run), "dev": dev}
    return {**made, **names, **counts, **hashes}


class Ledger(RuleBasedStateMachine):
    """What a run folder must say of each seed, beside what it says."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.folder = Path(tempfile.mkdtemp())
        base = dataclasses.replace(compose.rows()["base"], output=str(self.folder / "runs"))
        self.runs = {seed: dataclasses.replace(base, seed=seed) for seed in SEEDS}
        self.known = dict.fromkeys(SEEDS, "missing")
        self.written: dict[int, bytes] = {}
        self.patch.setattr(launcher, "POLL_SECONDS", 0)
        self.patch.setattr(jobs, "start", self.start)

    def teardown(self) -> None:
        self.patch.undo()
        shutil.rmtree(self.folder)

    def start(self, run: schema.Config, log: Path, held: ExitStack, seeing: dict[str, str]) -> jobs.Job:
        """A worker that leaves what its outcome says, and has ended when it is first asked."""
        if not self.crash_after:
            raise Crash
        self.crash_after -= 1
        assert self.known[run.seed] != "finished", "a finished run was started again"
        self.begun.append(run.seed)
        folder, outcome = folders.run_folder(run), self.outcomes[run.seed]
        (folder / "failure.json").unlink(missing_ok=True)
        storage.write_text(folder / "config.yaml", compose.to_yaml(run))
        storage.append_lines(folder / "metrics.jsonl", ['{"step": 1}'])
        code = jobs.DONE
        if outcome == "finished":
            storage.write_json(folder / "result.json", made_up(run))
            self.written[run.seed] = (folder / "result.json").read_bytes()
        elif outcome == "failed":
            code = jobs.record_failure(folder, jobs.NON_FINITE, "the loss is NaN")
        else:
            code = jobs.INTERRUPTED if outcome == "interrupted" else -9
        # A crash of the sweep leaves a killed run without a word: its worker died with it
        self.known[run.seed] = {"interrupted": "half-done", "killed": "half-done"}.get(outcome, outcome)
        return jobs.Job(run, folder, [Ended(code)], held)  # type: ignore[list-item]

    @rule(
        seeds=st.lists(st.sampled_from(SEEDS), min_size=1, unique=True),
        outcomes=st.fixed_dictionaries({seed: st.sampled_from(OUTCOMES) for seed in SEEDS}),
        crash_after=st.integers(0, 9),
        at_once=st.integers(1, 3),
    )
    def sweep(self, seeds: list[int], outcomes: dict[int, str], crash_after: int, at_once: int) -> None:
        """A sweep of some seeds, which may die after it has started some workers."""
        self.outcomes, self.crash_after, self.begun = outcomes, crash_after, []
        due = {seed for seed in seeds if self.known[seed] != "finished"}
        try:
            code = launcher.Sweep([self.runs[seed] for seed in seeds], cores(at_once), 60).work_through()
        except Crash:
            assert len(self.begun) == crash_after
            return
        assert sorted(self.begun) == sorted(due)
        ends = {outcomes[seed] for seed in due}
        for seed in due:
            if outcomes[seed] == "killed":
                self.known[seed] = "failed"
        interrupted = "interrupted" in ends
        assert code == (jobs.INTERRUPTED if interrupted else jobs.FAILED if ends - {"finished"} else jobs.DONE)

    @precondition(lambda self: "finished" in self.known.values())
    @rule(data=st.data())
    def tear(self, data: st.DataObject) -> None:
        """A result is torn by something else than us: it is made again, and called failed until then."""
        seed = data.draw(st.sampled_from([seed for seed, status in self.known.items() if status == "finished"]))
        path = folders.run_folder(self.runs[seed]) / "result.json"
        path.write_bytes(path.read_bytes()[: data.draw(st.integers(0, 99))])
        self.known[seed] = "failed"
        del self.written[seed]

    @invariant()
    def the_folders_say_what_became_of_each_run(self) -> None:
        """Every finished result is there, byte for byte; every other run is called what it is."""
        for seed, run in self.runs.items():
            folder = folders.run_folder(run)
            found = records.read_run(folder) if folder.exists() else None
            status = found.status if found else "missing"
            if self.known[seed] == "half-done" and status == "failed":
                assert "killed by SIGKILL" in found.cause or "torn" in found.cause  # seen before the sweep crashed
            else:
                assert status == self.known[seed], seed
            assert jobs.is_finished(run) == (self.known[seed] == "finished")
            if seed in self.written:
                assert (folder / "result.json").read_bytes() == self.written[seed]
                assert json.loads(self.written[seed])["seed"] == seed


def test_a_sweep_that_forgets_what_is_finished_would_be_caught(monkeypatch):  # control
    everything = dict.fromkeys(SEEDS, "finished")
    ledger = Ledger()
    try:
        ledger.sweep(seeds=[1, 2], outcomes=everything, crash_after=9, at_once=1)
        monkeypatch.setattr(jobs, "is_finished", lambda run: False)
        with pytest.raises(AssertionError, match="a finished run was started again"):
            ledger.sweep(seeds=[1, 2], outcomes=everything, crash_after=9, at_once=1)
    finally:
        ledger.teardown()


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=12, stateful_step_count=8, deadline=None)
