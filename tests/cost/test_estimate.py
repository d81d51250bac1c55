"""What a run takes: the figures are those of real models, of real runs and of a table made by hand."""

import pytest
import torch

from aiayn.config import compose, folders
from aiayn.cost import estimate, flops, plan
from aiayn.data.dataset import Dataset
from aiayn.paper.batch import Batch
from aiayn.paper.loss import label_smoothed_cross_entropy
from aiayn.runs import records
from aiayn.runs.models import build, parameters

ON_A_GPU = ("scale=paper", "data=wmt14_en_de", "hardware=gpu")
# One H200 that sustains 790 TFLOP/s
AT_790 = (*ON_A_GPU, "plan.efficiency=0.79846", "plan.gpus=1")
# Worked out apart from this program for 37 000 subwords and a mean length of 40: millions of parameters (attention's
# biases left out), TFLOP an update, minutes of one H200 at 790 TFLOP/s
THE_WORK = {
    "base": (63.05, 9.54, 20),
    "b_dk16": (55.97, 8.44, 18),
    "c_n2": (33.64, 5.07, 11),
    "c_n8": (77.75, 11.77, 25),
    "c_dmodel256": (26.82, 4.06, 9),
    "c_dmodel1024": (163.82, 24.74, 52),
    "big": (214.17, 32.29, 204),
}


def planned(*overrides: str) -> list[estimate.Estimate]:
    return [estimate.estimate(run, estimate.CorpusStatistics()) for run in plan.rows(compose.compose_row(*overrides))]


def test_the_rows_take_what_the_table_of_the_work_says() -> None:
    rows = {row.name: row for row in planned(*AT_790)}
    assert len(rows) == 20
    for name, (millions, tera, minutes) in THE_WORK.items():
        row = rows[name]
        assert row.parameters / 1e6 == pytest.approx(millions, rel=1e-3)  # that table leaves out attention's biases
        assert row.flops / row.run.training.max_steps / 1e12 == pytest.approx(tera, abs=0.006)
        assert row.seconds / 60 == pytest.approx(minutes, abs=0.51)
    assert sum(row.flops for row in rows.values()) == pytest.approx(2.84e19, rel=3e-3)
    assert sum(row.seconds for row in rows.values()) / 3600 == pytest.approx(10.0, abs=0.05)
    slower = planned(*AT_790[:-2], "plan.efficiency=0.23954")
    assert sum(row.seconds for row in slower) / 3600 == pytest.approx(33.2, abs=0.1)  # control: at 30 % of it


@pytest.mark.parametrize(("name", "attention"), [("s_rnn", 0), ("s_rnn_attention", 2 * 512**2)])
def test_a_recurrent_row_is_planned_with_its_own_parameters(name: str, attention: int) -> None:
    (row,) = planned(f"experiment={name}", "scale=paper", "data.vocab_size=997")
    # Four layers of 6 and 8 d_model^2 weights, two biases of each gate, and the embedding
    assert row.parameters == 4 * (14 * 512**2 + 2 * 2 * 4 * 512) + attention + 997 * 512


@pytest.mark.parametrize(
    ("name", "like", "added"),
    [("f_relative_positions", "base", 2 * 33 * 8 * 16), ("f_additive", "a_h1", 3 * 128), ("f_no_residual", "base", 0)],
)
def test_a_row_beyond_is_planned_with_its_own_parameters(name: str, like: str, added: int) -> None:
    (row,) = planned(f"experiment={name}")
    (same,) = (each for each in planned() if each.name == like)
    assert row.parameters == same.parameters + row.run.model.num_layers * added
    assert (row.flops > same.flops) == (added > 0)


TOY = ("scale=paper", "model.num_layers=2", "model.d_model=46")
OF_TRANSFORMER = (*TOY, "model.d_ff=83", "model.num_heads=3", "model.d_k=5", "model.d_v=17")


def saved(words: tuple[str, ...], dropout: float) -> tuple[float, float]:
    """Bytes that torch keeps for the backward pass, weights left out, and what the estimate says; for 64 sentences."""
    run = compose.compose_row(*words, f"model.dropout={dropout}", "hardware.precision=64-true")
    model, sizes = build(run, 31), run.model
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids, offsets = torch.randint(4, 31, (64 * 19,)), torch.arange(65) * 19
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        batch = Batch(ids, ids, ids, offsets, offsets)
        loss, _ = label_smoothed_cross_entropy(model.hidden(batch, (1, 2)), model.embedding.weight, ids, 0.1)
    alive = sum(kept.values()) - 8 * model.embedding.weight.numel()  # its gradient, which grows with no token
    del loss
    return alive, estimate.saved_bytes(sizes, 8, 8, 8, estimate.CorpusStatistics(19, 19)) * 64 * 19


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("words", [OF_TRANSFORMER, ("experiment=s_rnn", *TOY), ("experiment=s_rnn_attention", *TOY)])
def test_what_is_kept_for_the_backward_pass_is_what_torch_keeps(words, dropout) -> None:
    alive, expected = saved(words, dropout)
    assert alive == expected
    assert saved(words, 0.1 - dropout)[0] != alive  # control: a mask is seen


def test_a_prepared_corpus_gives_lengths_and_tokens(finished) -> None:
    run = compose.compose_row(*finished)
    corpus = estimate.corpus_statistics(run)
    pairs = Dataset(folders.prepared_folder(run)).pairs("train")
    assert (corpus.source_length, corpus.target_length) == flops.weighted_lengths(pairs)
    assert (corpus.target_tokens, corpus.vocab_size) == (len(pairs.target_ids), 25)
    assert "prepared, every file" in corpus.found


def test_a_corpus_not_downloaded_is_planned_with_its_archives(tmp_path) -> None:
    words = ("data=wmt14_en_de", f"prepared={tmp_path}/prepared")
    part = estimate.corpus_statistics(compose.compose_row(*words, "scale=mini"))
    assert part.to_write == 1_695_017_123 + 12_000 * 150
    corpus = estimate.corpus_statistics(compose.compose_row(*words, "scale=paper"))
    assert corpus.to_write == 1_695_017_123 + 4_500_000 * 150
    assert "1.7 GB to download" in corpus.found
    assert not corpus.complete
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(
        compose.ConfigError, match=r"data\.source=nowhere: lacks http.*training-parallel-europarl-v7\.tgz"
    ):
        estimate.corpus_statistics(compose.compose_row(*words, "data.source=nowhere"))


def test_the_disk_estimate_is_what_a_run_leaves(finished) -> None:
    run = compose.compose_row(*finished)
    folder = folders.run_folder(run)
    files = sum(path.stat().st_size for path in (folder / "checkpoints").glob("*.ckpt"))
    states = estimate.CHECKPOINT_BYTES * parameters(run, 25) * len(list((folder / "checkpoints").glob("*.ckpt")))
    assert states < files < states + 3 * 64_000  # names and shapes, which a model of real size outweighs
    lines = (folder / records.METRICS).stat().st_size / run.training.max_steps
    assert estimate.UPDATE_BYTES / 4 < lines < estimate.UPDATE_BYTES
