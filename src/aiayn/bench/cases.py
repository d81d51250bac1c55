"""The cases of a benchmark: ours and each baseline on the same sentences, compared first, then timed interleaved."""

import copy
import dataclasses
import itertools
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aiayn.bench import baselines
from aiayn.config.schema import Config, ConfigError
from aiayn.data.dataset import Pairs
from aiayn.data.sentencepiece_bpe import EOS
from aiayn.data.update_plan import rows_of_part
from aiayn.evaluation.export import POSITIONS
from aiayn.evaluation.search import decoder_of, search
from aiayn.paper.loss import label_smoothed_cross_entropy
from aiayn.paper.transformer import Transformer
from aiayn.runs.models import build
from aiayn.training import lightning_data
from aiayn.training.lightning_data import Update

OURS = "aiayn"
OUTPUT_LENGTH = 25  # tokens; sources as long, EOS included, so that no case pads
TOLERANCE = {"fp32": 1e-4, "bf16": 0.1}  # of the loss and of the norm of its gradient, relative to ours in fp32


@dataclasses.dataclass
class Case:
    """One line of the sheet: what a round runs, and what its rounds took."""

    name: str
    precision: str
    run: Callable[[int], object]  # the round's number
    checks: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds_per_round: list[float] = dataclasses.field(default_factory=list)


def time_interleaved(cases: list[Case], rounds: int, device: str) -> None:
    """Times every case in every round, one after the other; round 0 warms up and is not counted."""
    for number in range(rounds + 1):
        for case in cases:
            began = time.perf_counter()
            case.run(number)
            if device == "cuda":
                torch.cuda.synchronize()
            if number:
                case.seconds_per_round.append(time.perf_counter() - began)


class Trainer:
    """Forward, loss, backward and Adam of a copy of one model in one precision."""

    def __init__(self, model: nn.Module, updates: list[Update], precision: str, config: Config) -> None:
        self.model, self.updates, self.config = copy.deepcopy(model), updates, config
        if config.hardware.compile and precision == "bf16" and isinstance(self.model, Transformer):  # as it trains
            micro_batch = config.hardware.tokens_per_micro_batch
            self.model.compile_stacks(rows_of_part(config.training.tokens_per_update, micro_batch, 1))
        self.batches: list[Any] = [update.batches for update in updates]
        if not isinstance(model, Transformer):
            self.batches = [list(map(baselines.padded, batches)) for batches in self.batches]
        # No cache: weights that were rounded once would be those of all updates of a round
        self.computing = partial(torch.autocast, config.hardware.device, torch.bfloat16, precision == "bf16", False)
        recipe, weights = config.training, self.model.parameters()
        betas = (recipe.adam_beta1, recipe.adam_beta2)
        self.adam = torch.optim.Adam(weights, lr=1e-4, betas=betas, eps=recipe.adam_epsilon, fused=True)

    def backward(self, number: int) -> Tensor:
        """Adds the gradients of an update, micro-batch by micro-batch; gives its loss for each token."""
        tokens, smoothing = self.updates[number].target_tokens, self.config.training.label_smoothing
        total = torch.zeros((), device=self.config.hardware.device)  # read at the end: a GPU is not waited for
        for batch in self.batches[number]:
            if isinstance(self.model, Transformer):
                hidden, weight = self.model.hidden(batch, (self.config.seed, number)), self.model.embedding.weight
                compiled = self.model.is_compiled()
                loss, _ = label_smoothed_cross_entropy(hidden, weight, batch.target, smoothing, compiled=compiled)
            else:
                loss = baselines.smoothed_loss(self.model, batch[0], batch[1], smoothing)
            (loss / tokens).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total / tokens

    def loss_and_norm(self) -> tuple[float, float]:
        """The loss of a token of the first update without dropout, and the norm of its gradient."""
        self.model.eval()
        with self.computing():
            loss = float(self.backward(0))
        norm = nn.utils.get_total_norm([w.grad for w in self.model.parameters() if w.grad is not None])
        self.model.train()
        return loss, float(norm)

    def run(self, round_number: int) -> None:
        """The updates of a round."""
        count = self.config.bench.updates
        with self.computing():
            for number in range(round_number * count, (round_number + 1) * count):
                self.adam.zero_grad()
                self.backward(number)
                self.adam.step()


def training(config: Config, precisions: list[str]) -> dict[str, Any]:
    """Forward, loss, backward, Adam: what each case's rounds took, and how far its first result is from ours."""
    if (longest := config.data.max_length) > POSITIONS:
        raise ConfigError(f"data.max_length={longest}: the baselines have {POSITIONS} positions; give fewer")
    updates = random_updates(config)
    model = build(config, config.data.vocab_size).to(config.hardware.device)
    assert isinstance(model, Transformer)
    models: dict[str, nn.Module] = {OURS: model, "torch.nn": baselines.TorchTransformer(model)}
    if find_spec("transformers"):
        models["Marian"] = baselines.MarianTransformer(model)
    expected = Trainer(model, updates, "fp32", config).loss_and_norm()
    cases = []
    for precision, (name, original) in itertools.product(precisions, models.items()):
        trainer = Trainer(original, updates, precision, config)
        errors = [abs(one / other - 1) for one, other in zip(trainer.loss_and_norm(), expected, strict=True)]
        assert max(errors) < TOLERANCE[precision], f"{name} {precision}: not the same results, {errors}"
        cases.append(Case(name, precision, trainer.run, dict(zip(("loss", "gradient"), errors, strict=True))))
    time_interleaved(cases, config.bench.rounds, config.hardware.device)
    tokens = [update.target_tokens for update in updates[config.bench.updates :]]
    return _measured(cases, "update", config, np.reshape(tokens, (config.bench.rounds, -1)).sum(1).tolist())


def our_decode(model: Transformer, config: Config, precision: str, sentences: Any, beam_size: int) -> list[list[int]]:
    """Our search, for outputs of at most `OUTPUT_LENGTH` tokens."""
    bits = "full" if precision == "fp32" else precision
    options = dataclasses.replace(config.decoding, beam_size=beam_size, precision=bits, max_extra=0)
    hardware = dataclasses.replace(config.hardware, tokens_per_search=baselines.SENTENCES * OUTPUT_LENGTH)
    hypotheses = search(decoder_of(model), [np.array(sentence) for sentence in sentences], options, hardware)
    return [hypothesis.ids for hypothesis in hypotheses]


def decoding(config: Config, precisions: list[str], beam_size: int) -> dict[str, Any]:
    """Search with `beam_size` hypotheses: what each case's rounds took, and how many outputs equal ours in fp32."""
    device = config.hardware.device
    shape = (config.bench.rounds + 1, config.bench.updates * baselines.SENTENCES, OUTPUT_LENGTH - 1)
    sources = np.random.default_rng(config.seed).integers(EOS + 1, config.data.vocab_size, shape)
    model = endless(build(config, config.data.vocab_size)).to(device).eval()
    searches: list[Any] = [(OURS, p, partial(our_decode, model, config, p)) for p in precisions]
    if find_spec("ctranslate2"):
        theirs = baselines.ctranslate2_decode(copy.deepcopy(model), config.hardware.threads, OUTPUT_LENGTH)
        searches.append(("CTranslate2", "fp32", theirs))
    first, cases = sources[0, : baselines.SENTENCES].tolist(), []
    expected = our_decode(model, config, "fp32", first, beam_size)
    for name, precision, decode in searches:
        outputs = decode(first, beam_size)
        assert {len(ids) for ids in outputs} == {OUTPUT_LENGTH}, f"{name}: not the same work"
        same = sum(one == other for one, other in zip(outputs, expected, strict=True)) / len(expected)
        assert same == 1 or precision != "fp32", f"{name}: other outputs than ours"
        run = partial(lambda decode, number: decode(sources[number].tolist(), beam_size), decode)
        cases.append(Case(name, precision, run, {"equal_outputs": same}))
    time_interleaved(cases, config.bench.rounds, device)
    tokens = config.bench.updates * baselines.SENTENCES * OUTPUT_LENGTH
    return _measured(cases, "batch", config, [tokens] * config.bench.rounds)


def synthetic_pairs(config: Config, count: int) -> Pairs:
    """Random tokens in sentences of log-normal length; a target is about as long as its source."""
    random, longest = np.random.default_rng(config.seed), config.data.max_length
    source = random.lognormal(np.log(config.bench.mean_length) - 0.6**2 / 2, 0.6, count)
    parts = []
    for lengths in (source, source * random.lognormal(0, 0.2, count)):
        offsets = np.concatenate([[0], np.cumsum(np.clip(np.rint(lengths), 2, longest).astype(np.int64))])
        ids = random.integers(EOS + 1, config.data.vocab_size, offsets[-1])
        ids[offsets[1:] - 1] = EOS
        parts += [ids, offsets]
    return Pairs(*parts)


def random_updates(config: Config) -> list[Update]:
    """The updates of all rounds, the one that warms up included, each in its micro-batches."""
    count, tokens = (config.bench.rounds + 1) * config.bench.updates, config.training.tokens_per_update
    pairs = synthetic_pairs(config, int(2 * count * tokens / config.bench.mean_length) + 100)
    sizes = {"tokens_per_update": tokens, "tokens_per_micro_batch": config.hardware.tokens_per_micro_batch}
    stream, device = lightning_data.updates(pairs, **sizes, seed=config.seed, start=0), config.hardware.device
    return [update.to(torch.device(device)) for update in itertools.islice(stream, count)]


def endless(model: Any) -> Any:
    """The model, changed so that EOS is never likely: every output is as long as it may be in every search."""
    direction = F.normalize(torch.randn(model.d_model), dim=0)
    with torch.no_grad():
        model.decoder[-1].after_feed_forward.norm.bias.add_(4 * direction)
        model.embedding.weight[EOS] = -4 * direction
    return model


def _measured(cases: list[Case], unit: str, config: Config, tokens: list[int]) -> dict[str, Any]:
    lines = [{name: value for name, value in vars(case).items() if name != "run"} for case in cases]
    return {"unit": unit, "units_per_round": config.bench.updates, "target_tokens": tokens, "lines": lines}
