"""Trains one run in this process, evaluates it and writes `result.json`."""

import contextlib
import dataclasses
import datetime
import logging
import os
import platform
import re
import sys
import sysconfig
import time
import traceback
import warnings
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments.lightning import LightningEnvironment

from aiayn.alternatives.recurrent import TranslationModel
from aiayn.config import compose, folders
from aiayn.config.schema import Config, ConfigError
from aiayn.core import exit_codes, progress, signals, storage
from aiayn.core.signals import StopFlag
from aiayn.data.dataset import Dataset
from aiayn.data.prepare import prepare
from aiayn.data.update_plan import rows_of_part
from aiayn.evaluation.evaluate import evaluate, teacher_forced_nats
from aiayn.paper.transformer import Transformer
from aiayn.runs import checkpoint, jobs, records
from aiayn.runs.models import build, compute_with, parameters, processor, within_memory
from aiayn.training.callbacks import Bar, Dev, Record, Save
from aiayn.training.lightning_data import interruptible, updates
from aiayn.training.lightning_model import LightningTransformer
from aiayn.training.wandb_log import TRANSLATIONS, dev_row, samples, view

PACKAGES = (
    *("aiayn", "torch", "pytorch-lightning", "hydra-core", "wandb"),
    *("sacrebleu", "subword-nmt", "sacremoses", "sentencepiece", "numpy"),
)
CODE = records.code()  # taken when it starts: files may change while it trains
# How long a rank waits for another's word before it says why it failed.
PEER_SECONDS = 2.0


class Trainer(pl.Trainer):
    """Lightning's, which leaves signals to us: `Save` ends a run after an update that all ranks know of."""

    received_sigterm = False


def train(run: Config, folder: Path) -> None:
    """Trains the run to its last update, from its newest checkpoint if it has one, and leaves a finished run folder."""
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if ranks != run.hardware.devices:
        raise ConfigError(f"hardware.devices={run.hardware.devices}: torchrun started {ranks} ranks; start as many")
    on_gpu = run.hardware.accelerator == "gpu"
    if on_gpu:
        check_gpu(run)
    compute_with(run.hardware.threads)
    if ranks > 1:  # before the data: the others soon miss a rank that has none
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else None
        torch.distributed.init_process_group("nccl" if on_gpu else "gloo", device_id=device)
        if device:
            torch.cuda.set_device(device)  # for what torch gathers from all ranks
    with progress.stages("prepare") if rank == 0 else contextlib.nullcontext(lambda message: None) as report:
        dataset = prepare(run, report)
    if rank == 0:
        jobs.check_data(folder, dataset.sha256)
    module = LightningTransformer(build(run, dataset.tokenizer.vocab_size), run.training, run.seed)
    last = run.training.max_steps
    if saved := checkpoint.newest(folder / records.CHECKPOINTS):
        with checkpoint.fitting(saved[0]):
            module.restore(checkpoint.load(saved[0]))
        if rank == 0:
            print(f"resuming {run.experiment} after update {module.updates_done} of {last}", flush=True)
    if ranks > 1:
        refuse_unlike(dataset.sha256, module.updates_done)
    if not saved and (folder / records.RESULT).exists() and jobs.is_finished(run):
        return  # copied without checkpoints from where its text has other paths: its hash is known only now
    with view(run, folder, rank) as show:
        record = Record(folder / records.METRICS, module.updates_done, show, rank == 0)
        if module.updates_done < last:
            with StopFlag() as stop:
                fit(run, folder, module, dataset, record, stop)
            stop.check()  # it came during the last update
        if rank == 0:
            finish(run, folder, module.transformer, dataset, record)


def refuse_unlike(sha256: str, updates_done: int) -> None:
    """ConfigError on every rank alike unless all have the same data and go on from the same update."""
    starts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(starts, (sha256[:12], updates_done))
    if len(set(starts)) > 1:
        found = "; ".join(f"rank {rank}: data {data}, update {step}" for rank, (data, step) in enumerate(starts))
        raise ConfigError(f"output and prepared: must be folders that all machines share; the ranks have {found}")


def check_gpu(run: Config) -> None:
    """ConfigError where a GPU lacks bf16, or this machine what Triton compiles with (as its runtime/build.py looks)."""
    if run.hardware.precision == "bf16-mixed" and torch.cuda.get_device_capability() < (8, 0):
        remedy = "hardware.precision=32-true hardware.compile=false"
        raise ConfigError(f"hardware.precision=bf16-mixed: needs an Ampere GPU or a newer one; give {remedy}")
    header = sysconfig.get_path("include") + "/Python.h"
    compilers = [f"{folder}/{name}" for folder in os.get_exec_path() for name in ("gcc", "clang")]
    has_compiler = "CC" in os.environ or any(map(os.path.exists, compilers))
    if run.hardware.compile and run.model.in_table3 and not (has_compiler and os.path.exists(header)):
        lacking = header if has_compiler else "gcc or clang"
        raise ConfigError(f"hardware.compile=true: there is no {lacking}; install it, or give hardware.compile=false")


def fit(
    run: Config, folder: Path, module: LightningTransformer, dataset: Dataset, record: Record, stop: StopFlag
) -> None:
    """Runs the remaining updates. Every rank holds the whole model: with gradient and moments big takes 3.5 GB."""
    training, tokens = run.training, run.hardware.tokens_per_micro_batch
    deterministic, ranks = run.hardware.deterministic, run.hardware.devices
    rows = rows_of_part(training.tokens_per_update, tokens, ranks)
    # Else it would write to all memory before it is used
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if run.hardware.compile and run.model.in_table3:
        from torch._inductor import config as compiler  # takes seconds

        # Else each process would choose its kernels by how fast they are at that moment; no public name sets it
        compiler.deterministic = deterministic
        assert isinstance(module.transformer, Transformer)
        module.transformer.compile_stacks(rows)
    measure = partial(teacher_forced_nats, module.transformer, dataset.pairs("dev"), tokens)
    if ranks == 1:  # several stop after the same update
        measure = partial(measure, check=stop.check)
    on_gpu, local_rank = run.hardware.accelerator == "gpu", int(os.environ.get("LOCAL_RANK", 0))
    module.ranks = ranks
    every, keep, last = training.checkpoint_every, training.keep_checkpoints, training.max_steps
    bar, save = Bar(record, run.experiment, last), Save(record, folder / records.CHECKPOINTS, every, keep, last, stop)
    trainer = Trainer(
        accelerator=run.hardware.accelerator,
        # Lightning trains one device and knows of no other rank: the sum of the gradients and the signals are ours
        devices=[local_rank] if on_gpu else 1,
        deterministic=deterministic,
        precision=run.hardware.precision,  # type: ignore[arg-type]
        max_steps=last - record.start,
        # Under SLURM or torchrun Lightning would take their idea of the ranks for ours
        plugins=[LightningEnvironment()],
        callbacks=[record, Dev(record, measure, training.dev_every, last), bar, save],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module.wants_to_stop = lambda: bool(stop.asked)
    sizes = {"tokens_per_update": training.tokens_per_update, "tokens_per_micro_batch": tokens}
    rank = int(os.environ.get("RANK", 0))
    stream = updates(dataset.pairs("train"), **sizes, seed=run.seed, start=record.start, rank=rank, ranks=ranks)
    fitting = within_memory(run.hardware, "tokens_per_micro_batch", rows, run.data.max_length)
    with fitting, bar.progress:  # off the screen before an error is printed
        trainer.fit(module, interruptible(stream, stop, ranks))


def finish(run: Config, folder: Path, transformer: TranslationModel, dataset: Dataset, record: Record) -> None:
    """Decodes the dev set and writes the translations, then the result."""
    transformer.to(run.hardware.device)
    print(f"{run.experiment}: decoding the dev set", flush=True)
    figures, translations = evaluate(transformer, dataset, "dev", run)
    record.add_dev(run.training.max_steps, figures["nats"], figures["tokens"])  # unless a signal left no time for it
    storage.write_text(folder / "translations.txt", "".join(line + "\n" for line in translations))
    sides = (dataset.texts("dev", "source"), dataset.texts("dev", "target"), translations)
    record.view({"step": run.training.max_steps, **dev_row(figures), TRANSLATIONS: samples(*sides)})
    (last,) = checkpoint.newest(folder / records.CHECKPOINTS)
    device = torch.cuda.get_device_name() if run.hardware.accelerator == "gpu" else processor()
    at_work = {"threads": run.hardware.threads, "devices": run.hardware.devices, "accelerator": device}
    tokenizer, weights = (storage.sha256(path) for path in (dataset.folder / "tokenizer.model", last))
    hashes = {"data": dataset.sha256, "tokenizer": tokenizer, "checkpoint": weights, "code": CODE}
    result = {
        "schema": records.SCHEMA,
        "experiment": run.experiment + folders.variation(run),
        "seed": run.seed,
        "scale": run.scale.name,
        "data": folders.setting(run),
        "config": dataclasses.asdict(run),
        "status": "finished",
        "params": parameters(run, dataset.tokenizer.vocab_size),
        "params_at_40960_rows": parameters(run, 40960),
        "steps": run.training.max_steps,
        "source_tokens": record.source_tokens,
        "target_tokens": record.target_tokens,
        "epochs": round(record.target_tokens / len(dataset.pairs("train").target_ids), 3),
        "train_seconds": round(record.seconds, 3),
        "target_tokens_per_second": round(record.target_tokens / record.seconds, 1),
        "dev": figures,
        "sha256": hashes,
        "versions": {"python": platform.python_version(), **versions()},
        "hardware": {"cores": os.cpu_count(), **at_work},
        "finished_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    storage.write_json(folder / records.RESULT, result)
    print(f"{run.experiment}: dev perplexity {figures['ppl']:.3f}, BLEU {dev_row(figures)['dev/bleu']:.2f}", flush=True)


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """The versions of those packages that are installed; without an argument, of all that figures can depend on."""
    installed = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):  # the run goes on without W&B
            installed[name] = metadata.version(name)
    return installed


def quieten() -> None:
    """Leaves out what Lightning says of itself and of torch."""
    for library in ("pytorch_lightning", "lightning_fabric"):
        logging.getLogger(library).setLevel(logging.ERROR)
    # pytorch-lightning 2.6.6 asks torch 2.13 in a way that the next torch will not answer; then Lightning's advice of
    # SLURM and of a GPU that is not asked for; torch's of products in float32 that are not to be rounded
    for words in ("LeafSpec", "srun.*command is available", "GPU available but not used", "TensorFloat32 tensor cores"):
        warnings.filterwarnings("ignore", message=f".*{words}")


def main(folder: Path, run: Config | None = None) -> int:
    """Trains `run`, or the one in the folder, and returns the exit code; a failure is one line and `failure.json`."""
    quieten()
    try:
        rank = os.environ.get("RANK", "0")
        # Rank 0 of several takes the same lock as a worker that is alone: there is one run to a folder
        lock = storage.lock(folder / (".lock" if rank == "0" else f".lock{rank}"), wait=False)
        with signals.interrupting(), lock, storage.errors():
            train(run or compose.read(folder / "config.yaml"), folder)
    except signals.Interrupted as error:
        print(error, flush=True)
        return exit_codes.INTERRUPTED
    except exit_codes.ExplainedError as error:
        return end_with_failure(folder, error.exit_code, str(error))
    except Exception as error:  # of ours: it leaves a traceback
        if isinstance(error, BrokenPipeError) and signals.reader_has_left():
            raise
        if not (cause := lost_rank(error)):
            print(records.without_secrets(traceback.format_exc()), file=sys.stderr, flush=True)
            cause = f"{type(error).__name__}: {error}"
        return end_with_failure(folder, exit_codes.FAILED, cause)
    return exit_codes.DONE


def lost_rank(error: Exception) -> str:
    """The cause, where NCCL, gloo or torch's store has lost the connection to another rank; else empty."""
    of_ranks = isinstance(error, torch.distributed.DistError) or "/gloo/" in str(error)
    if not of_ranks or not re.search("(?i)by peer|broken pipe|time(d )?out|remote process|closed", str(error)):
        return ""
    reason = re.sub(r"^\[\S+\] |\. This is typically.*", "", str(error).splitlines()[0])
    return f"another rank has ended or does not answer; its terminal says why, and this command resumes: {reason}"


def end_with_failure(folder: Path, code: int, cause: str) -> int:
    """Leaves the cause, unless another rank has: the second to fail has only lost its peer. Returns the code."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and code == exit_codes.FAILED:
        time.sleep(PEER_SECONDS)
        if (folder / records.FAILURE).exists():
            return code
    return records.record_failure(folder, code, cause)
