"""What a run takes: operations, time, memory and disk, from its configuration and what is known of the text."""

from collections import Counter
from dataclasses import dataclass

from aiayn.config import folders
from aiayn.config.schema import Config, ConfigError, Model
from aiayn.cost import flops
from aiayn.data import prepare, wmt14
from aiayn.data.encoding import refuse_unfit
from aiayn.data.parallel_text import read
from aiayn.data.update_plan import rows_of_part
from aiayn.paper.attention import KERNEL_WIDTH
from aiayn.paper.loss import chunk_rows
from aiayn.runs.models import parameters

GIGA = 1e9
# CUDA's own context and the workspaces of its matrix products
CONTEXT_BYTES = 1.5e9
# Weights, gradient and Adam's two moments in fp32; a checkpoint has no gradient
STATE_BYTES, CHECKPOINT_BYTES = 16, 12
# A line of metrics.jsonl, and W&B's own record of it
UPDATE_BYTES = 600


@dataclass(frozen=True)
class CorpusStatistics:
    """What is known of the text: token-weighted mean lengths, training tokens, bytes on disk still to be written."""

    source_length: float = flops.LENGTH
    target_length: float = flops.LENGTH
    vocab_size: int | None = None
    target_tokens: int | None = None
    to_write: float = 0.0
    found: str = ""
    complete: bool = True  # nothing is left to download


@dataclass(frozen=True)
class Estimate:
    """One run and what it takes."""

    name: str  # the row's, with a hash when it has overrides of its own
    run: Config
    parameters: int
    flops: float
    memory: float  # bytes on each device
    seconds: float  # of one device

    @property
    def tokens(self) -> int:
        """Target tokens of the whole training, at most."""
        return self.run.training.max_steps * self.run.training.tokens_per_update

    @property
    def checkpoint(self) -> float:
        """Bytes of one checkpoint."""
        return float(CHECKPOINT_BYTES * self.parameters * (2 if self.run.hardware.precision == "64-true" else 1))

    @property
    def disk(self) -> float:
        """Bytes of the finished run folder."""
        training = self.run.training
        kept = min(training.keep_checkpoints, -(-training.max_steps // training.checkpoint_every))
        return kept * self.checkpoint + UPDATE_BYTES * training.max_steps


def estimate(run: Config, corpus: CorpusStatistics) -> Estimate:
    """What a run takes. ConfigError for a precision of which no peak is known."""
    hardware, training = run.hardware, run.training
    if hardware.accelerator == "gpu" and hardware.precision != "bf16-mixed":
        raise ConfigError(
            f"hardware.precision={hardware.precision}: of the GPUs only the peak in bf16-mixed is known; plan with that"
        )
    rows = run.fidelity.rows(corpus.vocab_size or run.data.vocab_size)
    work = flops.planned(run.model, training, rows, corpus.source_length, corpus.target_length)
    device = flops.device(hardware, run.plan.gpu)
    efficiency = run.plan.efficiency or device.efficiency
    rate = device.peak * flops.TERA * efficiency * (hardware.threads if hardware.accelerator == "cpu" else 1)
    count = parameters(run, rows)
    return Estimate(
        run.experiment + folders.variation(run), run, count, work, memory(run, count, rows, corpus), work / rate
    )


def memory(run: Config, count: int, embedding_rows: int, corpus: CorpusStatistics) -> float:
    """Bytes on each device at the widest point of a micro-batch, an estimate: padding and fragments do not count."""
    gpu, hardware = run.hardware.accelerator == "gpu", run.hardware
    narrow = {"bf16-mixed": 2, "32-true": 4, "64-true": 8}[hardware.precision]
    wide = max(narrow, 4)
    mask = 0 if hardware.compile and run.model.in_table3 else wide  # compiled, the backward pass computes masks again
    tokens = rows_of_part(run.training.tokens_per_update, hardware.tokens_per_micro_batch, hardware.devices)
    activations = saved_bytes(run.model, narrow, wide, mask, corpus) * tokens
    states = count * STATE_BYTES * wide / 4 + (2 * count if narrow == 2 else 0)
    # A part's logits and probabilities, narrow and wide; the embedding, its gradient, and the part's share of that
    part = min(tokens, chunk_rows(hardware.device, embedding_rows))
    loss = embedding_rows * (part * 2 * (narrow + wide) + run.model.d_model * (2 * narrow + wide))
    return states + activations + loss + (CONTEXT_BYTES if gpu else 0)


def saved_bytes(model: Model, narrow: int, wide: int, mask: int, corpus: CorpusStatistics) -> float:
    """What the forward pass keeps for the backward pass, for one source and one target token.

    `narrow` bytes has a number in matrix products, `wide` in sums and norms, `mask` an element of a dropout's mask.
    """
    d, h, d_k, d_v = model.d_model, model.num_heads, model.d_k, model.d_v
    dropout = mask * d if model.dropout else 0
    if model.kind != "transformer":
        # Input, gates, cell, its tanh, state: twice by torch's cells on a GPU, cuDNN's are unknown; memory and contexts
        lstm = wide * (16 if narrow < wide else 8) * d + dropout  # without autocast
        attended = narrow * 7 * d + wide * corpus.source_length if model.kind == "rnn_attention" else 0
        return model.num_layers * 2 * lstm + attended + narrow * d
    norm = wide * (d + 2) + dropout
    feed_forward = narrow * (d + model.d_ff) + norm

    def attention(length: float, weights: bool) -> float:
        """The heads' input, queries, keys, values, copies of them, weights if written down, the heads, and the norm."""
        copies, pairs = 0, length * (narrow + wide) if weights else 0.0
        if narrow > 2:  # a CPU writes them down, and computes additive scores once
            copies, pairs = 2 * d_k + d_v, narrow * length * (1 + (d_k if model.scores == "additive" else 0))
        elif weights or max(d_k, d_v) > KERNEL_WIDTH:  # padded, then as torch's products want them
            copies = 2 * d_k + d_v + (2 * (d_k + d_v) if h > 1 or not weights else 0)
        elif d_k != d_v:  # of one width
            copies = 2 * max(d_k, d_v)
        return narrow * (d + h * (2 * (d_k + d_v) + copies)) + h * pairs + norm

    other_scores = model.scores != "scaled"
    with_bias = other_scores or model.positions == "relative"
    encoder = attention(corpus.source_length, with_bias) + feed_forward
    decoder = attention(corpus.target_length, with_bias) + feed_forward
    to_memory = attention(corpus.source_length, other_scores)
    # Each layer makes its own narrow copy of the encoder's output
    memory = narrow * d * (model.num_layers if narrow < wide else 1)
    embeddings, loss = 2 * dropout, narrow * d
    return model.num_layers * (encoder + decoder + to_memory) + memory + embeddings + loss


def corpus_statistics(run: Config) -> CorpusStatistics:
    """The corpus, every byte that is there checked; ConfigError if it cannot be had, DataError if damaged."""
    if (folders.prepared_folder(run) / "manifest.json").exists():
        dataset = prepare.prepare(run, lambda message: None)
        pairs, splits = dataset.pairs("train"), dataset.manifest["splits"].items()
        counts = ", ".join(f"{split} {part['kept']:,} pairs" for split, part in splits)
        found = f"{counts}; prepared, every file as its SHA-256 says"
        vocab_size, tokens = dataset.tokenizer.vocab_size, len(pairs.target_ids)
        return CorpusStatistics(*flops.weighted_lengths(pairs), vocab_size, tokens, 0.0, found)
    prepare.check(run)
    remote = prepare.downloaded(run.data)
    if remote:
        folder = prepare.archives(run)
        absent = wmt14.missing(remote, folder)
        wmt14.check([archive for archive in remote.archives if archive not in absent], folder, lambda message: None)
        to_come, encoded = wmt14.needed(remote, folder, run.scale.pairs)
        state = f"{to_come / GIGA:.1f} GB to download" if absent else "every archive as its SHA-256 says"
        found = f"about {remote.pairs:,} pairs, {state}; not prepared yet: lengths are assumed"
        return CorpusStatistics(to_write=to_come + encoded, found=found, complete=not absent)
    texts, characters = [], 0
    for split, parts in prepare.sources(run.data).items():
        refuse_unfit(split, parts, run.scale)
        dropped, lines = Counter[str](), 0
        for source, target in read(split, parts, run.scale, dropped):
            lines += 1
            characters += len(source) + len(target)
        left = f" ({dropped.total():,} dropped)" if dropped else ""
        texts.append(f"{split} {lines:,} pairs{left}")
    # Ids of 2 bytes for subwords of 4 characters or so
    return CorpusStatistics(to_write=characters / 2, found=f"{', '.join(texts)}; not prepared yet: lengths are assumed")
