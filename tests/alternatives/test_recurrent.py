"""The LSTM models against their equations written as loops, and what the Transformer is asked as well."""

import copy
import io
from dataclasses import replace
from pathlib import Path

import model_properties
import pytest
import torch
from conftest import Command
from models import BOS, EOS, SOURCES, TARGETS, VOCAB, batch, pack
from torch import Tensor, nn
from trained_runs import equal

from aiayn.alternatives.recurrent import RecurrentDecoder, RecurrentModel
from aiayn.bench import bench
from aiayn.config import compose, folders
from aiayn.config.schema import Config, ConfigError
from aiayn.core import storage
from aiayn.evaluation import export
from aiayn.paper.beam_search import beam_search
from aiayn.paper.dropout import Dropout
from aiayn.paper.loss import label_smoothed_cross_entropy
from aiayn.report import attention_maps
from aiayn.training import train
from aiayn.training.lightning_model import LightningTransformer
from tests.test_resume import Cut, cut_in, load, same

SIZES = {"num_layers": 2, "d_model": 14, "dropout": 0.1, "vocab_size": VOCAB}
KINDS = pytest.mark.parametrize("attention", [False, True], ids=["fixed vector", "attention"])


def recurrent(attention: bool, **changes: float) -> RecurrentModel:
    """A small float64 model in evaluation mode."""
    torch.manual_seed(17)
    return RecurrentModel(**{**SIZES, **changes}, attention=attention).double().eval()


def lstm(module: nn.LSTM, inputs: list[Tensor], h: Tensor, c: Tensor, suffix: str = "") -> tuple[list[Tensor], Tensor]:
    """The hidden states and the last cell state, by the equations of an LSTM."""
    w, u, b, v = (getattr(module, f"{name}_l0{suffix}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    states = []
    for x in inputs:
        i, f, g, o = (w @ x + b + u @ h + v).chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        states.append(h)
    return states, c


def reference(model: RecurrentModel, source: list[int], target_input: list[int]) -> Tensor:
    """The logits of one sentence pair, a token at a time."""
    embedding, width = model.embedding.weight, model.d_model
    x, final = [embedding[token] * width**0.5 for token in source], []
    for layer in model.encoder:
        zero = torch.zeros(width // 2, dtype=x[0].dtype)
        forward, c_forward = lstm(layer, x, zero, zero)
        backward, c_backward = lstm(layer, x[::-1], zero, zero, "_reverse")
        final.append((torch.cat((forward[-1], backward[-1])), torch.cat((c_forward, c_backward))))
        x = [torch.cat(both) for both in zip(forward, backward[::-1], strict=True)]
    y = [embedding[token] * width**0.5 for token in target_input]
    for layer, (h, c) in zip(model.decoder, final, strict=True):
        y, _ = lstm(layer, y, h, c)
    if model.attention is not None:
        attended = []
        for h in y:
            exponentials = [(h @ state).exp() for state in x]
            context = sum(e / sum(exponentials) * state for e, state in zip(exponentials, x, strict=True))
            attended.append((model.attention.combine.weight @ torch.cat((context, h))).tanh())
        y = attended
    return torch.stack([embedding @ h for h in y])


def per_sentence(logits: Tensor) -> list[Tensor]:
    return list(logits.split([len(target) for target in TARGETS]))


@KINDS
def test_the_logits_are_those_of_the_equations_written_as_loops(attention: bool) -> None:
    model = recurrent(attention)
    for source, target, logits in zip(SOURCES, TARGETS, per_sentence(model(batch())), strict=True):
        torch.testing.assert_close(logits, reference(model, source, [BOS, *target[:-1]]))


def test_attention_is_what_the_two_kinds_differ_in() -> None:  # control of the test above
    model = recurrent(attention=True)
    fixed = copy.deepcopy(model)
    fixed.attention = None
    assert not torch.allclose(model(batch()), fixed(batch()))


@KINDS
def test_a_sentence_s_logits_do_not_depend_on_its_neighbours(attention: bool) -> None:
    model = recurrent(attention)
    together = per_sentence(model(batch()))
    for source, target, logits in zip(SOURCES, TARGETS, together, strict=True):
        torch.testing.assert_close(logits, model(batch([source], [target])))
    backwards = model(batch(SOURCES[::-1], TARGETS[::-1]))
    torch.testing.assert_close(backwards, torch.cat(together[::-1]))
    assert not torch.allclose(backwards, torch.cat(together))  # control


@KINDS
def test_a_later_target_token_changes_every_later_logit_of_its_sentence_and_no_earlier_one(attention: bool) -> None:
    model_properties.assert_a_later_target_token_changes_no_earlier_logit(recurrent(attention))


@KINDS
def test_every_source_token_changes_every_logit_of_its_sentence_and_no_other(attention: bool) -> None:
    model_properties.assert_a_source_token_changes_every_logit_of_its_sentence_alone(recurrent(attention))


@KINDS
def test_the_gradient_of_every_parameter_equals_finite_differences(attention: bool) -> None:
    model = recurrent(attention, d_model=4, vocab_size=15)
    model_properties.assert_the_gradient_is_that_of_finite_differences(model)


@KINDS
def test_the_gradient_reaches_every_parameter(attention: bool) -> None:
    model, given = recurrent(attention), batch()
    label_smoothed_cross_entropy(model(given), given.target, 0.1)[0].backward()
    assert {name for name, parameter in model.named_parameters() if not parameter.grad.abs().sum() > 0} == set()
    assert len([*model.parameters()]) == 1 + 2 * 8 + 2 * 4 + attention


@KINDS
def test_source_target_and_softmax_share_one_embedding(attention: bool) -> None:
    model, given = recurrent(attention), batch()
    # Token 20 is in no sentence, 11 only in the first source, 12 only in the second target
    for token, sentences in ((20, set()), (11, {0}), (12, {1})):
        before = model(given)
        with torch.no_grad():
            model.embedding.weight[token] += 1
        moved = model(given) != before
        assert moved[:, token].all()
        moved[:, token] = False
        assert {i for i, logits in enumerate(per_sentence(moved)) if logits.any()} == sentences


@KINDS
def test_dropout_is_a_function_of_seed_and_update_while_training_and_off_in_evaluation(attention: bool) -> None:
    model, given = recurrent(attention), batch()
    assert torch.equal(model(given), model(given, (1, 2)))
    model.train()
    one, again, *others = (model(given, randomness) for randomness in ((1, 2), (1, 2), (1, 3), (2, 2)))
    assert torch.equal(one, again)
    assert not any(torch.equal(one, other) for other in others)
    with pytest.raises(AssertionError, match="seed and update"):
        model(given)
    undropped = recurrent(attention, dropout=0.0)
    assert torch.equal(copy.deepcopy(undropped).train()(given), undropped(given))


@KINDS
def test_dropout_of_a_sentence_does_not_depend_on_the_micro_batch(attention: bool) -> None:
    model, given = recurrent(attention).train(), batch()
    together = per_sentence(model(given, (1, 2)))
    for number, (source, target, logits) in enumerate(zip(SOURCES, TARGETS, together, strict=True)):
        first = {"first_source": int(given.source_offsets[number]), "first_target": int(given.target_offsets[number])}
        alone = batch([source], [target])
        torch.testing.assert_close(logits, model(replace(alone, **first), (1, 2)))
        if number:  # control
            assert not torch.allclose(logits, model(alone, (1, 2)))


def test_every_layer_drops_elements_of_its_input_with_bits_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[list[int]]()
    forward = Dropout.forward

    def watched(self: Dropout, x: Tensor, randomness: object) -> Tensor:
        y = forward(self, x, randomness)
        seen.append((y != 0).int().tolist())
        return y

    monkeypatch.setattr(Dropout, "forward", watched)
    recurrent(attention=True, dropout=0.5).train()(batch(SOURCES, SOURCES), (1, 2))
    assert len(seen) == len({str(mask) for mask in seen}) == 2 * 2


def test_the_same_seed_gives_the_same_model_and_another_seed_another() -> None:
    first, second, third = ((torch.manual_seed(seed), RecurrentModel(**SIZES, attention=True))[1] for seed in (5, 5, 6))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first.parameters(), third.parameters(), strict=True))


@KINDS
def test_one_token_at_a_time_equals_all_at_once(attention: bool) -> None:
    model, target = recurrent(attention), [[8, 4, 6, 10, 9, 5, 7, 11, EOS]] * len(SOURCES)
    expected = model(batch(SOURCES, target)).unflatten(0, (len(SOURCES), -1))
    decoding = RecurrentDecoder(model).start(*pack(SOURCES))
    for t, token in enumerate([BOS, *target[0][:-1]]):
        logits = decoding.step(torch.full((len(SOURCES), 1), token))
        torch.testing.assert_close(logits[:, 0], expected[:, t])


@KINDS
def test_reordered_hypotheses_of_kept_sentences_go_on_from_their_own_past(attention: bool) -> None:
    model = recurrent(attention)
    model_properties.assert_hypotheses_go_on_from_their_own_past(
        RecurrentDecoder(model).start,
        lambda source, past: reference(model, source, past)[-1],
        lambda decoding: decoding.memory.shape[0],
    )


@KINDS
def test_reordering_matters(attention: bool) -> None:  # control of the test above
    model_properties.assert_reordering_matters(RecurrentDecoder(recurrent(attention)).start)


@KINDS
def test_greedy_search_takes_the_best_token_of_the_loops_at_each_step(attention: bool) -> None:
    model, extra = recurrent(attention), 3
    how = {"beam_size": 1, "length_penalty": 0.6, "max_extra": extra, "bos": BOS, "eos": EOS}
    found = beam_search(RecurrentDecoder(model), *pack(SOURCES), **how)
    for source, hypothesis in zip(SOURCES, found, strict=True):
        ids = list[int]()
        while len(ids) < len(source) + extra and EOS not in ids:
            ids.append(int(reference(model, source, [BOS, *ids])[-1].argmax()))
        assert hypothesis.ids == [token for token in ids if token != EOS]


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(AssertionError, match="eval"):
        RecurrentDecoder(recurrent(attention=False).train())


@KINDS
def test_in_bf16_logits_and_gradients_stay_close_and_a_step_too(attention: bool) -> None:
    model, given = recurrent(attention).float(), batch()
    expected = model(given)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(given)
        assert logits.dtype == torch.bfloat16  # control: this is not float32
        label_smoothed_cross_entropy(logits, given.target, 0.1)[0].backward()
        with torch.no_grad():
            step = RecurrentDecoder(model).start(*pack(SOURCES)).step(torch.full((len(SOURCES), 1), BOS))
    torch.testing.assert_close(logits.float(), expected, atol=0.1, rtol=0.05)
    torch.testing.assert_close(step[:, 0].float(), expected[given.target_offsets[:-1]], atol=0.1, rtol=0.05)
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


def run_of(kind: str, digits: list[str], folder: Path) -> list[str]:
    """Overrides for a run of eleven updates in two or three micro-batches each."""
    sizes = ("model.num_layers=2", "model.d_model=16", "training.max_steps=11", "training.warmup_steps=4")
    rest = ("training.tokens_per_update=93", "training.checkpoint_every=1", "hardware.tokens_per_micro_batch=41")
    output = ("wandb.mode=disabled", f"output={folder}/runs")
    return [*digits, f"experiment=s_{kind}", "scale=paper", *sizes, *rest, "training.dev_every=3", *output]


def train_to_the_end(run: Config, folder: Path) -> Path:
    storage.write_text(folder / "config.yaml", compose.to_yaml(run))
    train.train(run, folder)
    return folder


KINDS_OF_ROWS = pytest.mark.parametrize("kind", ["rnn", "rnn_attention"])


@KINDS_OF_ROWS
def test_a_run_that_is_killed_ends_with_the_bits_of_one_that_is_not(
    kind: str, digits: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: None
) -> None:
    run = compose.compose_row(*run_of(kind, digits, tmp_path))
    whole = train_to_the_end(run, tmp_path / "whole")
    for update in (3, 8):
        with monkeypatch.context() as patch:
            cut_in(patch, LightningTransformer, "training_step", update)
            with pytest.raises(Cut):
                train_to_the_end(run, tmp_path / "cut")
    assert same(train_to_the_end(run, tmp_path / "cut"), whole)
    other = train_to_the_end(replace(run, seed=2), tmp_path / "other")
    assert not equal(load(other, 11), load(whole, 11))  # control


@KINDS_OF_ROWS
@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
def test_a_run_trains_in_other_precisions_and_in_64_bits_alike_with_micro_batches_of_any_size(
    kind: str, precision: str, digits: list[str], tmp_path: Path, signals: None
) -> None:
    words = [*run_of(kind, digits, tmp_path), f"hardware.precision={precision}"]
    weights = []
    for tokens in (41, 93):
        run = compose.compose_row(*words, f"hardware.tokens_per_micro_batch={tokens}")
        weights.append(load(train_to_the_end(run, tmp_path / str(tokens)), 11)["state_dict"])
    one, other = weights
    start = train.build(run, 25).state_dict()
    for name, value in one.items():
        assert not torch.equal(value, start[name.removeprefix("transformer.")])
        if precision == "64-true":
            assert value.dtype == torch.float64
            torch.testing.assert_close(value, other[name], rtol=1e-6, atol=1e-9)


def test_gradients_are_taken_outside_autocast(digits: list[str], tmp_path: Path, monkeypatch, signals: None) -> None:
    """Inside, the backward pass of an LSTM, which is made of plain products on a CPU, would round to bf16."""
    found, backward = [], torch.Tensor.backward

    def seen(*arguments: object) -> None:
        found.append(torch.is_autocast_enabled("cpu"))
        backward(*arguments)

    monkeypatch.setattr(torch.Tensor, "backward", seen)
    words = [*run_of("rnn", digits, tmp_path), "hardware.precision=bf16-mixed", "training.max_steps=1"]
    train_to_the_end(compose.compose_row(*words), tmp_path / "run")
    assert found
    assert not any(found)


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_row_at_scale_smoke_is_trained_evaluated_and_translates(digits: list[str], aiayn: Command) -> None:
    words = [*digits, "experiment=s_rnn_attention", "scale=smoke", "data.vocab_size=25", "wandb.mode=disabled"]
    assert "dev perplexity" in aiayn("train", *words).stdout
    assert "bits per character" in aiayn("evaluate", *words, "split=test").stdout
    assert len(aiayn("translate", *words, text="1 2 3\n\n4 5\n").stdout.splitlines()) == 3


def test_what_is_only_for_transformers_is_refused_and_writes_nothing(
    digits: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: None
) -> None:
    run = compose.compose_row(*run_of("rnn_attention", digits, tmp_path), "format=safetensors")
    train_to_the_end(run, folders.run_folder(run))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("1 2 3\n"))
    before = files(tmp_path)
    for command in (export, attention_maps, bench):
        with pytest.raises(ConfigError, match=r"rnn_attention: .* such as (experiment=)?base"):
            command.main(run)
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("experiment=s_rnn model.num_heads=4", ("model.num_heads=4", "model.kind=rnn", "use model.num_heads=0,")),
        ("experiment=s_rnn_attention model.d_ff=64", ("model.d_ff=", "model.kind=rnn_attention", "use model.d_ff=0,")),
        (
            "model.kind=rnn model.num_heads=4",
            ("model.num_heads=4", "model.positions=sinusoids", "model.kind=rnn", "experiment=s_rnn"),
        ),
        ("experiment=s_rnn decoding.compile=true", ("decoding.compile=true", "use false")),
    ],
)
def test_a_knob_that_does_not_suit_is_refused_in_one_line_with_the_remedy(words: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        compose.compose_row(*words.split())
    assert "\n" not in str(error.value)
    assert all(part in str(error.value) for part in parts), error.value


def test_the_rows_are_recurrent_models_of_their_own_sizes() -> None:
    for kind, attention in (("rnn", False), ("rnn_attention", True)):
        for width in (512, 64):
            run = compose.compose_row(f"experiment=s_{kind}", "scale=paper", f"model.d_model={width}")
            with torch.device("meta"):
                model = train.build(run, 101)
            assert isinstance(model, RecurrentModel)
            assert (model.attention is not None) == attention
            assert (len(model.encoder), len(model.decoder), model.embedding.weight.shape) == (4, 4, (101, width))
            assert {dropout.probability for dropout in [*model.source_dropouts, *model.target_dropouts]} == {0.2}
