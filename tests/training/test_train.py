"""A run from end to end: it learns, it resumes as if nothing had happened, two ranks are one, it fails in one line."""

import dataclasses
import hashlib
import itertools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from trained_runs import equal, rows, trained

from aiayn.config import compose, folders
from aiayn.config.schema import ConfigError, vary
from aiayn.core import exit_codes, storage
from aiayn.paper.dropout import Dropout
from aiayn.paper.layers import Linear
from aiayn.paper.transformer import Transformer
from aiayn.runs import checkpoint, jobs, models, records
from aiayn.sweep import one_run
from aiayn.training import train
from aiayn.training.lightning_model import LightningTransformer, NonFinite


def final_state(folder: Path) -> dict:
    return checkpoint.load(checkpoint.newest(folder / "checkpoints")[0])


@pytest.fixture
def at_each_step(monkeypatch) -> Callable[[Callable], None]:
    """Calls a function with the module and the update before each training step."""

    def watch(look) -> None:
        step = LightningTransformer.training_step

        def watched(self, update, index):
            look(self, update)
            return step(self, update, index)

        monkeypatch.setattr(LightningTransformer, "training_step", watched)

    return watch


def test_a_run_leaves_the_folder_of_the_contract(toy_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = trained(toy_run, tmp_path / "run")
    assert list(tmp_path.iterdir()) == [folder]  # nor has a library left anything else
    names = ("config.yaml", "data.sha256", "metrics.jsonl", "result.json", "translations.txt", "checkpoints")
    assert {path.name for path in folder.iterdir()} == set(names)
    result = json.loads((folder / "result.json").read_text())
    keys = (
        "schema experiment seed scale data config status params params_at_40960_rows steps source_tokens target_tokens"
        " train_seconds epochs target_tokens_per_second dev sha256 versions hardware finished_at"
    )
    assert set(result) == set(keys.split())
    assert set(result["dev"]) == {"ppl", "nats", "tokens", "bits_per_character", "bleu", "bleu_ci95", "signatures"}
    assert set(result["dev"]["bleu"]) == {"paper", "sacrebleu", "intl"}
    assert (result["schema"], result["status"], result["steps"]) == (1, "finished", 6)
    updates, dev = ([row for row in rows(folder) if key in row] for key in ("train/loss", "dev/ppl"))
    assert [row["step"] for row in updates] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in dev] == [2, 4, 6]
    assert dev[-1]["dev/ppl"] == pytest.approx(result["dev"]["ppl"], rel=1e-6)
    tokens = sum(row["target_tokens"] for row in updates)
    corpus = train.prepare(toy_run, lambda message: None).pairs("train")
    assert (result["target_tokens"], result["epochs"]) == (tokens, round(tokens / len(corpus.target_ids), 3))
    assert result["target_tokens_per_second"] == pytest.approx(tokens / result["train_seconds"], rel=0.05)
    weights = final_state(folder)["state_dict"]
    assert result["params"] == sum(weight.numel() for weight in weights.values())
    assert result["params_at_40960_rows"] - result["params"] == (40_960 - 25) * 16  # d_model is 16
    # A copy without checkpoints is finished too, even where only the prepared text shows it
    copy = folders.run_folder(dataclasses.replace(toy_run, output=str(tmp_path / "copied")))
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("checkpoints"))
    trained(dataclasses.replace(toy_run, output=str(tmp_path / "copied")), copy)
    assert (copy / "metrics.jsonl").read_bytes() == (folder / "metrics.jsonl").read_bytes()
    assert result["hardware"]["accelerator"] == models.processor()
    source = Path(train.__file__).parents[1]
    files = "find . -name '*.py' | LC_ALL=C sort | xargs cat"
    code = subprocess.run(files, shell=True, cwd=source, capture_output=True, check=True).stdout
    assert result["sha256"]["code"] == hashlib.sha256(code).hexdigest()
    files = {"checkpoint": folder / "checkpoints" / "step-000000006.ckpt"}
    files["tokenizer"] = folders.prepared_folder(toy_run) / "tokenizer.model"
    for name, path in files.items():
        assert result["sha256"][name] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert len((folder / "translations.txt").read_bytes().split(b"\n")) == 42


@pytest.mark.slow
def test_kill_9_and_the_same_command_again_give_the_same_run(toy, tmp_path, aiayn):
    arguments = ["train", *toy, "training.max_steps=60"]
    folder = folders.run_folder(compose.compose_row(*arguments[1:]))
    worker = subprocess.Popen(
        [sys.executable, "-m", "aiayn", *arguments], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    deadline = time.monotonic() + 120
    while not list((folder / "checkpoints").glob("step-*[3-9].ckpt")):
        assert worker.poll() is None, worker.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    worker.kill()
    worker.communicate()
    assert not (folder / "result.json").exists()
    assert "resuming base after update" in aiayn(*arguments).stdout
    whole = trained(compose.compose_row(*arguments[1:]), tmp_path / "whole")
    assert equal(final_state(folder), final_state(whole))
    assert rows(folder) == rows(whole)
    assert "nothing to do" in aiayn(*arguments).stdout


def test_a_loss_that_is_not_finite_stops_and_exits_with_3(toy_run, tmp_path, at_each_step):
    folder = tmp_path / "run"

    def poison(module, update):
        if update.number == 3:
            with torch.no_grad():
                module.transformer.decoder[0].feed_forward[0].weight[0, 0] = float("inf")

    at_each_step(poison)
    assert train.main(folder, toy_run) == exit_codes.NON_FINITE
    assert "update 4" in records.read_json(folder / records.FAILURE)["cause"]
    # Neither recorded, measured nor saved, all of which an update with an even number is
    assert [row["step"] for row in rows(folder)] == [1, 2, 2, 3]
    assert final_state(folder)["updates_done"] == 3
    with pytest.raises(NonFinite, match="first parameter with a non-finite gradient"):
        train.train(toy_run, folder)


def test_a_row_beyond_table_3_trains_uncompiled(toy_run, tmp_path, monkeypatch):
    run = vary(toy_run, hardware={"compile": True}, training={"max_steps": 1})
    monkeypatch.setattr(Transformer, "compile_stacks", lambda *_, **__: 1 / 0)
    trained(vary(run, model={"positions": "none"}), tmp_path / "beyond")
    with pytest.raises(ZeroDivisionError):  # control
        train.train(run, tmp_path / "base")


@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_algorithms_are_used_where_asked_for(toy_run, tmp_path, at_each_step, deterministic):
    seen = []
    at_each_step(lambda module, update: seen.append(torch.are_deterministic_algorithms_enabled()))
    trained(vary(toy_run, hardware={"deterministic": deterministic}), tmp_path / "run")
    assert seen == [deterministic] * 6


def test_the_seed_decides_weights_order_and_dropout(toy, tmp_path, monkeypatch, at_each_step):
    """Through the command's own configuration: three seeds of a row that were copies would look like no variance."""
    forward, seen = Dropout.forward, {}

    def look(module, update):
        seen.setdefault("weights", [p.detach().clone() for p in module.transformer.parameters() if p.dim() > 1])
        seen.setdefault("orders", []).append([batch.source.tolist() for batch in update.batches])
        seen["masks"] = []  # of the last update

    def watched_forward(self, x, randomness=None):
        y = forward(self, x, randomness)
        if self.training:
            seen["masks"].append((y == 0)[:5])
        return y

    at_each_step(look)
    monkeypatch.setattr(Dropout, "forward", watched_forward)
    found = []
    for number, seed in enumerate((1, 1, 2, 3)):
        seen.clear()
        run = compose.compose_row(*toy, f"seed={seed}", "model.dropout=0.5", f"output={tmp_path}/{number}")
        trained(run, folders.run_folder(run))
        found.append({**seen, "end": final_state(folders.run_folder(run))})
    one, again, *others = found
    assert equal(one, again)
    assert len(one["weights"]) > 10
    assert len(one["orders"]) == 6
    assert len(one["masks"]) >= 7  # of one layer on each side
    for this, other in itertools.combinations((one, *others), 2):
        assert not any(torch.isclose(a, b).any() for a, b in zip(this["weights"], other["weights"], strict=True))
        assert all(a != b for a, b in zip(this["orders"], other["orders"], strict=True))
        # However the updates are split, the first tokens of each side stand in the first micro-batch
        for a, b in zip(this["masks"][:7], other["masks"][:7], strict=True):
            rows = min(len(a), len(b))
            assert 0.2 < float((a[:rows] != b[:rows]).double().mean()) < 0.8


def test_a_shorter_run_is_the_beginning_of_a_longer_one(toy_run, tmp_path):
    """Nothing in the recipe knows how long a run is: one with fewer updates is the beginning of one with more."""
    found = {}
    for updates, seed in ((6, 1), (9, 1), (9, 2)):
        run = dataclasses.replace(vary(toy_run, training={"max_steps": updates}), seed=seed)
        folder = trained(run, tmp_path / f"{updates}-{seed}")
        found[updates, seed] = [row for row in rows(folder) if "train/loss" in row]
    assert [len(each) for each in found.values()] == [6, 9, 9]
    assert found[9, 1][:6] == found[6, 1]
    assert found[9, 2][:6] != found[6, 1]  # control


@pytest.mark.parametrize(
    ("precision", "products", "weights"),
    [("bf16-mixed", torch.bfloat16, torch.float32), ("64-true", torch.float64, torch.float64)],
)
def test_products_are_computed_in_the_precision_asked_for(toy, tmp_path, precision, products, weights):
    seen = []

    def watch(module, inputs, output):
        if isinstance(module, Linear) and module.training and torch.is_grad_enabled():
            seen.append((output.dtype, module.weight.dtype))

    run = compose.compose_row(*toy, f"hardware.precision={precision}", "training.max_steps=1")
    with register_module_forward_hook(watch):
        trained(run, folders.run_folder(run))
    assert len(seen) >= 9  # two layers and their products, once at least
    assert set(seen) == {(products, weights)}


@pytest.mark.parametrize("threads", [1, 2])
def test_a_run_has_as_many_threads_as_it_asks_for(toy, tmp_path, monkeypatch, at_each_step, threads):
    seen = set()
    at_each_step(lambda module, update: seen.add(torch.get_num_threads()))
    run = compose.compose_row(*toy, f"hardware.threads={threads}", "training.max_steps=1")
    try:
        trained(run, folders.run_folder(run))
    finally:
        torch.set_num_threads(1)
    assert seen == {threads}
    (tmp_path / "python").write_text(f"#!/bin/sh\necho $OMP_NUM_THREADS $MKL_NUM_THREADS > {tmp_path}/environment\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(jobs.sys, "executable", str(tmp_path / "python"))
    one_run.run_here(dataclasses.replace(run, seed=2))
    assert (tmp_path / "environment").read_text() == f"{threads} {threads}\n"


def test_other_ranks_than_the_run_has_devices_are_refused(toy_run, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"hardware\.devices=1: torchrun started 3 ranks; start as many"):
        train.train(toy_run, tmp_path)


@pytest.mark.parametrize("rank", ["", "0"], ids=["alone", "rank 0 of several"])
def test_one_worker_a_folder(toy_run, tmp_path, monkeypatch, rank):
    if rank:
        monkeypatch.setenv("RANK", rank)
    with storage.lock(tmp_path / ".lock", wait=False):
        assert train.main(tmp_path, toy_run) == exit_codes.STORAGE
    assert "in use by process" in records.read_json(tmp_path / records.FAILURE)["cause"]


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (LookupError("not to be broadcast"), exit_codes.FAILED),
        (ConfigError("not to be broadcast"), exit_codes.WRONG_CONFIGURATION),
        (PermissionError(13, "not to be broadcast", "a/path"), exit_codes.STORAGE),  # of a file
        (OSError("not to be broadcast"), exit_codes.FAILED),
    ],
)
def test_only_an_unforeseen_error_leaves_its_traceback(toy_run, tmp_path, at_each_step, capsys, error, code):
    def break_off(module, update):
        raise error

    at_each_step(break_off)
    assert train.main(tmp_path, toy_run) == code
    assert "not to be broadcast" in records.read_json(tmp_path / records.FAILURE)["cause"]
    assert ("Traceback" in capsys.readouterr().err) == (code == exit_codes.FAILED)


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[/a/gloo/tcp/pair.cc:5] Read error [::1]:7: Broken pipe. This is typically a bug", "Broken pipe"),
        ("[enforce fail at /a/gloo/tcp/pair.cc:3] length <= nbytes. 8 vs 4", ""),
        ("NCCL error: remote process exited\nncclRemoteError", "process exited"),
        ("NCCL error: invalid usage", ""),
    ],
)
def test_only_a_lost_connection_is_a_lost_rank(text, reason):
    cause = train.lost_rank((torch.distributed.DistBackendError if "NCCL" in text else RuntimeError)(text))
    assert cause.endswith(reason)
    assert cause.startswith("another rank has ended") == bool(reason)


@pytest.mark.parametrize("other", [("a" * 12, 5), ("a" * 12, 7), ("b" * 12, 5)])
def test_ranks_that_begin_from_other_data_or_updates_are_refused(monkeypatch, other):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda x, own: x.__setitem__(slice(2), [own, other]))
    said = "rank 0: data a+, update 5; rank 1: data {}, update {}$".format(*other)
    with nullcontext() if other == ("a" * 12, 5) else pytest.raises(ConfigError, match=said):
        train.refuse_unlike("a" * 64, 5)


def test_out_of_memory_is_one_line_and_the_run_resumes(toy_run, tmp_path, at_each_step, capsys):
    errors = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")]

    def fail_once(module, update):
        if update.number == 3 and errors:
            raise errors.pop()

    at_each_step(fail_once)
    assert train.main(tmp_path, toy_run) == exit_codes.FAILED
    key, *_, remedy = records.read_json(tmp_path / records.FAILURE)["cause"].split()
    assert (key, remedy) == ("hardware.tokens_per_micro_batch=40:", "hardware.tokens_per_micro_batch=20")
    assert "Traceback" not in capsys.readouterr().err
    assert train.main(tmp_path, toy_run) == exit_codes.DONE


def test_a_gpu_without_bf16_or_compiler_is_refused_first(tmp_path, monkeypatch):
    def refused(*words: str) -> str:
        with pytest.raises(ConfigError) as caught:
            train.train(compose.compose_row("hardware=gpu", f"prepared={tmp_path}", *words), tmp_path)
        return str(caught.value)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(train.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert refused().endswith("give hardware.precision=32-true hardware.compile=false")
    assert "no gcc or clang" in refused("hardware.precision=32-true")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    (tmp_path / "clang").touch()
    assert f"no {tmp_path}/Python.h" in refused()
    for words in (["experiment=f_unscaled"], ["hardware.compile=false"]):  # what compiles nothing
        train.check_gpu(compose.compose_row("hardware=gpu", *words))


@pytest.mark.slow
def test_a_model_learns_to_reverse_digits(digits, tmp_path):
    """The system test: data, training, decoding and scores together reach what the task allows."""
    model = ("num_layers=2", "d_model=64", "d_ff=128", "num_heads=4", "d_k=16", "d_v=16", "dropout=0.0")
    recipe = ("max_steps=1800", "warmup_steps=300", "tokens_per_update=400", "learning_rate_factor=0.5")
    words = [*(f"model.{word}" for word in model), *(f"training.{word}" for word in (*recipe, "label_smoothing=0.0"))]
    run = compose.compose_row(*digits, "scale=paper", *words, "wandb.mode=disabled", f"output={tmp_path}")
    dev = json.loads((trained(run, tmp_path / "run") / "result.json").read_text())["dev"]
    assert dev["ppl"] < 1.1
    assert dev["bleu"]["sacrebleu"] > 95
