"""One update of section 5: the gradient of the whole however it is cut, Adam at the rates of Eq. 3."""

import copy
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import chain

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from models import transformer
from pytorch_lightning.callbacks import LambdaCallback
from torch import nn
from torch.nn.attention import varlen

from aiayn.config.schema import Training
from aiayn.data.dataset import Pairs
from aiayn.data.sentencepiece_bpe import EOS
from aiayn.data.update_plan import gather
from aiayn.paper import attention, loss
from aiayn.paper.batch import Packing
from aiayn.paper.dropout import draw
from aiayn.paper.loss import label_smoothed_cross_entropy
from aiayn.paper.transformer import Transformer
from aiayn.runs import checkpoint
from aiayn.training import lightning_model
from aiayn.training.lightning_data import Update
from aiayn.training.lightning_model import LightningTransformer, NonFinite, sum_gradients

VOCAB, D_MODEL, WARMUP, SMOOTHING = 29, 14, 3, 0.1


def pairs(lengths: list[tuple[int, int]]) -> Pairs:
    """Sentences of random tokens of these source and target lengths, EOS included."""
    draw = np.random.default_rng(11)
    sides = []
    for side in (0, 1):
        sentences = [np.append(draw.integers(4, VOCAB, length[side] - 1), EOS) for length in lengths]
        sides += [np.concatenate(sentences).astype(np.uint16), np.cumsum([0, *map(len, sentences)])]
    return Pairs(*sides)


def update(corpus: Pairs, parts: list[list[int]], number: int = 0) -> Update:
    """An update that holds these sentences in these micro-batches."""
    sentences = np.concatenate([np.array(part, dtype=np.int64) for part in parts])
    lengths = corpus.source_lengths, corpus.target_lengths
    firsts = ((int(side[sentences][:done].sum()) for side in lengths) for done in np.cumsum([0, *map(len, parts)]))
    batches = [gather(corpus, np.array(part), *first) for part, first in zip(parts, firsts, strict=False) if part]
    return Update(number, *(int(side[sentences].sum()) for side in lengths), batches)


def module(dropout: float = 0.0, **changes: float) -> LightningTransformer:
    model = transformer(dropout=dropout, vocab_size=VOCAB).train()
    recipe = {"learning_rate_factor": 1.0, "adam_beta1": 0.9, "adam_beta2": 0.98, "adam_epsilon": 1e-9}
    recipe |= {"warmup_steps": WARMUP, "label_smoothing": SMOOTHING, **changes}
    return LightningTransformer(model, Training(**recipe), seed=17).double()


def fit(model: LightningTransformer, updates: list[Update]) -> list[dict]:
    """What each step returned."""
    steps = []
    keep = LambdaCallback(on_train_batch_end=lambda trainer, module, outputs, *_: steps.append(outputs))
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=len(updates), logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[keep], precision="64-true",
    )  # fmt: skip
    trainer.fit(model, (update for update in updates))
    return steps


def gradient(model: LightningTransformer) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.transformer.parameters()])


def loss_by_hand(transformer: Transformer, corpus: Pairs, sentences: list[int]) -> torch.Tensor:
    """The smoothed loss of section 5.4, summed over the target tokens, one sentence at a time, on whole logits."""
    batches = [gather(corpus, np.array([sentence])) for sentence in sentences]
    smoothing = SMOOTHING * VOCAB / (VOCAB - 1)  # theirs has the target's share, too
    return sum(F.cross_entropy(transformer(b), b.target, label_smoothing=smoothing, reduction="sum") for b in batches)


def gradient_by_hand(model: LightningTransformer, loss: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.transformer.parameters()))])


UNEVEN = pairs([(7, 500), (5, 1), (3, 11), (2, 13), (31, 2)])
CUTS = [[[0, 1, 2, 3, 4]], [[0], [1, 2, 3, 4]], [[0, 1], [2, 3, 4], []], [[0], [1], [2], [3], [4]]]


@pytest.mark.parametrize("parts", CUTS, ids=len)
def test_the_gradient_is_that_of_the_tokens_however_split(parts):
    model = module()
    tokens = len(UNEVEN.target_ids)
    by_hand, batch = loss_by_hand(model.transformer, UNEVEN, [0, 1, 2, 3, 4]), gather(UNEVEN, np.arange(5))
    nats = float(F.cross_entropy(model.transformer(batch).detach(), batch.target, reduction="sum"))
    expected = gradient_by_hand(model, by_hand / tokens)
    (step,) = fit(model, [update(UNEVEN, parts)])
    assert (float(step["loss"]), float(step["nats"])) == pytest.approx((float(by_hand.detach()), nats), rel=1e-12)
    assert nats != pytest.approx(float(by_hand.detach()), rel=1e-9)  # control: smoothing counts
    assert float((gradient(model) - expected).abs().max()) < 1e-12
    assert float(step["gradient_norm"]) == pytest.approx(float(expected.norm()), rel=1e-12)


def test_1_against_500_target_tokens_weigh_1_and_500():
    model = module()
    long, short = (gradient_by_hand(model, loss_by_hand(model.transformer, UNEVEN, [n])) for n in (0, 1))
    whole, mean_of_means = (long + short) / 501, (long / 500 + short) / 2
    fit(model, [update(UNEVEN, [[0], [1]])])
    assert float((gradient(model) - whole).abs().max()) < 1e-12
    assert float((gradient(model) - mean_of_means).abs().max()) > 1e-3  # control


EVEN = pairs([(5, 7), (3, 2), (11, 13), (2, 3)])
UPDATES = [update(EVEN, [[0, 1], [2, 3]], number) for number in range(7)]


def reference(model: LightningTransformer, rates: list[float], betas: tuple[float, float]) -> list[torch.Tensor]:
    """The weights after torch's own Adam at these rates, on the loss of `loss_by_hand`."""
    transformer = copy.deepcopy(model.transformer)
    adam = torch.optim.Adam(transformer.parameters(), lr=1.0, betas=betas, eps=1e-9, foreach=False, fused=False)
    for rate in rates:
        adam.zero_grad()
        (loss_by_hand(transformer, EVEN, [0, 1, 2, 3]) / len(EVEN.target_ids)).backward()
        adam.param_groups[0]["lr"] = rate
        adam.step()
    return list(transformer.parameters())


def distance(model: LightningTransformer, weights: list[torch.Tensor]) -> float:
    both = zip(model.transformer.parameters(), weights, strict=True)
    return max(float((one - other).detach().abs().max()) for one, other in both)


@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_the_weights_follow_adam_at_the_rates_of_equation_3(factor):
    model, start = module(learning_rate_factor=factor), module()
    rates = [factor * D_MODEL**-0.5 * min(1 / math.sqrt(step), step / WARMUP**1.5) for step in range(1, 8)]
    steps = fit(model, UPDATES)
    assert [step["learning_rate"] for step in steps] == pytest.approx(rates, rel=1e-14)
    assert rates.index(max(rates)) == WARMUP - 1
    # Where a gradient is zero but for rounding, Adam divides rounding by its epsilon of 1e-9
    assert distance(model, reference(start, rates, (0.9, 0.98))) < 1e-7
    assert distance(model, reference(start, rates, (0.9, 0.999))) > 1e-3  # controls
    assert distance(model, reference(start, [rates[0], *rates[:-1]], (0.9, 0.98))) > 1e-3


def test_dropout_is_that_of_the_update_however_it_is_split(monkeypatch):
    """With the numbers of the tokens in the update; by their place in the micro-batch the masks would differ."""

    def trained(parts: list[list[int]], number: int = 3) -> torch.Tensor:
        model = module(dropout=0.3)
        fit(model, [update(UNEVEN, parts, number)])
        return gradient(model)

    whole = trained(CUTS[0])
    for parts in CUTS[1:]:
        assert float((trained(parts) - whole).abs().max()) < 1e-12
    # Controls
    assert float((trained(CUTS[0], number=4) - whole).abs().max()) > 1e-3
    firsts = draw
    monkeypatch.setattr("aiayn.paper.transformer.draw", lambda keys, first, *sizes: firsts(keys, 0, *sizes))
    assert float((trained(CUTS[1]) - whole).abs().max()) > 1e-3


def test_a_restored_run_goes_on_bit_for_bit(tmp_path):
    whole, begun, resumed, forgetful = module(0.3), module(0.3), module(0.3), module(0.3)
    fit(whole, UPDATES[:5])
    fit(begun, UPDATES[:3])
    checkpoint.save(begun.saved(), tmp_path / "step-000000003.ckpt")
    saved = checkpoint.load(tmp_path / "step-000000003.ckpt")
    resumed.restore(saved)
    forgetful.restore({**saved, "optimizer_states": []})
    for model in (resumed, forgetful):
        assert model.updates_done == 3
        fit(model, UPDATES[3:5])
    assert distance(resumed, list(whole.transformer.parameters())) == 0
    assert distance(forgetful, list(whole.transformer.parameters())) > 1e-3  # control


@pytest.mark.parametrize(("at", "bad", "more"), [("bias", math.inf, 2), ("loss", math.nan, 1), ("nats", math.inf, 2)])
def test_nothing_moves_when_anything_is_not_finite(at, bad, more, monkeypatch):
    def poisoned(*arguments, **options):
        smoothed, nats = label_smoothed_cross_entropy(*arguments, **options)
        return (smoothed + bad, nats) if at == "loss" else (smoothed, nats + bad)

    model = module()
    fit(model, UPDATES[:2])
    if at == "bias":
        with torch.no_grad():
            model.transformer.encoder[0].feed_forward[0].bias[0] = bad
    else:
        monkeypatch.setattr(lightning_model, "label_smoothed_cross_entropy", poisoned)
    before = [parameter.detach().clone() for parameter in model.transformer.parameters()]
    with pytest.raises(NonFinite, match=r"update 3: loss .* at learning rate .* no step was taken"):
        fit(model, UPDATES[2 : 2 + more])
    for old, new in zip(before, model.transformer.parameters(), strict=True):
        assert torch.equal(old.nan_to_num(5.0), new.nan_to_num(5.0))
    assert model.updates_done == 2
    if at != "bias":  # control: only a sum is not finite
        assert bool(gradient(model).isfinite().all())


class Meeting:
    """All-reduce among threads that stand for ranks."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=60)
        self.given: dict[int, torch.Tensor] = {}

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.barrier.wait()
        self.given[threading.get_ident()] = tensor.clone()
        self.barrier.wait()
        tensor.copy_(sum(self.given.values()))
        self.barrier.wait()
        self.given.clear()


class Optimizer(pl.core.optimizer.LightningOptimizer):
    """Steps without a trainer's strategy."""

    def step(self, *_: object, **__: object) -> None:
        self.optimizer.step()


def on_ranks(
    models: list[LightningTransformer], parts: list[list[int]], patch: pytest.MonkeyPatch, ranks: int = 2
) -> list[object]:
    """What the step of each rank returned or raised: rank r has part r of one update."""
    patch.setattr(torch.distributed, "all_reduce", Meeting(len(models)).all_reduce)
    patch.setattr(LightningTransformer, "device", torch.device("cpu"))
    whole = update(UNEVEN, parts)

    def step(rank: int) -> object:
        model = models[rank]
        model.ranks = ranks
        optimizer = Optimizer(model.configure_optimizers())
        model.optimizers = lambda: optimizer
        own = Update(0, whole.source_tokens, whole.target_tokens, whole.batches[rank : rank + 1])
        try:
            found = model.training_step(own, 0)
            model.wait_for_step()
            return found
        except NonFinite as error:
            return error

    with ThreadPoolExecutor(len(models)) as threads:
        return list(threads.map(step, range(len(models))))


PARTS = [[0, 3], [1, 2, 4]]


@pytest.mark.parametrize("parts", [PARTS, [[0, 1, 2, 3, 4], []]], ids=["two shares", "one share"])
def test_ranks_have_the_gradient_of_one_because_they_sum(parts, monkeypatch):
    one, ranks = module(0.3), [module(0.3), module(0.3)]
    fit(one, [update(UNEVEN, [[*chain(*parts)]])])
    on_ranks(ranks, parts, monkeypatch)
    for model in ranks:
        assert float((gradient(model) - gradient(one)).abs().max()) < 1e-12
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), ranks[0].parameters(), strict=True))
    alone = [module(0.3), module(0.3)]
    on_ranks(alone, PARTS, monkeypatch, ranks=1)
    mean = (gradient(alone[0]) + gradient(alone[1])) / 2
    assert float((mean - gradient(one)).norm() / gradient(one).norm()) > 1e-3


def test_when_one_rank_is_not_finite_all_stop_and_none_moves(monkeypatch):
    def poisoned() -> list[LightningTransformer]:
        ranks = [module(), module()]
        with torch.no_grad():
            ranks[1].transformer.encoder[0].feed_forward[0].bias[0] = torch.nan
        return ranks

    ranks = poisoned()
    before = [parameter.detach().clone() for parameter in ranks[0].parameters()]
    assert all(isinstance(result, NonFinite) for result in on_ranks(ranks, PARTS, monkeypatch))
    assert all(torch.equal(a, b) for a, b in zip(before, ranks[0].parameters(), strict=True))
    # Control: without the others' sums the first rank would go on
    first, second = on_ranks(poisoned(), PARTS, monkeypatch, ranks=1)
    assert isinstance(first, dict)
    assert isinstance(second, NonFinite)


@pytest.mark.parametrize("kernel", ["padded", "variable length"])
def test_during_an_update_the_host_never_waits_for_the_device(kernel, monkeypatch):
    """Nor would it wait for an answer: a meta tensor has none to give."""
    called = []

    def record(owner, method, name):
        theirs = getattr(owner, method)
        monkeypatch.setattr(owner, method, lambda *a, **options: called.append(name) or theirs(*a, **options))

    record(varlen, "varlen_attn", "variable length")
    record(F, "scaled_dot_product_attention", "padded")
    has_kernel = property(lambda packing: kernel == "variable length", lambda packing, value: None)
    monkeypatch.setattr(Packing, "has_kernel", has_kernel, raising=False)
    monkeypatch.setitem(loss.CHUNK_ELEMENTS, "meta", 2**20)
    # There is no autocast for meta tensors; without it the sums are not rounded after dropout
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    monkeypatch.setattr(attention, "KERNEL_TYPES", {torch.bfloat16, torch.float32})
    model = module(0.1).to("meta", torch.bfloat16)
    optimizer = Optimizer(model.configure_optimizers())
    model.optimizers = lambda: optimizer
    monkeypatch.setattr(optimizer.optimizer, "step", lambda: called.append("Adam"))  # it refuses meta tensors
    step = model.training_step(UPDATES[0].to(torch.device("meta")), 0)
    assert step["loss"].is_meta
    assert optimizer.optimizer.found_inf.is_meta
    assert set(called) == {"Adam", kernel}
    with pytest.raises(RuntimeError, match="meta"):
        model.wait_for_step()  # control: this asks


def test_gradients_become_their_sums_over_the_ranks(monkeypatch):
    """The other rank has the same gradients, three times as large."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda flat: flat.mul_(4))
    torch.manual_seed(13)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))
    model(torch.ones(2, 3)).sum().backward()
    parameters = [parameter for layer in model for parameter in (layer.bias, layer.weight)]
    expected = [4 * parameter.grad for parameter in parameters]
    parameters[2].grad, expected[2] = None, torch.zeros(7)  # this rank's share of the update had no sentence
    sum_gradients(parameters)
    for parameter, total in zip(parameters, expected, strict=True):
        assert torch.equal(parameter.grad, total)
