"""Two real ranks: they stop together, one's death ends the other, and a run may go from 1 to 2 and back to 1."""

import dataclasses
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch
from trained_runs import at_call, equal, rows, trained

from aiayn.config import compose, folders, schema
from aiayn.core import exit_codes, storage
from aiayn.core.signals import Interrupted
from aiayn.runs import checkpoint, devices, jobs, records
from aiayn.sweep import one_run
from aiayn.training import train
from aiayn.training.lightning_model import LightningTransformer

SABOTAGE = """
import os, signal, sys, time
from pathlib import Path
from aiayn.training import train
from aiayn.training.lightning_model import LightningTransformer

step = LightningTransformer.training_step

def sabotaged(self, batch, index):
    if batch.number + 1 == {update} and os.environ["RANK"] == "1":
        Path({note!r}).write_text(str(time.time()))
        os.kill(os.getpid(), signal.{name})
    return step(self, batch, index)

LightningTransformer.training_step = sabotaged
os._exit(train.main(Path(sys.argv[-1])))
"""


@pytest.fixture
def sabotage(tmp_path, monkeypatch):
    """Makes rank 1 of every worker send itself a signal in the middle of an update."""

    def arm(update: int, name: str) -> Path:
        note = tmp_path / "sabotaged"
        (tmp_path / "sabotage.py").write_text(SABOTAGE.format(update=update, note=str(note), name=name))
        script = tmp_path / "python"
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/sabotage.py "$3"\n')
        script.chmod(0o755)
        monkeypatch.setattr(jobs.sys, "executable", str(script))
        return note

    return arm


def on(devices: int, run: schema.Config) -> schema.Config:
    return schema.vary(run, hardware={"devices": devices, "precision": "64-true"})


def state(folder: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(checkpoint.newest(folder / "checkpoints")[0])["state_dict"]


def test_a_signal_to_one_rank_stops_both_and_1_2_1_ranks_are_1(toy_run, tmp_path, monkeypatch, sabotage):
    run = on(1, toy_run)
    whole = on(1, dataclasses.replace(toy_run, output=str(tmp_path / "whole")))
    train.train(whole, folders.run_folder(whole))
    folder = folders.run_folder(run)
    with monkeypatch.context() as patch:
        at_call(patch, LightningTransformer, "training_step", 2, partial(signal.raise_signal, signal.SIGTERM))
        with pytest.raises(Interrupted):
            trained(run, folder)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", sys.executable)
        sabotage(4, "SIGTERM")
        assert one_run.run_here(on(2, run)) == exit_codes.INTERRUPTED
    assert checkpoint.newest(folder / "checkpoints")[0] == checkpoint.path_of(folder / "checkpoints", 4)
    assert not (folder / "failure.json").exists()
    train.train(run, folder)
    one, mixed = state(folders.run_folder(whole)), state(folder)
    assert one.keys() == mixed.keys()
    for name, weight in one.items():
        assert weight.dtype == torch.float64
        assert torch.allclose(weight, mixed[name], rtol=0, atol=1e-9), name
    tokens = [
        [(row["step"], row["source_tokens"], row["target_tokens"]) for row in rows(at) if "train/loss" in row]
        for at in (folder, folders.run_folder(whole))
    ]
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 6


@pytest.mark.slow
def test_one_rank_dies_and_the_other_ends_within_30_seconds(toy_run, sabotage, capsys):
    run = on(2, toy_run)
    note = sabotage(3, "SIGKILL")
    assert one_run.run_here(run) == 137
    assert time.time() - float(note.read_text()) < 30
    assert "aiayn: rank 1 was killed by SIGKILL" in capsys.readouterr().err
    folder = folders.run_folder(run)
    assert records.failure(folder)["cause"] == "rank 1 was killed by SIGKILL"
    assert checkpoint.newest(folder / "checkpoints")[0] == checkpoint.path_of(folder / "checkpoints", 2)
    with storage.lock(folder / ".claim", wait=False), storage.lock(folder / ".lock", wait=False):
        pass  # nobody is left


@pytest.mark.slow
def test_two_nodes_by_torchrun_give_the_bits_of_two_ranks_on_one(toy, tmp_path):
    """Each node is a torchrun of its own, which knows the other by an address alone; the folder is on a shared disk."""
    words = [*toy, "hardware.devices=2", "hardware.precision=64-true"]
    alone, nodes_run = (compose.compose_row(*words, f"output={tmp_path}/{name}") for name in ("alone", "nodes"))
    assert one_run.run_here(alone) == exit_codes.DONE
    folder = folders.run_folder(nodes_run)
    with ExitStack() as held:
        meet = f"--rdzv-endpoint=127.0.0.1:{devices.port(held)}"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", meet]
        command += ["--rdzv-backend=c10d", "--rdzv-id=aiayn"]
        nodes = [
            subprocess.Popen(
                [*command, f"--node-rank={rank}", "-m", "aiayn", "train", *words, f"output={tmp_path}/nodes"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for rank in range(2)
        ]
        printed = [node.communicate(timeout=600)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], printed
    assert equal(state(folder), state(folders.run_folder(alone)))
    assert checkpoint.newest(folder / "checkpoints")[0].name == "step-000000006.ckpt"
    before = checkpoint.load(checkpoint.path_of(folder / "checkpoints", 5))
    assert not equal(state(folder), before["state_dict"])  # control: the last update is seen
