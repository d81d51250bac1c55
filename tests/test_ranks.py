"""Two real ranks: they stop together, one's death ends the other, and a run may go from 1 to 2 and back to 1."""

import dataclasses
import itertools
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
from aiayn.training import lightning_data, train
from aiayn.training.lightning_model import LightningTransformer

SABOTAGE = """
import os, runpy, signal, sys, time
from pathlib import Path
from aiayn.training.lightning_model import LightningTransformer

step = LightningTransformer.training_step

def sabotaged(self, batch, index):
    if batch.number + 1 == {update} and os.environ["RANK"] == "{rank}":
        Path({note!r}).write_text(str(time.time()))
        os.kill(os.getpid(), signal.{name})
    return step(self, batch, index)

LightningTransformer.training_step = sabotaged
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def sabotage(tmp_path, monkeypatch):
    """Makes one rank, of those that `jobs` or torchrun with `sabotage.py` starts, send itself a signal in an update."""

    def arm(update: int, name: str, rank: int = 1) -> Path:
        note = tmp_path / "sabotaged"
        (tmp_path / "sabotage.py").write_text(SABOTAGE.format(update=update, note=str(note), name=name, rank=rank))
        script = tmp_path / "python"
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/sabotage.py "$2" "$3"\n')
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


def test_in_fp32_two_ranks_have_the_weights_of_one_to_1e_5(toy_run, tmp_path, monkeypatch):
    """After 20 updates, each of one micro-batch on one rank and of two on two; relative to a tensor's largest value.

    The biases of keys are left out: they shift all scores of a query alike, so that their gradient is rounding alone,
    of which Adam makes whole steps.
    """
    toy = schema.vary(toy_run, training={"max_steps": 20, "checkpoint_every": 20, "dev_every": 20})

    def weights(devices: int, name: str) -> dict[str, torch.Tensor]:
        hardware = {"devices": devices, "precision": "32-true", "tokens_per_micro_batch": 64}
        run = schema.vary(dataclasses.replace(toy, output=str(tmp_path / name)), hardware=hardware)
        folder, keys = folders.run_folder(run), run.model.num_heads * run.model.d_k
        assert devices == 1 or one_run.run_here(run) == exit_codes.DONE
        found = state(folder if devices > 1 else trained(run, folder))
        for key in (key for key in found if key.endswith("key_value.bias")):  # (H * (2 K + V)) or (H * (K + V))
            found[key][keys * ("query" in key) :][:keys] = 0
        return found

    def distance(other: dict[str, torch.Tensor]) -> float:
        return max(float((other[name] - weight).abs().max() / weight.abs().max()) for name, weight in one.items())

    one, two = weights(1, "one"), weights(2, "two")
    assert 0 < distance(two) < 1e-5
    calls, gather = itertools.count(1), lightning_data.gather
    without_one = lambda pairs, part, *first: gather(pairs, part[next(calls) == 7 :], *first)  # noqa: E731
    monkeypatch.setattr(lightning_data, "gather", without_one)
    assert distance(weights(1, "control")) > 1e-3  # without a sentence of update 7


@pytest.mark.slow
def test_one_rank_dies_and_the_other_ends_within_30_seconds(toy_run, sabotage, capsys):
    run = on(2, toy_run)
    note = sabotage(3, "SIGKILL")
    assert one_run.run_here(run) == 137
    assert time.time() - float(note.read_text()) < 30
    assert "aiayn: rank 1 was killed by SIGKILL" in capsys.readouterr().err
    folder = folders.run_folder(run)
    assert records.read_json(folder / records.FAILURE)["cause"] == "rank 1 was killed by SIGKILL"
    assert checkpoint.newest(folder / "checkpoints")[0] == checkpoint.path_of(folder / "checkpoints", 2)
    with storage.lock(folder / ".claim", wait=False), storage.lock(folder / ".lock", wait=False):
        pass  # nobody is left


@pytest.mark.slow
def test_of_two_torchrun_nodes_one_dies_is_named_and_they_resume(toy, tmp_path, sabotage):
    """Each node is a torchrun of its own, which knows the other by an address alone; the folder is on a shared disk.

    The first time rank 0 is killed; the second time they end, with the bits of two ranks on one machine.
    """
    words = [*toy, "hardware.devices=2", "hardware.precision=64-true"]
    alone, nodes_run = (compose.compose_row(*words, f"output={tmp_path}/{name}") for name in ("alone", "nodes"))
    assert one_run.run_here(alone) == exit_codes.DONE
    folder, python = folders.run_folder(nodes_run), sys.executable

    def on_two_nodes(*program: str) -> tuple[list[int], str]:
        with ExitStack() as held:
            meet = f"--rdzv-endpoint=127.0.0.1:{devices.port(held)}"
            command = [python, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", meet]
            command += ["--rdzv-backend=c10d", "--rdzv-id=aiayn", *program, "train", *words, f"output={tmp_path}/nodes"]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            nodes = [subprocess.Popen(command, **pipes, start_new_session=True) for _ in range(2)]
            printed = [node.communicate(timeout=600)[0] for node in nodes]
        return [node.returncode for node in nodes], "".join(printed)

    note = sabotage(4, "SIGKILL", rank=0)
    codes, printed = on_two_nodes(str(tmp_path / "sabotage.py"), "aiayn")
    assert time.time() - float(note.read_text()) < 30
    assert codes == [1, 1]
    (line,) = (line for line in printed.splitlines() if line.startswith("aiayn: "))
    assert line.startswith("aiayn: another rank has ended or does not answer; its terminal says why")
    left = {"exit_code": exit_codes.FAILED, "cause": line.removeprefix("aiayn: ")}
    assert records.read_json(folder / records.FAILURE) == left
    assert "in training_step" not in printed  # no traceback of ours
    codes, printed = on_two_nodes("-m", "aiayn")
    assert codes == [0, 0], printed
    assert "resuming base after update 3" in printed
    assert equal(state(folder), state(folders.run_folder(alone)))
    before = checkpoint.load(checkpoint.path_of(folder / "checkpoints", 5))
    assert not equal(state(folder), before["state_dict"])  # control: the last update is seen
