"""One run on this terminal: begun once, in a folder of its own, with a device of its own."""

import dataclasses
import os
import time
import types
from contextlib import ExitStack

import pytest
from run_results import result_of

from aiayn.config import compose, folders
from aiayn.core import exit_codes, storage
from aiayn.data import prepare
from aiayn.data.encoding import settings_of
from aiayn.data.parallel_text import DataError
from aiayn.runs import devices, jobs, records
from aiayn.sweep import one_run


def test_a_run_waits_for_its_gpu_and_says_so_once(toy_run, monkeypatch, capsys):
    gpu = compose.compose_row("hardware=gpu").hardware
    run, seen = dataclasses.replace(toy_run, hardware=gpu), []
    names = [f"GPU-{letter}{os.getpid()}" for letter in "xy"]
    monkeypatch.setattr(devices, "gpus", lambda: names)
    others = ExitStack()
    assert devices.Pool(gpu, names).take(2, others) == {}

    def start(run, log, held, seeing):
        seen.append(seeing)
        return jobs.Job(run, folders.run_folder(run), [types.SimpleNamespace(poll=lambda: 0, wait=lambda: 0)], held)

    polls = iter((lambda: None, others.close))
    monkeypatch.setattr(jobs, "start", start)
    monkeypatch.setattr(time, "sleep", lambda seconds: next(polls)())
    assert one_run.run_here(run) == exit_codes.DONE
    assert capsys.readouterr().err.count("waiting for a GPU") == 1
    assert seen == [{"CUDA_VISIBLE_DEVICES": names[0]}]


def test_a_folder_in_use_is_refused_naming_its_owner(toy_run):
    folder = folders.run_folder(toy_run)
    records.record_failure(folder, 3, "before")
    with jobs.claim(toy_run), pytest.raises(storage.InUse, match=f"in use by process {os.getpid()} on "):
        one_run.run_here(toy_run)
    assert records.read_json(folder / records.FAILURE)["cause"] == "before"
    assert not (folder / "config.yaml").exists()
    with jobs.claim(toy_run):  # control: it is free again
        pass


def test_a_finished_run_writes_nothing_and_checks_its_text(toy_run, monkeypatch, capsys, tmp_path):
    run = dataclasses.replace(toy_run, prepared=f"{tmp_path}/prepared")
    made = result_of(run)
    storage.write_json(folders.run_folder(run) / "result.json", made)
    texts = settings_of(prepare.fingerprints(prepare.sources(run.data)), 25, 12, None, run.scale)
    manifest = {"sha256": made["sha256"]["data"], "settings": texts}
    path = folders.prepared_folder(run) / "manifest.json"
    storage.write_json(path, manifest)
    monkeypatch.setattr(jobs, "start", lambda *_: pytest.fail("a worker was started"))
    before = sorted(tmp_path.rglob("*"))
    assert one_run.run_here(run) == exit_codes.DONE
    assert "nothing to do" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before
    storage.write_json(path, manifest | {"settings": texts | {"dev.target": "0" * 64}})
    with pytest.raises(DataError, match=r"\(dev.target was 000"):
        one_run.run_here(run)
