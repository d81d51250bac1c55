"""A run's model: built from its configuration, loaded from its checkpoints, averaged; and how this process computes."""

import contextlib
import ctypes
import dataclasses
import gc
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from aiayn.alternatives.parts import transformer
from aiayn.alternatives.recurrent import RecurrentModel, TranslationModel
from aiayn.config.compose import unscaled
from aiayn.config.folders import other_runs, run_folder
from aiayn.config.schema import Config, ConfigError, Hardware, OutOfMemory
from aiayn.data.dataset import Dataset
from aiayn.data.prepare import prepare
from aiayn.runs import checkpoint, devices, jobs, records

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them
HELD = contextlib.ExitStack()  # the GPU of this process, until it ends


def compute_with(threads: int) -> None:
    """Sets the number of threads of this process, and has tensors reuse the memory of freed ones."""
    torch.set_num_threads(threads)
    # torch's default for LSTMs and convolutions is TF32; products have float32 as it is
    torch.backends.cudnn.allow_tf32 = False
    # What is imported by now stays: the collector need not look through it again
    gc.collect()
    gc.freeze()
    # glibc gives back to the system what was freed, and asks it for zeroed pages again: a fifth of the time of decoding
    # M_MMAP_MAX=0 would keep blocks of any size, but small ones then settle in their place: 4 GB more in 240 updates
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_MMAP_THRESHOLD, 2**25)  # no more is taken
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def processor() -> str:
    """The name of this machine's processor."""
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return named[1] if named else platform.machine()


def take_gpu(hardware: Hardware) -> None:
    """Takes one GPU for this process until it ends, as a run would; ConfigError where there is none."""
    if hardware.accelerator == "gpu":
        pool = devices.Pool(dataclasses.replace(hardware, devices=1), devices.names(hardware))
        os.environ.update(pool.wait(1, HELD))


@contextlib.contextmanager
def within_memory(hardware: Hardware, key: str, tokens: int, least: int = 1) -> Iterator[None]:
    """Inside, a batch that a GPU cannot hold is OutOfMemory: of all `tokens`, half as many as now are to be tried."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        value = getattr(hardware, key)
        half = max((used := min(value, tokens)) // 2, least)
        remedy = f"give hardware.{key}={half}" if half < used else "no less is possible: it needs a larger GPU"
        raise OutOfMemory(f"hardware.{key}={value}: a batch does not fit the GPU's memory; {remedy}") from error


def build(config: Config, vocab_size: int) -> TranslationModel:
    """The row's model, initialised from its seed."""
    torch.manual_seed(config.seed)
    fidelity, sizes = config.fidelity, dataclasses.asdict(config.model)
    rows = fidelity.rows(vocab_size)
    if config.model.kind != "transformer":
        of_lstm = {key: sizes[key] for key in ("num_layers", "d_model", "dropout")} | {"vocab_size": rows}
        model: TranslationModel = RecurrentModel(**of_lstm, attention=config.model.kind == "rnn_attention")
    else:
        model = transformer(
            **sizes,
            max_length=config.data.max_length,
            vocab_size=rows,
            sinusoids_in_halves=fidelity.sinusoids == "halves",
            target_space=fidelity.target_space,
            zero_start=fidelity.zero_start,
        )
    # Before a checkpoint is loaded: weights of 64 bits would lose half of them in a model of 32
    return model.double() if config.hardware.precision == "64-true" else model


def parameters(run: Config, vocab_size: int) -> int:
    """Trainable parameters with so many embedding rows, counted on a model without storage."""
    with torch.device("meta"):
        model = build(run, vocab_size)
    return sum(parameter.numel() for parameter in model.parameters())


def trained(config: Config) -> tuple[TranslationModel, Dataset, Path, int]:
    """The mean of a run's last `average` checkpoints, its corpus, folder and update; ConfigError if it has too few."""
    if not run_folder(config).exists():  # then the row's own beam search: the weights are the same
        config = dataclasses.replace(config, decoding=unscaled(config.experiment, config).decoding)
    jobs.check(config)
    folder = run_folder(config)
    paths = checkpoint.newest(folder / "checkpoints", config.average)
    if not paths:
        cause = f"nothing is trained in {folder}; train it with the same arguments{other_runs(config)}"
        if (run := records.read_run(folder)).status == "failed":
            cause = f"the training in {folder} failed: {run.cause}"
        if jobs.is_finished(config):
            missing = "but its checkpoints are not here; delete the folder to train it again"
            cause = f"the run in {folder} is finished, {missing}"
        raise ConfigError(f"experiment={config.experiment}: {cause}")
    if len(paths) < config.average:
        kept, made = config.training.keep_checkpoints, config.training.max_steps // config.training.checkpoint_every
        needs = [f"training.keep_checkpoints={config.average}"] * (kept < config.average)
        needs += ["a smaller training.checkpoint_every"] * (made < config.average)
        more = f"train {'with ' + ' and '.join(needs) if needs else 'longer'}; delete a finished run first"
        raise ConfigError(f"average={config.average}: {folder} keeps only {len(paths)}; {more}")
    with checkpoint.fitting(paths[0]):
        weights = checkpoint.average(paths)  # now: while this command waits or prepares, training may remove them
    take_gpu(config.hardware)
    dataset = prepare(config, lambda message: print(f"aiayn: {message}", file=sys.stderr))  # stdout may be translations
    jobs.check_data(folder, dataset.sha256)
    model = build(config, dataset.tokenizer.vocab_size)
    with checkpoint.fitting(paths[0]):
        model.load_state_dict({name.removeprefix("transformer."): value for name, value in weights.items()})
    return model.to(config.hardware.device).eval(), dataset, folder, checkpoint.step_of(paths[0])
