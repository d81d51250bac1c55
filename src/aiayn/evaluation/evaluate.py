"""`aiayn evaluate`: perplexity, bits per character and BLEU of a trained run on a split."""

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch

from aiayn.alternatives.recurrent import TranslationModel
from aiayn.config.folders import run_folder, variation
from aiayn.config.schema import Config
from aiayn.core import progress, storage
from aiayn.data.dataset import SIDES, Dataset, Pairs
from aiayn.data.parallel_text import Split
from aiayn.data.update_plan import evaluation_batches, gather
from aiayn.evaluation import metrics
from aiayn.evaluation.search import decoder_of, search
from aiayn.paper.loss import label_smoothed_cross_entropy
from aiayn.runs.models import compute_with, trained, within_memory


def teacher_forced_nats(
    model: TranslationModel, pairs: Pairs, tokens_per_batch: int, check: Callable[[], None] = lambda: None
) -> tuple[float, int]:
    """The references' unsmoothed nats and tokens, EOS included; `check`, called before each batch, may raise."""
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
    model: TranslationModel, dataset: Dataset, split: Split, config: Config
) -> tuple[dict[str, Any], list[str]]:
    """The figures of `result.json` for a split, and the translations, one for each line of it."""
    texts = {side: dataset.texts(split, side) for side in SIDES}
    for side, sentences in texts.items():
        unseen = dataset.manifest["splits"][split][f"{side}_unknown"]
        if unseen > 0.01 * sum(map(len, sentences)):
            print(f"warning: {split} has {unseen} {side} characters or subwords that training has not", flush=True)
    pairs = dataset.pairs(split)
    tokens = len(pairs.target_ids)
    with within_memory(config.hardware, "tokens_per_micro_batch", tokens, config.data.max_length):
        nats, _ = teacher_forced_nats(model, pairs, config.hardware.tokens_per_micro_batch)
    encoded = np.split(pairs.source_ids, pairs.source_offsets[1:-1])
    sources = [ids[:-1] if text.strip() else ids[:0] for ids, text in zip(encoded, texts["source"], strict=True)]
    with progress.counted(f"{config.experiment}: decoding {split}", len(pairs), "sentences") as done:
        hypotheses = search(decoder_of(model), sources, config.decoding, config.hardware, done)
    translations = dataset.tokenizer.decode([hypothesis.ids for hypothesis in hypotheses])
    figures = {
        "ppl": metrics.perplexity(nats, tokens),
        "nats": nats,
        "tokens": tokens,
        "bits_per_character": nats / math.log(2) / sum(map(len, texts["target"])),
        **metrics.bleu(translations, texts["target"], config.data.target_language),
    }
    return figures, translations


def evaluate_trained(config: Config) -> tuple[Dataset, str]:
    """Evaluates a trained run and prints the figures. Returns its corpus and the evaluation's name, `test-average5`.

    Writes `evaluation-<name>.json` and `translations-<name>.txt` beside the run's own. Raises what `trained` raises.
    """
    compute_with(config.hardware.threads)
    model, dataset, folder, updates = trained(config)
    split = cast(Split, config.split)
    figures, translations = evaluate(model, dataset, split, config)
    # Of another beam search than the row's own: beside its figures, not in their place
    decoded = "" if folder == run_folder(config) else variation(config)
    name = f"{split}-average{config.average}{decoded}"
    low, high = figures["bleu_ci95"]
    unfinished = f", after {updates} of {config.training.max_steps} updates" * (updates < config.training.max_steps)
    print(f"{config.experiment} seed {config.seed}, {config.data.name} {split}, scale {config.scale.name}{unfinished}:")
    counted = f"{figures['tokens']} tokens, {dataset.tokenizer.vocab_size} subwords, tokenizer={config.tokenizer}"
    print(f"perplexity {figures['ppl']:.3f} per token ({counted})")
    print(f"{figures['bits_per_character']:.4f} bits per character")
    for kind, signature in figures["signatures"].items():
        value = f"{figures['bleu'][kind]:6.2f}" if kind in figures["bleu"] else "     –"
        interval = f"  95 % interval {low:.2f} to {high:.2f}" if kind == "sacrebleu" else ""
        print(f"BLEU {kind:9} {value}{interval}  {signature}")
    # Only now: where the folder may not be written the figures are known all the same
    storage.write_json(folder / f"evaluation-{name}.json", {"steps": updates, **figures})
    storage.write_text(folder / f"translations-{name}.txt", "".join(line + "\n" for line in translations))
    print(f"translations: {folder}/translations-{name}.txt")
    return dataset, name
