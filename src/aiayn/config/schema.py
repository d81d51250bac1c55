"""Every key of a run: name, type, range, and whether a run may be resumed with another value. YAML owns the values."""

import dataclasses
import difflib
import math
import re
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

# The paper's order.
ROWS = (
    *("base", "a_h1", "a_h4", "a_h16", "a_h32", "b_dk16", "b_dk32"),
    *("c_n2", "c_n4", "c_n8", "c_dmodel256", "c_dmodel1024", "c_dff1024", "c_dff4096"),
    *("d_dropout00", "d_dropout02", "d_smoothing00", "d_smoothing02", "e_learned_positions", "big"),
)
HEAD_WIDTH = 64  # of the layers that `bench.kind=layers` measures, the paper's
# Beyond Table 3: the Transformer with one part changed (f), and the systems before it (s).
BEYOND = (
    *("f_no_positions", "f_relative_positions", "f_no_residual", "f_no_residual_positions"),
    *("f_unscaled", "f_additive", "s_rnn", "s_rnn_attention"),
)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class ConfigError(ValueError):
    """A value that a user can get wrong: one line naming the key, the value and what is allowed."""


def _number(low: float, high: float = math.inf, *, below: float = math.inf, default: Any = MISSING) -> Any:
    return field(default=default, metadata={"low": low, "high": high, "below": below})


def _one_of(*choices: str) -> Any:
    return field(default=MISSING, metadata={"choices": choices})


def _name() -> Any:
    return field(default=MISSING, metadata={"name": True})


@dataclass
class Model:
    """Section 3: the sizes of the Transformer, and which of its parts are not the paper's."""

    num_layers: int = _number(1, 64)
    d_model: int = _number(2, 65536)
    d_ff: int = _number(0, 262144)  # 0, like the three after it, in a recurrent model
    num_heads: int = _number(0, 1024)
    d_k: int = _number(0, 65536)
    d_v: int = _number(0, 65536)
    dropout: float = _number(0.0, below=1.0)
    kind: str = _one_of("transformer", "rnn", "rnn_attention")
    positions: str = _one_of("sinusoids", "learned", "relative", "none")
    scores: str = _one_of("scaled", "dot", "additive")
    residual: str = _one_of("connections", "none", "positions")

    @property
    def in_table3(self) -> bool:
        """Whether its parts are those of Table 3: only such a model has faster ways than the plain one."""
        parts = (self.kind, self.scores, self.residual) == ("transformer", "scaled", "connections")
        return parts and self.positions in ("sinusoids", "learned")


@dataclass
class Fidelity:
    """Whose Transformer: the paper's text, or where it differs the code that its authors released."""

    name: str = _one_of("paper", "released_code")
    sinusoids: str = _one_of("alternating", "halves")
    target_space: bool = MISSING
    zero_start: bool = MISSING
    embedding_rows: int = _number(0, 1_000_000)

    def rows(self, vocab_size: int) -> int:
        """The rows of the embedding for a vocabulary of this size."""
        # Paper: a shared vocabulary of about 37 000 (5.1); the released code rounds its matrix up to 40 960 rows
        return max(vocab_size, self.embedding_rows)


@dataclass
class Training:
    """Section 5: the one recipe of all rows."""

    max_steps: int = _number(1, 1e12)
    warmup_steps: int = _number(1, 1e12)
    tokens_per_update: int = _number(1, 1e12)
    label_smoothing: float = _number(0.0, below=1.0)
    learning_rate_factor: float = _number(0.0, 1e6)
    adam_beta1: float = _number(0.0, below=1.0)
    adam_beta2: float = _number(0.0, below=1.0)
    adam_epsilon: float = _number(0.0, 1.0)
    dev_every: int = _number(1, 1e12)
    checkpoint_every: int = _number(1, 1e12)
    keep_checkpoints: int = _number(1, 1e12)


@dataclass
class Data:
    """Which parallel text, and its vocabulary."""

    name: str = _name()
    vocab_size: int = _number(8, 1_000_000)
    max_length: int = _number(2, 100_000)
    source: str = MISSING
    source_language: str = _name()
    target_language: str = _name()
    train_source: str = MISSING
    train_target: str = MISSING
    dev_source: str = MISSING
    dev_target: str = MISSING
    test_source: str = MISSING
    test_target: str = MISSING


@dataclass
class Scale:
    """The dial that multiplies the numbers of every row alike, and the part of the corpus that they learn from."""

    name: str = _name()
    width: float = _number(1e-6, 1e6)
    layers: float = _number(1e-6, 1e6)
    steps: float = _number(1e-9, 1e6)
    warmup: float = _number(1e-9, 1e6)
    batch: float = _number(1e-9, 1e6)
    learning_rate: float = _number(1e-6, 1e6)
    max_words: int = _number(0)
    max_train_words: int = _number(0)
    pairs: int = _number(0)


@dataclass
class Hardware:
    """Where a run computes, and with how many bits."""

    name: str = _name()
    accelerator: str = _one_of("cpu", "gpu")
    devices: int = _number(1, 1024)
    precision: str = _one_of("32-true", "64-true", "bf16-mixed")
    tokens_per_micro_batch: int = _number(1)
    tokens_per_search: int = _number(1)
    threads: int = _number(1, 4096)
    compile: bool = MISSING
    deterministic: bool = MISSING

    @property
    def device(self) -> str:
        """What torch calls it."""
        return "cuda" if self.accelerator == "gpu" else "cpu"


@dataclass
class Decoding:
    """Section 6.1: the beam search."""

    beam_size: int = _number(1, 1024)
    length_penalty: float = _number(0.0, 10.0)
    max_extra: int = _number(0, 100_000)
    precision: str = _one_of("full", "bf16")
    compile: bool = MISSING


@dataclass
class Wandb:
    """Where the curves are shown."""

    mode: str = _one_of("offline", "online", "disabled")
    project: str = MISSING
    entity: str | None = MISSING


@dataclass
class Bench:
    """How long `aiayn bench` measures, and on what."""

    kind: str = _one_of("all", "rivals", "training", "decoding", "growth", "profile", "layers")
    mean_length: float = _number(1.0, 10_000)
    updates: int = _number(1)
    rounds: int = _number(1)
    seconds: float = _number(0.0, 3600.0)
    d_model: int = _number(HEAD_WIDTH, 65536)
    neighbourhood: int = _number(3, 65537)
    kernel_width: int = _number(2, 1024)
    max_length: int = _number(64, 1_000_000)
    sequences: int = _number(1, 100_000)
    output: str = MISSING


@dataclass
class Plan:
    """The hardware that `aiayn plan` reckons with."""

    gpu: str = _one_of("a100", "h100", "h200", "b200", "l40s", "rtx4090")
    gpus: int = _number(1, 100_000)
    efficiency: float | None = _number(0.001, 1.0)
    price_per_hour: float | None = _number(0.0, 1e6)


@dataclass
class Paper:
    """The row's own figures in Table 3; none for a row beyond it."""

    ppl: float | None = _number(1.0, default=None)
    bleu: float | None = _number(0.0, 100.0, default=None)
    params_millions: int | None = None


@dataclass
class Published:
    """Figures that others published for such a model, where, and under which conditions."""

    ppl: float | None = _number(1.0, default=None)
    bleu: float | None = _number(0.0, 100.0, default=None)
    where: str = ""


@dataclass
class Config:
    """One run, whole."""

    experiment: str = _name()
    seed: int = _number(0, 2**31 - 1)
    model: Model = field(default_factory=Model)
    fidelity: Fidelity = field(default_factory=Fidelity)
    training: Training = field(default_factory=Training)
    data: Data = field(default_factory=Data)
    scale: Scale = field(default_factory=Scale)
    hardware: Hardware = field(default_factory=Hardware)
    decoding: Decoding = field(default_factory=Decoding)
    wandb: Wandb = field(default_factory=Wandb)
    bench: Bench = field(default_factory=Bench)
    plan: Plan = field(default_factory=Plan)
    paper: Paper = field(default_factory=Paper)
    published: Published = field(default_factory=Published)
    output: str = MISSING
    prepared: str = MISSING
    tokenizer: str = _one_of("sentencepiece", "paper")
    split: str = _one_of("dev", "test")
    average: int = _number(1, 1000)
    format: str = _one_of("terminal", "md", "csv", "latex", "ctranslate2", "safetensors", "marian")


# Where a run's own texts lie: files of another name may hold other sentences, so that they are part of its meaning.
PATHS = frozenset(f"data.{split}_{side}" for split in ("train", "dev", "test") for side in ("source", "target"))
# What a run's numbers depend on: with another value it is another run, and a resume is refused.
MEANING = PATHS | frozenset(
    {
        *("experiment", "seed", "tokenizer"),
        "hardware.precision",  # bfloat16 keeps 8 bits of a product's factors, and 64 bits move every weight
        *(f"model.{key}" for key in ("num_layers", "d_model", "d_ff", "num_heads", "d_k", "d_v", "dropout")),
        *(f"model.{key}" for key in ("kind", "positions", "scores", "residual")),
        *(f"fidelity.{key}" for key in ("name", "sinusoids", "target_space", "zero_start", "embedding_rows")),
        *(f"training.{key}" for key in ("max_steps", "warmup_steps", "tokens_per_update", "label_smoothing")),
        *(f"training.{key}" for key in ("learning_rate_factor", "adam_beta1", "adam_beta2", "adam_epsilon")),
        *(f"data.{key}" for key in ("name", "vocab_size", "max_length", "source_language", "target_language")),
        *(f"scale.{key}" for key in ("name", "width", "layers", "steps", "warmup", "batch", "learning_rate")),
        *("scale.max_words", "scale.max_train_words", "scale.pairs"),
        *(f"decoding.{key}" for key in ("beam_size", "length_penalty", "max_extra", "precision")),
    }
)
# What may change under a run: how often it is measured and saved, where it computes and where it is shown. Sentences of
# each update and all formulas stay the same; at most, sums of the same precision are rounded in another order, and with
# bf16 other kernels round other intermediate results.
HARMLESS = frozenset(
    {
        *(f"training.{key}" for key in ("dev_every", "checkpoint_every", "keep_checkpoints")),
        "decoding.compile",  # C in place of torch between the same products: the order of sums
        "data.source",  # only where the archives lie: which they are is known by their SHA-256
        "hardware.name",  # no number is read from it
        "hardware.accelerator",  # other kernels of the same precision: the order of sums, what bf16 rounds
        "hardware.devices",  # gradients are summed over ranks before the one division: the order of sums
        "hardware.threads",  # in how many parts a sum is taken: the order of sums
        "hardware.compile",  # fused kernels: the order of sums, what bf16 rounds
        "hardware.deterministic",  # which of the equal kernels, so that they sum in the same order each time
        "hardware.tokens_per_micro_batch",  # into how many parts the sum of an update's gradient is taken
        "hardware.tokens_per_search",  # sentences searched together, none of which sees another
        *(f"wandb.{key}" for key in ("mode", "project", "entity")),
        *(f"bench.{key}" for key in ("kind", "mean_length", "updates", "rounds", "seconds", "output")),
        *(f"bench.{key}" for key in ("d_model", "neighbourhood", "kernel_width", "max_length", "sequences")),
        *(f"plan.{key}" for key in ("gpu", "gpus", "efficiency", "price_per_hour")),
        *(f"paper.{key}" for key in ("ppl", "bleu", "params_millions")),
        *(f"published.{key}" for key in ("ppl", "bleu", "where")),
        *("output", "prepared", "split", "average", "format"),
    }
)


def meaning(config: Config) -> dict[str, Any]:
    """What the run's numbers depend on: each dotted key with its value."""
    return {key: value for key, value, _ in leaves(config) if key in MEANING}


def vary(run: Config, **sections: dict[str, Any]) -> Config:
    """The same run with other values in some of its sections: `vary(run, hardware={"threads": 1})`."""
    changed = {name: dataclasses.replace(getattr(run, name), **values) for name, values in sections.items()}
    return dataclasses.replace(run, **changed)


def leaves(part: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Every key below `part`, dotted, with its value and the metadata of its field."""
    found: list[tuple[str, Any, Any]] = []
    for item in dataclasses.fields(part):
        value = getattr(part, item.name)
        if dataclasses.is_dataclass(value):
            found += leaves(value, f"{prefix}{item.name}.")
        else:
            found.append((f"{prefix}{item.name}", value, item.metadata))
    return found


def nearest(key: str) -> str:
    """A hint at the known key that is spelt most like `key`, or where to find them all."""
    known = [name for name, _, _ in leaves(Config())] + ["experiment", "data", "scale", "fidelity", "hardware"]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    if not close:
        close = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]][:1]
    return f"did you mean {close[0]}?" if close else "`--cfg job` prints every key"
