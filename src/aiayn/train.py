"""Trains one run in this process, evaluates it and writes `result.json`: `python -m aiayn.train <run folder>`."""

import dataclasses
import datetime
import logging
import os
import platform
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy

from aiayn import checkpoint, config, jobs, storage
from aiayn.callbacks import Bar, Dev, Interrupted, Record, Save
from aiayn.corpus import DataError
from aiayn.dataset import Dataset
from aiayn.evaluate import build, evaluate, teacher_forced_nats
from aiayn.lightning_data import LightningUpdates
from aiayn.lightning_model import LightningTransformer, NonFinite
from aiayn.prepare import prepare
from aiayn.transformer import Transformer

PACKAGES = (
    "aiayn",
    "torch",
    "pytorch-lightning",
    "hydra-core",
    "wandb",
    "sacrebleu",
    "sacremoses",
    "sentencepiece",
    "numpy",
)


RECIPE = (
    *("warmup_steps", "label_smoothing", "learning_rate_factor"),
    *("adam_beta1", "adam_beta2", "adam_epsilon"),
)
# The first that fits: a ValueError names a field that the user can change.
CODES = {
    NonFinite: jobs.NON_FINITE,
    DataError: jobs.BAD_DATA,
    storage.StorageError: jobs.STORAGE,
    ValueError: jobs.WRONG_CONFIGURATION,
}


def train(run: config.Config, folder: Path) -> None:
    """Trains the run to its last update, from its newest checkpoint if it has one, and leaves a finished run folder.

    Raises NonFinite, Interrupted, DataError, StorageError: `main` turns them into exit codes.
    """
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    say: Callable[[str], None] = (lambda message: print(message, flush=True)) if rank == 0 else (lambda message: None)
    torch.set_num_threads(run.hardware.threads)
    dataset = prepare(run, lambda message: say(f"prepare: {message}"))
    transformer = build(run, dataset.tokenizer.vocab_size)
    module = LightningTransformer(
        transformer,
        d_model=run.model.d_model,
        seed=run.seed,
        **{key: getattr(run.training, key) for key in RECIPE},
    )
    saved = checkpoint.newest(folder / "checkpoints")
    if saved:
        with checkpoint.fitting(saved[0]):
            module.restore(checkpoint.VerifiedCheckpointIO().load_checkpoint(saved[0]))
        say(f"resuming {run.experiment} after update {module.updates_done} of {run.training.max_steps}")
    with view(run, folder, rank) as show:
        record = Record(folder / "metrics.jsonl", module.updates_done, show, writes=rank == 0)
        if module.updates_done < run.training.max_steps:
            fit(run, folder, module, dataset, record, ranks)
        if rank == 0:
            say(f"{run.experiment}: decoding the dev set")
            finish(run, folder, transformer, dataset, record, show)


def fit(
    run: config.Config, folder: Path, module: LightningTransformer, dataset: Dataset, record: Record, ranks: int
) -> None:
    """Runs the remaining updates."""
    training, start = run.training, module.updates_done
    pairs, tokens = dataset.pairs("dev"), run.hardware.tokens_per_micro_batch
    backend = "gloo" if run.hardware.accelerator == "cpu" else "nccl"
    # The only buffers are tables of sinusoids, which each rank grows as its own sentences need
    ddp = DDPStrategy(process_group_backend=backend, broadcast_buffers=False)
    trainer = pl.Trainer(
        accelerator=run.hardware.accelerator,
        devices=run.hardware.devices,
        strategy=ddp if ranks > 1 else "auto",
        precision=run.hardware.precision,  # type: ignore[arg-type]
        max_steps=training.max_steps - start,
        max_epochs=-1,
        plugins=[checkpoint.VerifiedCheckpointIO()],
        callbacks=[
            record,
            Dev(
                record,
                lambda: teacher_forced_nats(module.transformer, pairs, tokens),
                training.dev_every,
                training.max_steps,
            ),
            Save(
                record, folder / "checkpoints", training.checkpoint_every, training.keep_checkpoints, training.max_steps
            ),
            Bar(record, run.experiment, start, training.max_steps),
        ],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        inference_mode=False,
        default_root_dir=folder,
    )
    updates = LightningUpdates(
        dataset.pairs("train"),
        tokens_per_update=training.tokens_per_update,
        tokens_per_micro_batch=tokens,
        seed=run.seed,
        start=start,
    )
    trainer.fit(module, datamodule=updates)


def finish(
    run: config.Config,
    folder: Path,
    transformer: Transformer,
    dataset: Dataset,
    record: Record,
    show: Callable[[dict[str, Any]], None],
) -> None:
    """Decodes the dev set and writes the translations, then the result."""
    transformer.to("cuda" if run.hardware.accelerator == "gpu" else "cpu")
    figures, translations = evaluate(transformer, dataset, "dev", run)
    storage.write_text(folder / "translations.txt", "".join(line + "\n" for line in translations))
    show({"step": run.training.max_steps, "dev/bleu": figures["bleu"]["sacrebleu"], "dev/ppl": figures["ppl"]})
    (last,) = checkpoint.newest(folder / "checkpoints")
    result = {
        "schema": 1,
        "experiment": run.experiment + config.variation(run),
        "seed": run.seed,
        "scale": run.scale.name,
        "data": run.data.name,
        "config": dataclasses.asdict(run),
        "status": "finished",
        "params": parameters(run, dataset.tokenizer.vocab_size),
        "params_at_40960_rows": parameters(run, 40960),
        "steps": run.training.max_steps,
        "source_tokens": record.source_tokens,
        "target_tokens": record.target_tokens,
        "train_seconds": round(record.seconds, 3),
        "target_tokens_per_second": round(record.target_tokens / record.seconds, 1),
        "dev": figures,
        "sha256": {
            "data": dataset.sha256,
            "tokenizer": storage.sha256(dataset.folder / "tokenizer.model"),
            "checkpoint": storage.sha256(last),
        },
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}},
        "hardware": {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "threads": run.hardware.threads,
            "devices": run.hardware.devices,
            "accelerator": torch.cuda.get_device_name() if run.hardware.accelerator == "gpu" else "cpu",
        },
        "finished_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    storage.write_json(folder / "result.json", result)
    print(f"{run.experiment}: dev perplexity {figures['ppl']:.3f}, BLEU {figures['bleu']['sacrebleu']:.2f}", flush=True)


def parameters(run: config.Config, vocab_size: int) -> int:
    """Trainable parameters with so many embedding rows, counted on a model without storage."""
    with torch.device("meta"):
        model = build(run, vocab_size)
    return sum(parameter.numel() for parameter in model.parameters())


@contextmanager
def view(run: config.Config, folder: Path, rank: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that shows rows in Weights & Biases; silent when disabled or out of order: it stops no run."""
    if run.wandb.mode == "disabled" or rank > 0:
        yield lambda row: None
        return
    import wandb

    os.environ.setdefault("WANDB_SILENT", "true")
    row = run.experiment + config.variation(run)
    try:
        logged = wandb.init(
            project=run.wandb.project,
            entity=run.wandb.entity,
            mode="online" if run.wandb.mode == "online" else "offline",
            dir=folder,
            id=f"{run.data.name}-{run.scale.name}-{run.experiment}{config.variation(run)}-seed{run.seed}".replace(
                "+", "-"
            ),
            name=f"{row} seed {run.seed}",
            group=f"{run.data.name}-{run.scale.name}",
            tags=[run.experiment, run.scale.name, run.data.name],
            config=dataclasses.asdict(run),
            resume="allow",
            settings=wandb.Settings(init_timeout=60, console="off"),
        )
    except Exception as error:
        warnings.warn(f"W&B is not to be had, the run goes on without it: {error}", stacklevel=2)
        yield lambda row: None
        return
    logged.define_metric("*", step_metric="step")
    try:
        yield logged.log
    finally:
        logged.finish()
        if run.wandb.mode == "offline":
            print(f"W&B: kept offline; to show it: wandb sync {folder}/wandb/offline-run-*", flush=True)


def main(folder: Path) -> int:
    """Trains the run of a folder and returns the exit code; what went wrong is one line and `failure.json`."""
    jobs.die_with_parent()
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    # pytorch-lightning 2.6.6 asks torch 2.13 in a way that the next torch will not answer
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
    try:
        rank = os.environ.get("RANK", "0")
        # Rank 0 of several takes the same lock as a worker that is alone: there is one run to a folder
        with storage.lock(folder / (".lock" if rank == "0" else f".lock{rank}"), wait=False):
            train(config.read(folder / "config.yaml"), folder)
    except Interrupted as error:
        print(error, flush=True)
        return jobs.INTERRUPTED
    except tuple(CODES) as error:
        code = next(code for kind, code in CODES.items() if isinstance(error, kind))
        jobs.fail(folder, code, str(error))
        return code
    except Exception as error:
        traceback.print_exc()
        jobs.fail(folder, jobs.FAILED, f"{type(error).__name__}: {error}")
        return jobs.FAILED
    return jobs.DONE


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
