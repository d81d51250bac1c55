"""`aiayn evaluate`: perplexity, bits per character and BLEU of a trained run on a split."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import torch

from aiayn.alternatives.parts import transformer
from aiayn.alternatives.recurrent import RecurrentModel, TranslationModel
from aiayn.config.compose import decoded_as_its_row
from aiayn.config.folders import in_other_precisions, run_folder, variation
from aiayn.config.schema import Config, ConfigError
from aiayn.core import progress, storage
from aiayn.data.encoded import Dataset, Pairs
from aiayn.data.prepare import prepare
from aiayn.data.update_plan import evaluation_batches, gather
from aiayn.evaluation import metrics
from aiayn.evaluation.search import search
from aiayn.paper.fast.cross_entropy import label_smoothed_cross_entropy
from aiayn.paper.fast.model import accelerate
from aiayn.paper.fast.process import compute_with
from aiayn.runs import checkpoint, jobs

HeldOut = Literal["dev", "test"]


def build(config: Config, vocab_size: int) -> TranslationModel:
    """The row's model, initialised from its seed."""
    torch.manual_seed(config.seed)
    fidelity, sizes = config.fidelity, dataclasses.asdict(config.model)
    rows, wide = fidelity.rows(vocab_size), config.hardware.precision == "64-true"
    if config.model.kind != "transformer":
        of_lstm = {key: sizes[key] for key in ("num_layers", "d_model", "dropout")}
        recurrent = RecurrentModel(**of_lstm, attention=config.model.kind == "rnn_attention", vocab_size=rows)
        return recurrent.double() if wide else recurrent
    model = transformer(
        **sizes,
        max_length=config.data.max_length,
        vocab_size=rows,
        sinusoids_in_halves=fidelity.sinusoids == "halves",
        target_space=fidelity.target_space,
        zero_start=fidelity.zero_start,
    )
    # Before a checkpoint is loaded: weights of 64 bits would lose half of them in a model of 32
    return accelerate(model.double() if wide else model)


def parameters(run: Config, vocab_size: int) -> int:
    """Trainable parameters with so many embedding rows, counted on a model without storage."""
    with torch.device("meta"):
        model = build(run, vocab_size)
    return sum(parameter.numel() for parameter in model.parameters())


def teacher_forced_nats(
    model: TranslationModel, pairs: Pairs, tokens_per_batch: int, check: Callable[[], None] = lambda: None
) -> tuple[float, int]:
    """The negative log-likelihood of the references in nats, unsmoothed, and their tokens, EOS included.

    `check` is called before each batch, and may raise.
    """
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    total = 0.0
    with torch.no_grad():
        for sentences in evaluation_batches(pairs.source_lengths, pairs.target_lengths, tokens_per_batch):
            check()
            batch = gather(pairs, sentences).to(device)
            _, nats = label_smoothed_cross_entropy(model.hidden(batch), model.embedding.weight, batch.target, 0.0)
            total += float(nats)
    model.train(training)
    return total, len(pairs.target_ids)


def evaluate(
    model: TranslationModel, dataset: Dataset, split: HeldOut, config: Config, done: Callable[[int], None] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """The figures of `result.json` for a split, and the translations, one for each line of it."""
    pairs = dataset.pairs(split)
    nats, tokens = teacher_forced_nats(model, pairs, config.hardware.tokens_per_micro_batch)
    offsets = pairs.source_offsets
    sources = [
        pairs.source_ids[offsets[i] : offsets[i + 1] - 1 if text.strip() else offsets[i]]
        for i, text in enumerate(dataset.texts(split, "source"))
    ]
    hypotheses = search(model, sources, config.decoding, config.hardware, done)
    translations = dataset.tokenizer.decode([hypothesis.ids for hypothesis in hypotheses])
    references = dataset.texts(split, "target")
    scores = metrics.bleu(translations, references, config.data.target_language)
    figures = {
        "ppl": metrics.perplexity(nats, tokens),
        "nats": nats,
        "tokens": tokens,
        "bits_per_character": metrics.bits_per_character(nats, sum(len(line) for line in references)),
        **dataclasses.asdict(scores),
    }
    return figures, translations


def trained(config: Config) -> tuple[TranslationModel, Dataset, Path]:
    """The model that a run has trained, its corpus and its folder; the mean of the last `average` checkpoints if asked.

    It may be decoded in another way than the row's own: the weights are the same. Raises ConfigError when the run has
    no checkpoint yet, or fewer than are to be averaged, or another meaning.
    """
    if not run_folder(config).exists():
        config = decoded_as_its_row(config)
    jobs.check(config)
    folder = run_folder(config)
    paths = checkpoint.newest(folder / "checkpoints", config.average)
    if not paths and jobs.is_finished(config):
        raise ConfigError(
            f"experiment={config.experiment}: the run in {folder} is finished, but its checkpoints are not here;"
            " delete the folder to train it again"
        )
    if not paths:
        raise ConfigError(
            f"experiment={config.experiment}: nothing is trained in {folder}; train it with the same arguments"
            f"{in_other_precisions(config)}"
        )
    if len(paths) < config.average:
        more = f"train with training.keep_checkpoints={config.average}"
        if config.training.keep_checkpoints >= config.average:
            more = "train longer, or with a smaller training.checkpoint_every"
        raise ConfigError(f"average={config.average}: {folder} keeps only {len(paths)}; {more}")
    dataset = prepare(config, lambda message: None)
    jobs.check_data(folder, dataset.sha256)
    model = build(config, dataset.tokenizer.vocab_size)
    weights = checkpoint.average(paths)
    with checkpoint.fitting(paths[0]):
        model.load_state_dict({name.removeprefix("transformer."): value for name, value in weights.items()})
    return model.to(config.hardware.device).eval(), dataset, folder


def evaluate_trained(config: Config) -> tuple[Dataset, str]:
    """Evaluates a trained run and prints the figures. Returns its corpus and the evaluation's name, `test-average5`.

    Writes `evaluation-<name>.json` and `translations-<name>.txt` beside the run's own. Raises what `trained` raises.
    """
    compute_with(config.hardware.threads)
    model, dataset, folder = trained(config)
    split = cast(HeldOut, config.split)
    with progress.counted(f"decoding {split}", len(dataset.pairs(split)), "sentences") as done:
        figures, translations = evaluate(model, dataset, split, config, done)
    # Of another beam search than the row's own: beside its figures, not in their place
    decoded = "" if folder == run_folder(config) else variation(config)
    name = f"{split}-average{config.average}{decoded}"
    updates, last = checkpoint.step_of(checkpoint.newest(folder / "checkpoints")[0]), config.training.max_steps
    storage.write_text(folder / f"translations-{name}.txt", "".join(line + "\n" for line in translations))
    storage.write_json(folder / f"evaluation-{name}.json", {"steps": updates, **figures})
    low, high = figures["bleu_ci95"]
    unfinished = f", after {updates} of {last} updates" if updates < last else ""
    print(f"{config.experiment} seed {config.seed}, {config.data.name} {split}, scale {config.scale.name}{unfinished}:")
    print(
        f"perplexity {figures['ppl']:.3f} per token"
        f" ({figures['tokens']} tokens, {dataset.tokenizer.vocab_size} subwords,"
        f" tokenizer={config.tokenizer})"
    )
    print(f"{figures['bits_per_character']:.4f} bits per character")
    for kind, value in figures["bleu"].items():
        interval = f"  95 % interval {low:.2f} to {high:.2f}" if kind == "sacrebleu" else ""
        print(f"BLEU {kind:9} {value:6.2f}{interval}  {figures['signatures'][kind]}")
    print(f"translations: {folder}/translations-{name}.txt")
    return dataset, name
