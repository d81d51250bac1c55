"""`fidelity=released_code`: each of its four differences by itself, against what the released code computes."""

import dataclasses
import json
import math

import pytest
import torch
from models import BOS, SIZES, VOCAB, batch
from run_results import result_of
from torch import Tensor, nn

from aiayn.config import compose, folders, schema
from aiayn.core import storage
from aiayn.cost import plan
from aiayn.paper.layers import sinusoids, sinusoids_in_halves
from aiayn.paper.transformer import Transformer
from aiayn.runs import records
from aiayn.runs.models import parameters, trained
from aiayn.tables import table3
from aiayn.training import train


def transformer(**fidelity: bool) -> Transformer:
    torch.manual_seed(17)
    model = Transformer(**SIZES, positions="sinusoids", max_length=7, vocab_size=VOCAB, **fidelity)
    return model.double().eval()


def test_the_paper_is_the_default_everywhere() -> None:
    assert {run.fidelity.name for run in (compose.compose_row(), *compose.rows().values())} == {"paper"}
    plain, released = transformer(), transformer(sinusoids_in_halves=True, target_space=True, zero_start=True)
    assert not torch.allclose(plain(batch()), released(batch()), atol=1e-3)  # control
    # What both have starts from the same numbers
    both = dict(released.named_parameters())
    assert all(torch.equal(parameter, both.pop(name)) for name, parameter in plain.named_parameters())
    assert list(both) == ["target_spaces"]


def test_sinusoids_in_halves_are_the_released_code_s() -> None:
    """num_timescales = channels // 2; increment = ln(1e4) / (num_timescales - 1); all sines, then all cosines."""
    length, channels = 7, 10
    increment = math.log(1e4) / (channels // 2 - 1)
    for position, row in enumerate(sinusoids_in_halves(length, channels)):
        angles = [position * math.exp(-i * increment) for i in range(channels // 2)]
        expected = [*map(math.sin, angles), *map(math.cos, angles)]
        torch.testing.assert_close(row, torch.tensor(expected, dtype=torch.float64))
    ours, papers = (of(length, channels).sort(1).values for of in (sinusoids_in_halves, sinusoids))
    assert not torch.allclose(ours, papers, atol=1e-3)  # control: no permutation of the paper's


def test_the_target_space_is_added_to_every_source_position() -> None:
    model, plain = transformer(target_space=True), transformer()
    vector = model.target_spaces[0].detach()

    class Shifted(nn.Module):
        """The paper's positions of the source, with the vector added by hand."""

        def extend(self, length: int) -> None:
            self.length = length

        def forward(self, positions: Tensor) -> Tensor:
            return sinusoids(self.length, 14)[positions] + vector

    assert not torch.allclose(model(batch()), plain(batch()))  # control
    plain.source_positions = Shifted()
    torch.testing.assert_close(model(batch()), plain(batch()))
    # The first of 32 is learned, from Glorot's uniform numbers
    model(batch()).logsumexp(1).sum().backward()
    assert model.target_spaces.grad.any(1).tolist() == [True] + [False] * 31
    bound = math.sqrt(6 / (32 + 14))
    assert 0.95 * bound < model.target_spaces.detach().abs().max() <= bound


def test_the_decoder_starts_with_zeros_not_with_bos() -> None:
    model, plain = transformer(zero_start=True), transformer()
    before = model(batch())
    assert not torch.allclose(before, plain(batch()))  # control
    with torch.no_grad():  # an embedding of zeros is what no embedding is
        model.embedding.weight[BOS] = 0
        plain.embedding.weight[BOS] = 0
    torch.testing.assert_close(model(batch()), plain(batch()))
    # BOS counts as one of the tokens to predict alone
    others = torch.arange(VOCAB) != BOS
    assert torch.equal(model(batch())[:, others], before[:, others])


# Millions of parameters of the released code, as worked out apart from this program
RELEASED = {
    **{"base": 65.13, "b_dk16": 58.03, "b_dk32": 60.40, "c_n2": 35.70, "c_n4": 50.41, "c_n8": 79.84},
    **{"c_dmodel256": 27.86, "c_dmodel1024": 167.98, "c_dff1024": 52.53, "c_dff4096": 90.32, "big": 218.3},
}


@pytest.mark.parametrize("name", RELEASED)
def test_a_row_has_the_released_code_s_millions_of_parameters(name: str) -> None:
    run = compose.compose_row(f"experiment={name}", "fidelity=released_code", "scale=paper", "data=wmt14_en_de")
    count = parameters(run, run.data.vocab_size) / 1e6
    assert count == pytest.approx(RELEASED[name], abs=0.05 if name == "big" else 0.005)


@pytest.mark.usefixtures("signals")
def test_more_rows_than_subwords_train_and_decode(toy) -> None:
    with pytest.raises(schema.ConfigError, match=r"fidelity\.embedding_rows=24: must be at least data\.vocab_size=25"):
        compose.compose_row(*toy, "fidelity.embedding_rows=24")
    run = compose.compose_row(*toy, "fidelity=released_code", "training.max_steps=1")
    folder = folders.run_folder(run)
    storage.write_text(folder / "config.yaml", compose.to_yaml(run))
    train.train(run, folder)
    model, dataset, *_ = trained(run)
    assert (len(model.embedding.weight), dataset.tokenizer.vocab_size) == (40_960, 25)
    assert json.loads((folder / "result.json").read_text())["params"] == parameters(run, 25)
    # A row without a subword is silent, whatever stands beside it
    known = dataset.tokenizer.encode(["1 2 3"])[0].tolist()
    assert dataset.tokenizer.decode([[*known[:2], 25, 40_959, *known[2:]], [30_000]]) == ["1 2 3", ""]
    assert dataset.tokenizer.decode([[*known[:2], 24, *known[2:]]]) != ["1 2 3"]  # control: the last subword


def test_every_difference_makes_another_run() -> None:
    plain, released = compose.compose_row(), compose.compose_row("fidelity=released_code")
    differences = ("sinusoids=halves", "target_space=true", "zero_start=true", "embedding_rows=40960")
    runs = [compose.compose_row(f"fidelity.{difference}") for difference in differences]
    assert len({folders.run_folder(run) for run in (plain, released, *runs)}) == 6
    whole = compose.compose_row(*(f"fidelity.{difference}" for difference in differences))
    assert dataclasses.replace(whole.fidelity, name="released_code") == released.fidelity  # these four and no other


def test_the_released_code_has_a_table_of_its_own(tmp_path) -> None:
    run = compose.compose_row("fidelity=released_code", f"output={tmp_path}")
    planned = plan.rows(run)
    assert [row.experiment for row in planned] == list(schema.ROWS)
    assert {str(folders.run_folder(row).parents[1]) for row in planned} == {f"{tmp_path}/tiny.released_code-mini"}
    assert plan.rows(compose.compose_row("fidelity.zero_start=true")) != planned  # control: it is planned alone
    for row in planned[:3]:
        storage.write_json(folders.run_folder(row) / "result.json", result_of(row))
    runs = records.read_runs(folders.sweep_folder(run))
    assert [line.name for line in table3.table(run, runs).lines if line.finished] == list(schema.ROWS[:3])
    assert table3.table(compose.compose_row(f"output={tmp_path}"), runs).finished == 0  # control
    assert table3.table(compose.compose_row("fidelity=released_code", "scale=paper", "data=wmt14_en_de"), []).comparable
