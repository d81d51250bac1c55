"""`aiayn plan`: what the rows will take on the hardware named, and whether everything they need is there."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from aiayn import config, devices, flops, jobs, prepare, wmt
from aiayn.corpus import DataError
from aiayn.dataset import Dataset, read
from aiayn.devices import Turn
from aiayn.evaluate import parameters
from aiayn.schema import ROWS, Config, ConfigError, Model
from aiayn.storage import disk_of, free_bytes

GIGA = 1e9
# CUDA's own context and the workspaces of its matrix products
CONTEXT_BYTES = 1.5e9
# Weights, gradient and Adam's two moments in fp32; a checkpoint has no gradient
STATE_BYTES, CHECKPOINT_BYTES = 16, 12
# A line of metrics.jsonl, and W&B's own record of it
UPDATE_BYTES = 600


@dataclass(frozen=True)
class Corpus:
    """What is known of the text: token-weighted mean lengths, training tokens, bytes on disk still to be written."""

    source_length: float = flops.LENGTH
    target_length: float = flops.LENGTH
    vocab_size: int | None = None
    target_tokens: int | None = None
    to_write: float = 0.0
    found: str = ""
    complete: bool = True  # nothing is left to download


@dataclass(frozen=True)
class Row:
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
        return float(CHECKPOINT_BYTES * self.parameters)

    @property
    def disk(self) -> float:
        """Bytes of the finished run folder."""
        training = self.run.training
        kept = min(training.keep_checkpoints, -(-training.max_steps // training.checkpoint_every))
        return kept * self.checkpoint + UPDATE_BYTES * training.max_steps


def rows(run: Config) -> list[Config]:
    """The 20 rows with data, scale, hardware and fidelity of `run`; only `run` when it has overrides of its own."""
    if config.variation(run):
        return [run]
    return [config.row(name, run) for name in ROWS]


def estimate(run: Config, corpus: Corpus) -> Row:
    """What a run takes. ConfigError for a precision of which no peak is known."""
    hardware, training = run.hardware, run.training
    if hardware.accelerator == "gpu" and hardware.precision != "bf16-mixed":
        raise ConfigError(
            f"hardware.precision={hardware.precision}: of the GPUs only the peak in bf16-mixed is known; plan with that"
        )
    pieces = run.fidelity.rows(corpus.vocab_size or run.data.vocab_size)
    tokens = training.max_steps * training.tokens_per_update
    work = flops.training_flops(run.model, pieces, tokens, tokens, corpus.source_length, corpus.target_length)
    device = flops.device(hardware, run.plan.gpu)
    efficiency = run.plan.efficiency or device.efficiency
    rate = device.peak * flops.TERA * efficiency * (hardware.threads if hardware.accelerator == "cpu" else 1)
    count = parameters(run, pieces)
    return Row(
        run.experiment + config.variation(run), run, count, work, memory(run, count, pieces, corpus), work / rate
    )


def memory(run: Config, count: int, embedding_rows: int, corpus: Corpus) -> float:
    """Bytes on each device at the widest point of a micro-batch, an estimate: padding and fragments do not count."""
    gpu, hardware = run.hardware.accelerator == "gpu", run.hardware
    narrow = {"bf16-mixed": 2, "32-true": 4, "64-true": 8}[hardware.precision]
    wide = max(narrow, 4)
    mask = 0 if hardware.compile else wide  # compiled, the backward pass computes masks again
    tokens = min(hardware.tokens_per_micro_batch, run.training.tokens_per_update)
    activations = saved_bytes(run.model, narrow, wide, mask, corpus) * tokens
    states = count * STATE_BYTES * wide / 4 + (2 * count if narrow == 2 else 0)
    # The logits of a part, once as they come and once wide, and the gradient of the embedding
    part = min(tokens, 4096 if gpu else 512)
    loss = part * embedding_rows * (narrow + wide) + embedding_rows * run.model.d_model * wide
    return states + activations + loss + (CONTEXT_BYTES if gpu else 0)


def saved_bytes(model: Model, narrow: int, wide: int, mask: int, corpus: Corpus) -> float:
    """What the forward pass keeps for the backward pass, for one source and one target token.

    `narrow` bytes has a number in matrix products, `wide` in sums and norms, `mask` an element of a dropout's mask.
    """
    d, h = model.d_model, model.num_heads
    keys_and_values = h * (model.d_k + model.d_v)
    dropout = mask * d if model.dropout else 0
    norm = wide * (d + 2) + dropout
    feed_forward = narrow * (d + model.d_ff) + norm

    def attention(length: float) -> float:
        """The heads' input, queries, keys and values, weights, the heads, and the norm."""
        return narrow * (d + h * (model.d_k + length + model.d_v)) + norm

    encoder = attention(corpus.source_length) + narrow * keys_and_values + feed_forward
    decoder = attention(corpus.target_length) + narrow * keys_and_values + feed_forward
    to_memory = attention(corpus.source_length) + narrow * keys_and_values
    # Each layer makes its own narrow copy of the encoder's output
    memory = narrow * d * (model.num_layers if narrow < wide else 1)
    embeddings, loss = 2 * dropout, narrow * d
    return model.num_layers * (encoder + decoder + to_memory) + memory + embeddings + loss


def corpus_of(run: Config) -> Corpus:
    """The corpus, every byte that is there checked: prepared, or still the text alone, or what is downloaded of it.

    Raises ConfigError for text that cannot be had, DataError for text or prepared data that is damaged.
    """
    if (config.prepared_folder(run) / "manifest.json").exists():
        return _prepared(prepare.prepare(run, lambda message: None))
    prepare.check(run)
    remote = prepare.downloaded(run.data)
    if remote:
        folder = prepare.archives(run)
        absent = wmt.missing(remote, folder)
        there = [archive for archive in remote.archives if archive.name not in absent]
        wmt.check(there, folder, lambda message: None, brought=bool(run.data.source))
        to_come, encoded = wmt.needed(remote, folder)
        state = f"{to_come / GIGA:.1f} GB to download" if absent else "every archive as its SHA-256 says"
        found = f"about {remote.pairs:,} pairs, {state}; not prepared yet: lengths are assumed"
        return Corpus(to_write=to_come + encoded, found=found, complete=not absent)
    counts, characters = [], 0
    for split, parts in prepare.sources(run.data).items():
        dropped, lines = Counter[str](), 0
        for source, target in read(split, parts, prepare.selection(run.scale), dropped):
            lines += 1
            characters += len(source) + len(target)
        left = f" ({dropped.total():,} dropped)" if dropped else ""
        counts.append(f"{split} {lines:,} pairs{left}")
    # Ids of 2 bytes for pieces of 4 characters or so
    return Corpus(to_write=characters / 2, found=f"{', '.join(counts)}; not prepared yet: lengths are assumed")


def _prepared(dataset: Dataset) -> Corpus:
    pairs = dataset.pairs("train")
    source_length, target_length = map(flops.weighted_length, (pairs.source_lengths, pairs.target_lengths))
    counts = ", ".join(f"{split} {part['kept']:,} pairs" for split, part in dataset.manifest["splits"].items())
    found = f"{counts}; prepared, every file as its SHA-256 says"
    return Corpus(source_length, target_length, dataset.tokenizer.vocab_size, len(pairs.target_ids), 0.0, found)


@dataclass(frozen=True)
class Disk:
    """A disk that is to be written to: the keys that name it, and bytes, needed and free."""

    keys: str
    needed: float
    free: int


def disks(planned: list[Row], corpus: Corpus, available: int) -> list[Disk]:
    """That of the runs and that of the corpus, which may be one.

    Runs take what they keep when finished, and one checkpoint more of each that is at work.
    """
    left = [row for row in planned if not jobs.is_finished(row.run)]
    being_written = sorted((row.checkpoint for row in left), reverse=True)[:available]
    runs = sum(row.disk for row in left) + sum(being_written)
    run = planned[0].run
    output, prepared = Path(run.output), Path(run.prepared)
    keys = f"output={run.output}", f"prepared={run.prepared}"
    if disk_of(output) == disk_of(prepared):
        return [Disk(" and ".join(keys), runs + corpus.to_write, free_bytes(output))]
    return [Disk(keys[0], runs, free_bytes(output)), Disk(keys[1], corpus.to_write, free_bytes(prepared))]


def refusals(planned: list[Row], written: list[Disk]) -> list[str]:
    """Everything that would stop a run later: folders of other runs, too little memory, too little disk."""
    found = []
    for row in planned:
        try:
            jobs.check_folder(row.run)
        except ConfigError as error:
            found.append(str(error))
        limit = flops.device(row.run.hardware, row.run.plan.gpu).memory
        if limit and row.memory > limit * GIGA:
            found.append(
                f"hardware.tokens_per_micro_batch={row.run.hardware.tokens_per_micro_batch}: {row.name} takes about"
                f" {row.memory / GIGA:.1f} GB, a {row.run.plan.gpu} has {limit:g}; lower it"
            )
    for disk in written:
        if disk.needed > disk.free:
            fewer = ", or lower training.keep_checkpoints" if disk.keys.startswith("output") else ""
            found.append(
                f"{disk.keys}: about {disk.needed / GIGA:.1f} GB are to be written and {disk.free / GIGA:.1f} are free"
                f" there; give a larger disk{fewer}"
            )
    return found


def main(run: Config) -> None:
    """Prints the plan, then raises what stands in its way: ConfigError, or DataError for damaged text."""
    failure: ConfigError | DataError | None = None
    try:
        corpus = corpus_of(run)
    except (ConfigError, DataError) as error:
        failure, corpus = error, Corpus(found=f"REFUSED: {error}")
    planned = [estimate(row, corpus) for row in rows(run)]
    hardware = run.hardware
    available = run.plan.gpus if hardware.accelerator == "gpu" else len(devices.names(hardware))
    if hardware.devices > available:
        raise ConfigError(f"plan.gpus={available}: must be at least hardware.devices={hardware.devices}")
    most = devices.most_of_one(hardware, available)
    turns = devices.best_schedule(planned, hardware.devices, most, available)
    written = disks(planned, corpus, available)
    print("\n".join(text(planned, turns, corpus, available, written)))
    refused = refusals(planned, written)
    for line in refused:
        print(f"REFUSED: {line}")
    if failure:
        raise failure
    if refused:
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        raise ConfigError(refused[0] + more)
    print(f"Nothing stands in the way: {checked(run, corpus)}.")


def checked(run: Config, corpus: Corpus) -> str:
    """What has been checked, and what could not be."""
    known, unknown = ["configuration"], ""
    if corpus.complete:
        known.append("data")
    else:
        unknown += "; the data is not, it is still to be downloaded"
    if flops.device(run.hardware, run.plan.gpu).memory:
        known.append("memory")
    else:
        unknown += "; memory is not, on a CPU"
    return f"{', '.join(known)} and disk are checked{unknown}"


def duration(seconds: float) -> str:
    """Hours, or minutes for less than two of them."""
    return f"{seconds / 3600:,.1f} h" if seconds >= 7200 else f"{seconds / 60:.1f} min"


def text(planned: list[Row], turns: list[Turn[Row]], corpus: Corpus, available: int, written: list[Disk]) -> list[str]:
    """The plan as lines."""
    run = planned[0].run
    device, of = flops.device(run.hardware, run.plan.gpu), run.hardware.accelerator
    unit = run.plan.gpu if of == "gpu" else "CPU core"
    basis = f"{run.plan.efficiency:.0%}, given" if run.plan.efficiency else f"{device.efficiency:.0%}, {device.basis}"
    price = run.plan.price_per_hour
    shared = {turn.row.name: len(turn.devices) for turn in turns}
    head = ["row", "params M", "FLOP", "steps", "tokens M", "GB", "devices", "on one", "on all"]
    head += ["cost"] if price is not None else []
    lines = []
    for row in planned:
        cells = [row.name, f"{row.parameters / 1e6:.2f}", flops.power(row.flops), f"{row.run.training.max_steps:,}"]
        cells += [f"{row.tokens / 1e6:,.1f}", f"{row.memory / GIGA:.2f}", str(shared[row.name])]
        cells += [duration(row.seconds), duration(row.seconds / shared[row.name])]
        lines.append(cells + ([f"{row.seconds / 3600 * price:,.2f}"] if price is not None else []))
    total = sum(row.seconds for row in planned)
    whole = ["all", "", flops.power(sum(row.flops for row in planned)), ""]
    whole += [
        f"{sum(row.tokens for row in planned) / 1e6:,.1f}",
        "",
        "",
        duration(total),
        duration(devices.length(turns)),
    ]
    lines.append(whole + ([f"{total / 3600 * price:,.2f}"] if price is not None else []))
    align = ["left", *["right"] * (len(head) - 1)]
    table = tabulate([head, *lines], tablefmt="plain", colalign=align, disable_numparse=True).splitlines()
    data = config.setting(run)
    known = "of the prepared corpus" if corpus.vocab_size else "assumed"
    epochs = f"; {planned[0].tokens / corpus.target_tokens:.1f} epochs of base" if corpus.target_tokens else ""
    queues: list[list[str]] = [[] for _ in range(available)]
    for turn in turns:
        for number in turn.devices:
            queues[number].append(f"{turn.row.name} until {duration(turn.end)}")
    return [
        f"Plan at scale {run.scale.name} on {data}: {len(planned)} rows, one seed each, nothing is trained",
        *table,
        f"{available} x {unit}: peak {device.peak:g} TFLOP/s, of which training sustains {basis}.",
        f"Lengths {known}: {corpus.source_length:.1f} source and {corpus.target_length:.1f} target tokens,"
        f" weighted by tokens{epochs}.",
        "GB: on each device, estimated. Left out: evaluation, start-up, what devices that share a row tell each other.",
        *(["Cost: give plan.price_per_hour of one device."] if price is None else []),
        *(
            f"Disk: {disk.needed / GIGA:.2f} GB to be written, {disk.free / GIGA:.1f} GB free for {disk.keys}."
            for disk in written
        ),
        f"Data: {corpus.found}.",
        "Schedule, longest first, as a sweep on one machine with these devices works through it:",
        *(f"  {unit} {number}: {', '.join(queue) or 'idle'}" for number, queue in enumerate(queues)),
    ]
