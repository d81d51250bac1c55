"""The LSTM models against their equations written as loops, and what the Transformer is asked as well."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Command
from models import BOS, SOURCES, TARGETS, batch, recurrent
from torch import Tensor, nn
from trained_runs import trained

from aiayn.alternatives.recurrent import RecurrentModel
from aiayn.bench import bench
from aiayn.config import compose
from aiayn.config.schema import ConfigError
from aiayn.evaluation import export
from aiayn.report import attention_maps

KINDS = pytest.mark.parametrize("attention", [False, True], ids=["fixed vector", "attention"])


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


@KINDS
def test_dropout_does_not_depend_on_the_micro_batch(attention: bool) -> None:
    model, given = recurrent(attention).train(), batch()
    together = per_sentence(model(given, (1, 2)))
    for number, (source, target, logits) in enumerate(zip(SOURCES, TARGETS, together, strict=True)):
        first = {"first_source": int(given.source_offsets[number]), "first_target": int(given.target_offsets[number])}
        alone = batch([source], [target])
        torch.testing.assert_close(logits, model(replace(alone, **first), (1, 2)))
        if number:  # control
            assert not torch.allclose(logits, model(alone, (1, 2)))


def test_gradients_are_taken_outside_autocast(digits: list[str], tmp_path: Path, monkeypatch, signals: None) -> None:
    """Inside, the backward pass of an LSTM, which is made of plain products on a CPU, would round to bf16."""
    found, backward = [], torch.Tensor.backward

    def seen(*arguments: object) -> None:
        found.append(torch.is_autocast_enabled("cpu"))
        backward(*arguments)

    monkeypatch.setattr(torch.Tensor, "backward", seen)
    words = ("experiment=s_rnn", "scale=smoke", "hardware.precision=bf16-mixed", "training.max_steps=1")
    run = compose.compose_row(*digits, *words, "wandb.mode=disabled", f"output={tmp_path}/runs")
    trained(run, tmp_path / "run")
    assert found
    assert not any(found)


@pytest.mark.slow
def test_a_smoke_row_is_trained_evaluated_and_translates(digits: list[str], aiayn: Command) -> None:
    words = [*digits, "experiment=s_rnn_attention", "scale=smoke", "data.vocab_size=25", "wandb.mode=disabled"]
    assert "dev perplexity" in aiayn("train", *words).stdout
    assert "bits per character" in aiayn("evaluate", *words, "split=test").stdout
    assert len(aiayn("translate", *words, text="1 2 3\n\n4 5\n").stdout.splitlines()) == 3


@pytest.mark.parametrize("command", [export, attention_maps, bench])
def test_what_is_only_for_transformers_is_refused(command: Any, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"rnn_attention: .* such as (experiment=)?base"):
        command.main(compose.compose_row("experiment=s_rnn_attention", "format=safetensors"))
    assert list(tmp_path.iterdir()) == []
