"""Every key of a run: name, type, range, and whether a run may be resumed with another value. YAML owns the values."""

import dataclasses
import difflib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from aiayn.core.exit_codes import WRONG_CONFIGURATION, ExplainedError

# The paper's order.
ROWS = (
    *("base", "a_h1", "a_h4", "a_h16", "a_h32", "b_dk16", "b_dk32"),
    *("c_n2", "c_n4", "c_n8", "c_dmodel256", "c_dmodel1024", "c_dff1024", "c_dff4096"),
    *("d_dropout00", "d_dropout02", "d_smoothing00", "d_smoothing02", "e_learned_positions", "big"),
)
MAX_DISTANCE = 16  # of relative positions, k of Shaw et al. (2018): tokens farther apart share a vector
# Beyond Table 3: the Transformer with one part changed (f), and the systems before it (s).
BEYOND = (
    *("f_no_positions", "f_relative_positions", "f_no_residual", "f_no_residual_positions"),
    *("f_unscaled", "f_additive", "s_rnn", "s_rnn_attention"),
)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class ConfigError(ExplainedError, ValueError):
    """A value that a user can get wrong: one line naming the key, the value and what is allowed."""

    exit_code = WRONG_CONFIGURATION


class OutOfMemory(ExplainedError):
    """A batch that the memory of a GPU does not hold: one line naming the key, the value and a smaller one."""


# `affects_result`: a run's numbers depend on the key. With another value it is another run, and a resume is refused.
# The others are runtime keys and may change under a run: sentences and formulas stay the same; at most, sums of the
# same precision are rounded in another order, and with bf16 other kernels round other intermediate results.
def _number(
    low: float, high: float = math.inf, *, affects_result: bool, below: float = math.inf, default: Any = MISSING
) -> Any:
    return field(default=default, metadata={"low": low, "high": high, "below": below, "affects_result": affects_result})


def _one_of(*choices: str, affects_result: bool) -> Any:
    return field(default=MISSING, metadata={"choices": choices, "affects_result": affects_result})


def _any(*, affects_result: bool, default: Any = MISSING, **limits: bool) -> Any:
    return field(default=default, metadata={"affects_result": affects_result, **limits})


@dataclass
class Model:
    """Section 3: the sizes of the Transformer, and which of its parts are not the paper's."""

    num_layers: int = _number(1, 64, affects_result=True)
    d_model: int = _number(2, 65536, affects_result=True)
    d_ff: int = _number(0, 262144, affects_result=True)  # 0, like the three after it, in a recurrent model
    num_heads: int = _number(0, 1024, affects_result=True)
    d_k: int = _number(0, 65536, affects_result=True)
    d_v: int = _number(0, 65536, affects_result=True)
    dropout: float = _number(0.0, below=1.0, affects_result=True)
    kind: str = _one_of("transformer", "rnn", "rnn_attention", affects_result=True)
    positions: str = _one_of("sinusoids", "learned", "relative", "none", affects_result=True)
    scores: str = _one_of("scaled", "dot", "additive", affects_result=True)
    residual: str = _one_of("connections", "none", "positions", affects_result=True)

    @property
    def in_table3(self) -> bool:
        """Whether its parts are those of Table 3: only such a model has faster ways than the plain one."""
        parts = (self.kind, self.scores, self.residual) == ("transformer", "scaled", "connections")
        return parts and self.positions in ("sinusoids", "learned")


@dataclass
class Fidelity:
    """Whose Transformer: the paper's text, or where it differs the code that its authors released."""

    name: str = _one_of("paper", "released_code", affects_result=True)
    sinusoids: str = _one_of("alternating", "halves", affects_result=True)
    target_space: bool = _any(affects_result=True)
    zero_start: bool = _any(affects_result=True)
    embedding_rows: int = _number(0, 1_000_000, affects_result=True)

    def rows(self, vocab_size: int) -> int:
        """The rows of the embedding for a vocabulary of this size."""
        # Paper: a shared vocabulary of about 37 000 (5.1); the matrix of the released code has 40 960 rows
        return max(vocab_size, self.embedding_rows)


@dataclass
class Training:
    """Section 5: the one recipe of all rows."""

    max_steps: int = _number(1, 1e12, affects_result=True)
    warmup_steps: int = _number(1, 1e12, affects_result=True)
    tokens_per_update: int = _number(1, 1e12, affects_result=True)
    label_smoothing: float = _number(0.0, below=1.0, affects_result=True)
    learning_rate_factor: float = _number(0.0, 1e6, affects_result=True)
    adam_beta1: float = _number(0.0, below=1.0, affects_result=True)
    adam_beta2: float = _number(0.0, below=1.0, affects_result=True)
    adam_epsilon: float = _number(0.0, 1.0, affects_result=True)
    dev_every: int = _number(1, 1e12, affects_result=False)
    checkpoint_every: int = _number(1, 1e12, affects_result=False)
    keep_checkpoints: int = _number(1, 1e12, affects_result=False)


@dataclass
class Data:
    """Which parallel text, and its vocabulary."""

    name: str = _any(name=True, affects_result=True)
    vocab_size: int = _number(8, 1_000_000, affects_result=True)
    max_length: int = _number(2, 100_000, affects_result=True)
    source: str = _any(path=True, optional=True, affects_result=False)  # which they are, their SHA-256 says
    source_language: str = _any(name=True, affects_result=True)
    target_language: str = _any(name=True, affects_result=True)
    # Each stands for two of the six files below
    train: str = _any(path=True, optional=True, affects_result=False, default="")
    dev: str = _any(path=True, optional=True, affects_result=False, default="")
    test: str = _any(path=True, optional=True, affects_result=False, default="")
    train_source: str = _any(path=True, optional=True, affects_result=False)
    train_target: str = _any(path=True, optional=True, affects_result=False)
    dev_source: str = _any(path=True, optional=True, affects_result=False)
    dev_target: str = _any(path=True, optional=True, affects_result=False)
    test_source: str = _any(path=True, optional=True, affects_result=False)
    test_target: str = _any(path=True, optional=True, affects_result=False)


def language(name: str) -> str:
    """A language without its script and region, in two letters: `zh` of `zh-Hans` and of `zho_Hans`."""
    primary = re.split("[-_]", name.lower())[0]
    same = {"cn": "zh", "zho": "zh", "cmn": "zh", "yue": "zh", "jp": "ja", "jpn": "ja", "kr": "ko", "kor": "ko"}
    same |= {"tha": "th", "lao": "lo", "khm": "km", "mya": "my", "deu": "de", "eng": "en", "fra": "fr"}
    return same.get(primary, primary)


@dataclass
class Scale:
    """The dial that multiplies the numbers of every row alike, and the part of the corpus that they learn from."""

    name: str = _any(name=True, affects_result=True)
    width: float = _number(1e-6, 1e6, affects_result=True)
    head_width: float = _number(1e-6, 1e6, affects_result=True)
    layers: float = _number(1e-6, 1e6, affects_result=True)
    steps: float = _number(1e-9, 1e6, affects_result=True)
    warmup: float = _number(1e-9, 1e6, affects_result=True)
    batch: float = _number(1e-9, 1e6, affects_result=True)
    learning_rate: float = _number(1e-6, 1e6, affects_result=True)
    max_words: int = _number(0, affects_result=True)
    max_train_words: int = _number(0, affects_result=True)
    pairs: int = _number(0, affects_result=True)


@dataclass
class Hardware:
    """Where a run computes, and with how many bits."""

    name: str = _any(name=True, affects_result=False)  # no number is read from it
    accelerator: str = _one_of("cpu", "gpu", affects_result=False)  # other kernels: the order of sums, what bf16 rounds
    devices: int = _number(1, 1024, affects_result=False)  # gradients are summed over ranks: the order of sums
    # bfloat16 keeps 8 bits of a product's factors, and 64 bits move every weight
    precision: str = _one_of("32-true", "64-true", "bf16-mixed", affects_result=True)
    tokens_per_micro_batch: int = _number(1, 1e12, affects_result=False)  # in how many parts a gradient is summed
    tokens_per_search: int = _number(1, 1e12, affects_result=False)  # sentences side by side, none sees another
    threads: int = _number(1, 4096, affects_result=False)  # in how many parts a sum is taken: the order of sums
    compile: bool = _any(affects_result=False)  # fused kernels: the order of sums, what bf16 rounds
    deterministic: bool = _any(affects_result=False)  # which of equal kernels: the order of sums, the same each time

    @property
    def device(self) -> str:
        """What torch calls it."""
        return "cuda" if self.accelerator == "gpu" else "cpu"


@dataclass
class Decoding:
    """Section 6.1: the beam search."""

    beam_size: int = _number(1, 1024, affects_result=True)
    length_penalty: float = _number(0.0, 10.0, affects_result=True)
    max_extra: int = _number(0, 100_000, affects_result=True)
    precision: str = _one_of("full", "bf16", affects_result=True)


@dataclass
class Wandb:
    """Where the curves are shown; what is null is as W&B's own environment variables say."""

    mode: str | None = _one_of("offline", "online", "disabled", affects_result=False)
    project: str | None = _any(affects_result=False)
    entity: str | None = _any(affects_result=False)


@dataclass
class Bench:
    """How long `aiayn bench` measures, and on what."""

    kind: str = _one_of("training", "decoding", affects_result=False)
    mean_length: float = _number(1.0, 10_000, affects_result=False)
    updates: int = _number(1, affects_result=False)
    rounds: int = _number(1, affects_result=False)
    output: str = _any(path=True, affects_result=False)


@dataclass
class Plan:
    """The hardware that `aiayn plan` reckons with."""

    gpu: str = _one_of("a100", "h100", "h200", "b200", "l40s", "rtx4090", "rtx4080", "rtx4060", affects_result=False)
    gpus: int = _number(1, 100_000, affects_result=False)
    efficiency: float | None = _number(0.001, 1.0, affects_result=False)


@dataclass
class Paper:
    """The row's own figures in Table 3; none for a row beyond it."""

    ppl: float | None = _number(1.0, affects_result=False, default=None)
    bleu: float | None = _number(0.0, 100.0, affects_result=False, default=None)
    params_millions: int | None = _any(affects_result=False, default=None)


@dataclass
class Published:
    """Figures that others published for such a model, where, and under which conditions."""

    ppl: float | None = _number(1.0, affects_result=False, default=None)
    bleu: float | None = _number(0.0, 100.0, affects_result=False, default=None)
    where: str = _any(optional=True, affects_result=False, default="")


@dataclass
class Config:
    """One run, whole."""

    experiment: str = _any(name=True, affects_result=True)
    seed: int = _number(0, 2**31 - 1, affects_result=True)
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
    output: str = _any(path=True, affects_result=False)
    prepared: str = _any(path=True, affects_result=False)
    tokenizer: str = _one_of("sentencepiece", "paper", affects_result=True)
    split: str = _one_of("dev", "test", affects_result=False)
    average: int = _number(1, 1000, affects_result=False)
    format: str = _one_of("terminal", "md", "csv", "latex", "ctranslate2", "safetensors", affects_result=False)


def leaves(part: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every key below `part`, dotted, with its value and the metadata of its field."""
    for item in dataclasses.fields(part):
        value = getattr(part, item.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", value, item.metadata


# Where a run's own texts lie: their hashes affect the result, not where they are.
PATHS = frozenset(f"data.{split}_{side}" for split in ("train", "dev", "test") for side in ("source", "target"))
RESULT_AFFECTING = frozenset(key for key, _, meta in leaves(Config()) if meta["affects_result"])


def result_affecting(config: Config) -> dict[str, Any]:
    """What the run's numbers depend on: each dotted key with its value."""
    return {key: value for key, value, _ in leaves(config) if key in RESULT_AFFECTING}


def vary(run: Config, **sections: dict[str, Any]) -> Config:
    """The same run with other values in some of its sections: `vary(run, hardware={"threads": 1})`."""
    changed = {name: dataclasses.replace(getattr(run, name), **values) for name, values in sections.items()}
    return dataclasses.replace(run, **changed)


def nearest(key: str) -> str:
    """A hint at the known key that is spelt most like `key`, or where to find them all."""
    known = [name for name, _, _ in leaves(Config())] + ["experiment", "data", "scale", "fidelity", "hardware"]
    section, _, name = key.rpartition(".")
    # One of the same section, if there is one, comes last and stays
    by_name = {known.rpartition(".")[2]: known for known in sorted(known, key=lambda known: known.startswith(section))}
    close = [by_name[found] for found in difflib.get_close_matches(name, by_name, n=1, cutoff=0.7)]
    if key in close:  # which not every choice of a group has
        return f"only with {'data=files' if section == 'data' else 'a row beyond Table 3, such as experiment=s_rnn'}"
    shown = "hydra" if key.startswith("hydra.") else "job"
    return f"did you mean {close[0]}?" if close and shown == "job" else f"`--cfg {shown}` prints every key"
