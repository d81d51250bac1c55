"""The contestants: training and search by ours and by each rival, on the same sentences, after their results agree.

They are timed in turn, round by round, and what each round took is reported.
"""

import copy
import dataclasses
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aiayn.alternatives.recurrent import TranslationModel
from aiayn.bench import rivals
from aiayn.bench.rivals import SENTENCES, Decode
from aiayn.bench.sheets import OURS
from aiayn.config.schema import Config
from aiayn.core import signals
from aiayn.cost import flops
from aiayn.data.encoded import Pairs
from aiayn.data.sentencepiece_bpe import EOS
from aiayn.data.update_plan import epoch_plan, gather, rows_of_part
from aiayn.evaluation.evaluate import build
from aiayn.evaluation.search import search
from aiayn.paper.batch import Batch
from aiayn.paper.fast.cross_entropy import label_smoothed_cross_entropy
from aiayn.paper.fast.kernels import COMPILER
from aiayn.paper.fast.model import compile_stacks, is_compiled
from aiayn.paper.layers import DecoderLayer
from aiayn.paper.transformer import Transformer

COMPILED = ", compiled"
OUTPUT_LENGTH = 25  # tokens; sources as long, EOS included, so that no contestant pads


@dataclass
class Contestant:
    """One line of the table: what a round runs, and what its rounds took."""

    name: str
    precision: str
    run: Callable[[int], None]  # the round's number
    checks: dict[str, float]
    seconds_a_round: list[float] = dataclasses.field(default_factory=list)
    warm_up_seconds: float = 0.0  # before the first round that counts, whatever it compiles included

    def line(self) -> dict[str, Any]:
        """Its fields as they are written to JSON."""
        return {name: value for name, value in vars(self).items() if name != "run"}


def take_turns(contestants: list[Contestant], rounds: int, device: str) -> None:
    """Times every contestant in every round, one after the other; round 0 warms up and is not counted."""
    for number in range(rounds + 1):
        for contestant in contestants:
            began = time.perf_counter()
            contestant.run(number)
            synchronize(device)
            taken = time.perf_counter() - began
            if number:
                contestant.seconds_a_round.append(taken)
            else:
                contestant.warm_up_seconds += taken


def training(config: Config, precisions: list[str], against_rivals: bool = True) -> dict[str, Any]:
    """Forward, loss, backward, Adam: what each contestant's rounds took, and how far its first result is from ours."""
    device, updates = config.hardware.device, config.bench.updates
    with _lined_up(trainers, against_rivals, config, precisions) as contestants:
        take_turns(contestants, config.bench.rounds, device)
    pairs, batches = random_updates(config)
    counted = batches[updates:]
    rectangles = [rivals.padded(batch) for batch in counted]
    source, target = [len(batch.source) for batch in counted], [len(batch.target) for batch in counted]
    cells = sum(x.source.numel() + x.target_input.numel() for x in rectangles)
    words = config.fidelity.rows(config.data.vocab_size)
    work = flops.training_flops(config.model, words, sum(source), sum(target), *flops.weighted_lengths(pairs))
    return {
        "unit": "update",
        "source_tokens": [sum(source[i : i + updates]) for i in range(0, len(source), updates)],
        "target_tokens": [sum(target[i : i + updates]) for i in range(0, len(target), updates)],
        "padded_share_of_rivals": 1 - (sum(source) + sum(target)) / cells,
        "units_a_round": updates,
        "flops_a_token": work / sum(target),
        "peak": flops.peak_of(torch.cuda.get_device_name()) if device == "cuda" else None,
        "lines": [contestant.line() for contestant in contestants],
    }


def decoding(config: Config, precisions: list[str], beam_size: int) -> dict[str, Any]:
    """Search with `beam_size` hypotheses: what each contestant's rounds took, and how many outputs equal ours."""
    with _lined_up(searchers, True, config, precisions, beam_size) as contestants:
        take_turns(contestants, config.bench.rounds, config.hardware.device)
    tokens = config.bench.updates * SENTENCES * OUTPUT_LENGTH
    return {
        "unit": "batch",
        "source_tokens": [tokens] * config.bench.rounds,
        "target_tokens": [tokens] * config.bench.rounds,
        "padded_share_of_rivals": 0.0,
        "units_a_round": config.bench.updates,
        "lines": [contestant.line() for contestant in contestants],
    }


def synchronize(device: str) -> None:
    """Waits for the kernels of a GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def computing(precision: str, device: str, *, training: bool) -> Iterator[None]:
    """Matrix products in float32, truncated inside if `medium`, or in bf16 by autocast (`bf16`)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if precision == "medium" else "highest")
    try:
        # Weights that were rounded once would be those of all updates of a round
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16", cache_enabled=not training):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def synthetic_pairs(config: Config, count: int) -> Pairs:
    """Random tokens in sentences of log-normal length; a target is about as long as its source."""
    random = np.random.default_rng(config.seed)
    spread = 0.6
    mean = np.log(config.bench.mean_length) - spread**2 / 2
    longest = config.data.max_length
    source = np.clip(np.rint(random.lognormal(mean, spread, count)), 2, longest).astype(np.int64)
    target = np.clip(np.rint(source * random.lognormal(0, 0.2, count)), 2, longest).astype(np.int64)
    parts = []
    for lengths in (source, target):
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        ids = random.integers(EOS + 1, config.data.vocab_size, offsets[-1])
        ids[offsets[1:] - 1] = EOS
        parts += [ids, offsets]
    return Pairs(*parts)


def random_updates(config: Config) -> tuple[Pairs, list[Batch]]:
    """Random pairs, and the updates of all rounds, the one that warms up included."""
    count = (config.bench.rounds + 1) * config.bench.updates
    needed = count * config.training.tokens_per_update / config.bench.mean_length
    pairs = synthetic_pairs(config, int(2 * needed) + 100)
    lengths = pairs.source_lengths, pairs.target_lengths
    plan = epoch_plan(*lengths, config.training.tokens_per_update, config.seed, epoch=0)
    batches = [gather(pairs, sentences).to(config.hardware.device) for sentences in islice(plan, count)]
    assert len(batches) == count
    return pairs, batches


def trainers(config: Config, precisions: list[str], *, ours: bool) -> list[Contestant]:
    smoothing, device = config.training.label_smoothing, config.hardware.device
    _, batches = random_updates(config)

    def our_loss(module: nn.Module, number: int) -> Tensor:
        assert isinstance(module, Transformer)
        batch = batches[number]
        hidden = module.hidden(batch, (config.seed, number))
        weight, fused = module.embedding.weight, is_compiled(module)
        loss, _ = label_smoothed_cross_entropy(hidden, weight, batch.target, smoothing, fused=fused)
        return loss / len(batch.target)

    rectangles = [] if ours else [rivals.padded(batch) for batch in batches]

    def their_loss(module: nn.Module, number: int) -> Tensor:
        batch = rectangles[number]
        hidden = module.hidden(batch)  # type: ignore[operator]
        loss = rivals.smoothed_loss(hidden, module.embedding.weight, batch, smoothing)  # type: ignore[union-attr, arg-type]
        return loss / len(batch.target)

    model = build(config, config.data.vocab_size).to(device).eval()
    assert isinstance(model, Transformer)
    reference = _loss_and_gradients(model, our_loss, "fp32", device)
    contestants = []
    loss = our_loss if ours else their_loss
    for precision in precisions:
        for name, module in entrants(model, device, ours=ours).items():
            module = copy.deepcopy(module).to(device).eval()
            if name.endswith(COMPILED):
                compile_parts(module, config.training.tokens_per_update)
            began = time.perf_counter()
            found = _loss_and_gradients(module, loss, precision, device)
            taken = time.perf_counter() - began
            run = _trainer(module.train(), loss, precision, config)
            checks = _compare(reference, found, name.removesuffix(COMPILED))
            contestants.append(Contestant(name, precision, run, checks, warm_up_seconds=taken))
    return contestants


def searchers(config: Config, precisions: list[str], beam_size: int, *, ours: bool) -> list[Contestant]:
    device = config.hardware.device
    random = np.random.default_rng(config.seed)
    shape = (config.bench.rounds + 1, config.bench.updates * SENTENCES, OUTPUT_LENGTH - 1)
    sources = random.integers(EOS + 1, config.data.vocab_size, shape)
    model = endless(build(config, config.data.vocab_size)).to(device).eval()
    contestants = []
    first = sources[0, :SENTENCES].tolist()
    expected = _our_decode(model, config, "fp32")(first, beam_size)
    for precision in precisions:
        if ours:
            # CTranslate2 has 8 bits, and so has a model of ours by `aiayn export`
            found = {} if precision == "int8" else {OURS: _our_decode(model, config, precision)}
            if device == "cpu" and precision == "fp32" and COMPILER:
                found[f"{OURS}{COMPILED}"] = _our_decode(model, config, precision, compiled=True)
        else:
            found = rivals.decoders(model, config.hardware.threads, OUTPUT_LENGTH, precision)
        for name, decode in found.items():

            def run(number: int, decode: Decode = decode, precision: str = precision) -> None:
                with computing(precision, device, training=False):
                    decode(sources[number].tolist(), beam_size)

            with computing(precision, device, training=False):
                outputs = decode(first, beam_size)
            assert {len(ids) for ids in outputs} == {OUTPUT_LENGTH}, f"{name}: not the same work"
            same = sum(one == other for one, other in zip(outputs, expected, strict=True)) / len(expected)
            contestants.append(Contestant(name, precision, run, {"equal_outputs": same}))
    return contestants


def compile_parts(module: nn.Module, tokens: int) -> None:
    """Compiles ours as training does, for so many; puts compiled versions in place of a rival's encoder and decoder."""
    torch.compiler.reset()  # or what it keeps of other models would count against this one
    if isinstance(module, Transformer):
        return compile_stacks(module, rows_of_part(tokens, tokens, 1))
    for part in ("encode", "decode"):
        setattr(module, part, torch.compile(getattr(module, part), dynamic=True))


def endless(model: TranslationModel) -> Transformer:
    """The model, changed so that EOS is never likely: every output is as long as it may be in every search."""
    assert isinstance(model, Transformer)
    last = model.decoder[-1]
    assert isinstance(last, DecoderLayer)
    direction = F.normalize(torch.randn(model.d_model), dim=0)
    with torch.no_grad():
        last.after_feed_forward.norm.bias.add_(4 * direction)
        model.embedding.weight[EOS] = -4 * direction
    return model


def entrants(model: Transformer, device: str, *, ours: bool) -> dict[str, nn.Module]:
    """Ours, or the rivals, to be trained with the model's weights; compiled too where a compiler pays."""
    found = {OURS: model} if ours else rivals.trainable(model)
    compiled = [OURS if ours else "torch.nn"] if device == "cuda" else []
    return {**found, **{f"{name}{COMPILED}": found[name] for name in compiled}}


@contextmanager
def _lined_up(
    line_up: Callable[..., list[Contestant]], against_rivals: bool, config: Config, precisions: list[str], *given: Any
) -> Iterator[list[Contestant]]:
    """Ours and the rivals, ready to run, precision by precision.

    On a CPU the rivals are in a process of their own, as their users have them: ours has settings of torch and of the
    system's memory that would help them too.
    """
    with ExitStack() as stack:
        contestants = line_up(config, precisions, *given, ours=True)
        if against_rivals and config.hardware.accelerator == "gpu":
            contestants += line_up(config, precisions, *given, ours=False)
        elif against_rivals:
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(1, context, signals.serve, (os.getpid(),)))
            for rival in pool.submit(_line_up_in_process, line_up, config, precisions, *given).result():
                ask = lambda number, run=rival.run: pool.submit(run, number).result()  # noqa: E731
                contestants.append(dataclasses.replace(rival, run=ask))
        yield sorted(contestants, key=lambda contestant: precisions.index(contestant.precision))


_rivals: list[Contestant] = []  # in the rivals' process


def _line_up_in_process(line_up: Callable[..., list[Contestant]], config: Config, *given: Any) -> list[Contestant]:
    torch.set_num_threads(config.hardware.threads)
    _rivals.extend(line_up(config, *given, ours=False))
    return [dataclasses.replace(rival, run=partial(_run_in_process, index)) for index, rival in enumerate(_rivals)]


def _run_in_process(index: int, number: int) -> None:
    _rivals[index].run(number)


def _trainer(
    module: nn.Module, loss_of: Callable[[nn.Module, int], Tensor], precision: str, config: Config
) -> Callable[[int], None]:
    updates = config.bench.updates
    betas = (config.training.adam_beta1, config.training.adam_beta2)
    adam = torch.optim.Adam(module.parameters(), lr=1e-4, betas=betas, eps=config.training.adam_epsilon, fused=True)

    def run(round_number: int) -> None:
        with computing(precision, config.hardware.device, training=True):
            for number in range(round_number * updates, (round_number + 1) * updates):
                adam.zero_grad()
                loss_of(module, number).backward()  # type: ignore[no-untyped-call]
                adam.step()

    return run


def _loss_and_gradients(
    module: nn.Module, loss_of: Callable[[nn.Module, int], Tensor], precision: str, device: str
) -> tuple[float, nn.Module]:
    """The loss of a token of the first batch, and the module with gradients in the place of its weights."""
    module.zero_grad()
    with computing(precision, device, training=True):
        loss = loss_of(module, 0)
        loss.backward()  # type: ignore[no-untyped-call]
    gradients = copy.deepcopy(module)
    for gradient, parameter in zip(gradients.parameters(), module.parameters(), strict=True):
        gradient.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
    module.zero_grad()
    return loss.item(), gradients


def _compare(ours: tuple[float, nn.Module], theirs: tuple[float, nn.Module], name: str) -> dict[str, float]:
    """How far a loss and its gradients are from ours, relative to ours."""
    (loss, model), (other_loss, other) = ours, theirs
    assert isinstance(model, Transformer)
    expected = model.state_dict() if name.startswith(OURS) else rivals.gradients_of(model, name)
    found = other.state_dict()
    squares = sum(float((found[key].float() - value).square().sum()) for key, value in expected.items())
    norm = sum(float(value.square().sum()) for value in expected.values())
    return {"loss": abs(other_loss - loss) / loss, "gradients": (squares / norm) ** 0.5}


def _our_decode(model: Transformer, config: Config, precision: str, *, compiled: bool = False) -> Decode:
    def decode(sentences: Any, beam_size: int) -> list[list[int]]:
        bits = "full" if precision == "fp32" else precision
        how = dataclasses.replace(config.decoding, beam_size=beam_size, precision=bits, compile=compiled, max_extra=0)
        hardware = dataclasses.replace(config.hardware, tokens_per_search=SENTENCES * OUTPUT_LENGTH)
        sources = [np.array(sentence) for sentence in sentences]
        return [hypothesis.ids for hypothesis in search(model, sources, how, hardware)]

    return decode
