"""`aiayn plan`: its figures are those of real models and of a table made by hand; what would fail later fails now."""

import dataclasses
import hashlib
import os

import pytest
import torch

from aiayn.alternatives.parts import transformer
from aiayn.config import compose, folders, schema
from aiayn.cost import estimate, flops, plan, schedule
from aiayn.data import wmt14
from aiayn.data.download import Remote
from aiayn.data.parallel_text import DataError
from aiayn.evaluation.evaluate import build, parameters
from aiayn.paper.batch import Batch
from aiayn.paper.fast.cross_entropy import label_smoothed_cross_entropy
from aiayn.runs import records
from tests.cost.test_flops import THE_WORK

ON_A_GPU = ("scale=paper", "data=wmt14_en_de", "hardware=gpu")
# One H200 that sustains 790 TFLOP/s
AT_790 = (*ON_A_GPU, "plan.efficiency=0.79846", "plan.gpus=1")
# Minutes of one H200 at 790 TFLOP/s, worked out apart from this program
MINUTES = {"base": 20, "b_dk16": 18, "c_n2": 11, "c_n8": 25, "c_dmodel256": 9, "c_dmodel1024": 52, "big": 204}


def planned(*overrides: str) -> list[estimate.Estimate]:
    return [estimate.estimate(run, estimate.Corpus()) for run in plan.rows(compose.compose_row(*overrides))]


def printed(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    plan.main(compose.compose_row(*overrides))
    return capsys.readouterr().out


def test_the_rows_take_what_the_table_of_the_work_says() -> None:
    rows = {row.name: row for row in planned(*AT_790)}
    assert len(rows) == 20
    for name, (millions, _, tera) in THE_WORK.items():
        row = rows[name]
        assert row.parameters / 1e6 == pytest.approx(millions, rel=1e-3)  # that table leaves out attention's biases
        assert row.flops / row.run.training.max_steps / 1e12 == pytest.approx(tera, abs=0.006)
        assert row.seconds / 60 == pytest.approx(MINUTES[name], abs=0.51)
    assert sum(row.flops for row in rows.values()) == pytest.approx(2.84e19, rel=3e-3)
    assert sum(row.seconds for row in rows.values()) / 3600 == pytest.approx(10.0, abs=0.05)
    slower = planned(*AT_790[:-2], "plan.efficiency=0.23954")
    assert sum(row.seconds for row in slower) / 3600 == pytest.approx(33.2, abs=0.1)  # control: at 30 % of it


@pytest.mark.parametrize(("name", "attention"), [("s_rnn", 0), ("s_rnn_attention", 2 * 512**2)])
def test_a_recurrent_row_is_planned_alone_with_its_own_parameters(name: str, attention: int) -> None:
    (row,) = planned(f"experiment={name}", "scale=paper", "data.vocab_size=997")
    # Four layers of 6 and 8 d_model^2 weights, two biases of each gate, and the embedding
    assert row.parameters == 4 * (14 * 512**2 + 2 * 2 * 4 * 512) + attention + 997 * 512


def test_the_parameters_are_those_of_the_model_that_training_builds() -> None:
    (row,) = planned("scale=mini", "model.d_ff=800", "data.vocab_size=997")
    model = transformer(**vars(row.run.model), max_length=row.run.data.max_length, vocab_size=997)
    assert row.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert row.parameters != planned("scale=mini", "model.d_ff=900", "data.vocab_size=997")[0].parameters  # control


@pytest.mark.parametrize("name", [name for name in schema.BEYOND if name.startswith("f_")])
def test_a_row_beyond_table_3_is_planned_alone_with_its_own_parameters(name: str) -> None:
    (row,) = planned(f"experiment={name}", "data.vocab_size=997")
    like = "a_h1" if name in ("f_unscaled", "f_additive") else "base"
    table3 = {row.name: row for row in planned("data.vocab_size=997")}
    assert name not in table3
    sizes = row.run.model
    layers = {"f_additive": 3 * sizes.d_k, "f_relative_positions": 2 * 33 * sizes.d_k}.get(name, 0)
    assert row.parameters == table3[like].parameters + sizes.num_layers * layers
    assert (row.flops > table3[like].flops) == (row.memory > table3[like].memory or name == "f_relative_positions")
    assert (row.flops == table3[like].flops) == (layers == 0)


SMALL = ("scale=paper", "model.num_layers=2", "model.d_model=46")
OF_TRANSFORMER = (*SMALL, "model.d_ff=83", "model.num_heads=3", "model.d_k=5", "model.d_v=17")


def saved(dropout: float, source: int, target: int, *words: str) -> tuple[float, float]:
    """Bytes that torch keeps for the backward pass, weights left out, and what the estimate says; for 64 sentences."""
    run = compose.compose_row(*(words or OF_TRANSFORMER), f"model.dropout={dropout}", "hardware.precision=64-true")
    model, sizes = build(run, 31), run.model
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    offsets = [torch.arange(65) * length for length in (source, target)]
    ids = [torch.randint(4, 31, (64 * length,)) for length in (source, target)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        batch = Batch(ids[0], ids[1], ids[1], *offsets)
        loss, _ = label_smoothed_cross_entropy(model.hidden(batch, (1, 2)), model.embedding.weight, ids[1], 0.1)
    alive = sum(kept.values()) - 8 * model.embedding.weight.numel()  # its gradient, which grows with no token
    del loss
    return alive, estimate.saved_bytes(sizes, 8, 8, 8, estimate.Corpus(source, target)) * 64 * target


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_is_kept_for_the_backward_pass_is_what_torch_keeps(dropout: float) -> None:
    alive, expected = saved(dropout, 7, 7)
    assert expected == alive
    assert saved(0.1 - dropout, 7, 7)[0] != alive  # control: a mask is seen


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("row", ["s_rnn", "s_rnn_attention"])
def test_what_a_recurrent_row_keeps_is_what_torch_keeps(row: str, dropout: float) -> None:
    alive, expected = saved(dropout, 7, 7, f"experiment={row}", *SMALL)
    assert expected == alive
    assert saved(0.1 - dropout, 7, 7, f"experiment={row}", *SMALL)[0] != alive  # control: a mask is seen


def test_memory_grows_with_the_micro_batch_and_a_row_that_does_not_fit_is_refused(capsys) -> None:
    small, large = (
        estimate.estimate(
            compose.compose_row(*ON_A_GPU, f"hardware.tokens_per_micro_batch={tokens}"), estimate.Corpus()
        )
        for tokens in (1_000, 25_000)
    )
    assert large.memory > 2 * small.memory > 2 * 16 * small.parameters
    (*_, big) = planned(*ON_A_GPU, "plan.gpu=rtx4090", "hardware.tokens_per_micro_batch=25000")
    words = r"tokens_per_micro_batch=25000: big takes about 25.0 GB, a rtx4090 has 24; lower it"
    assert any(words in line for line in plan.refusals([dataclasses.replace(big, memory=25e9)], []))
    assert plan.refusals([big], []) == []  # control


def test_on_eight_gpus_the_big_row_gets_three_and_on_a_cpu_every_row_what_it_asks_for() -> None:
    rows = planned(*ON_A_GPU)
    turns = schedule.best_schedule(rows, 1, schedule.most_of_one(rows[0].run.hardware, 8), 8)
    assert {turn.row.name: len(turn.devices) for turn in turns if len(turn.devices) > 1} == {"big": 3}
    alone = schedule.schedule(rows, {row.name: 1 for row in rows}, 8)
    assert schedule.length(turns) < 0.45 * schedule.length(alone)
    on_a_cpu = planned("scale=mini")
    most = schedule.most_of_one(on_a_cpu[0].run.hardware, 2)
    assert {len(turn.devices) for turn in schedule.best_schedule(on_a_cpu, 1, most, 2)} == {1}


def test_cost_is_the_given_price_of_every_hour_and_there_is_none_without_a_price(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(plan, "free_bytes", lambda folder: 10**15)
    words = ("hardware=gpu", f"output={tmp_path}", f"prepared={tmp_path}")
    text = printed(capsys, *words, "scale=paper", "plan.price_per_hour=3")
    total = sum(row.seconds for row in planned("scale=paper", "hardware=gpu")) / 3600 * 3
    (whole,) = (line for line in text.splitlines() if line.startswith("all "))
    assert "cost\n" in text
    assert whole.endswith(f" {total:,.2f}")
    assert "41%, assumed: " in text
    without = printed(capsys, *words, "scale=paper", "plan.efficiency=0.5")
    assert "cost\n" not in without
    assert "50%, given" in without
    assert list(tmp_path.iterdir()) == []


def test_overrides_of_a_row_s_own_are_planned_alone() -> None:
    assert [row.name for row in planned("experiment=big", "scale=mini")] == list(compose.rows())
    (row,) = planned("experiment=big", "scale=paper", "training.max_steps=17")
    assert row.name.startswith("big+")
    assert row.tokens == 17 * 25_000


def test_a_prepared_corpus_gives_its_lengths_pieces_and_tokens(finished) -> None:
    run = compose.compose_row(*finished)
    corpus = estimate.corpus_of(run)
    folder = compose.Path(run.prepared) / run.data.name
    pairs = estimate.Dataset.open(folder).pairs("train")
    lengths = [int(length) for length in pairs.target_lengths]
    assert corpus.target_length == pytest.approx(sum(length**2 for length in lengths) / sum(lengths))
    assert corpus.target_length > sum(lengths) / len(lengths)  # control: longer than the plain mean
    assert (corpus.target_tokens, corpus.vocab_size) == (sum(lengths), 25)
    assert "prepared, every file" in corpus.found


def test_a_corpus_still_to_be_downloaded_is_planned_with_its_archives(tmp_path) -> None:
    words = ("data=wmt14_en_de", f"prepared={tmp_path}/prepared")
    corpus = estimate.corpus_of(compose.compose_row(*words))
    assert corpus.to_write == 1_695_017_123 + 4_500_000 * 150
    assert "1.7 GB to download" in corpus.found
    assert not corpus.complete
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(compose.ConfigError, match=r"data\.source=nowhere: holds no training-parallel-europarl-v7\.tgz"):
        estimate.corpus_of(compose.compose_row(*words, "data.source=nowhere"))


@pytest.fixture
def archives(tmp_path, monkeypatch) -> compose.Path:
    """A folder with the archives of a corpus that has the names of WMT's, and contents of this test's own."""
    folder = tmp_path / "archives"
    folder.mkdir()

    def kept(part: wmt14.Part) -> wmt14.Part:
        content = part.archive.name.encode() * 997
        (folder / part.archive.name).write_bytes(content)
        remote = Remote(part.archive.url, len(content), hashlib.sha256(content).hexdigest())
        return dataclasses.replace(part, archive=remote)

    whole = wmt14.CORPORA["wmt14_en_de"]
    train, dev, test = tuple(map(kept, whole.train)), kept(whole.dev), kept(whole.test)
    monkeypatch.setitem(wmt14.CORPORA, "wmt14_en_de", dataclasses.replace(whole, train=train, dev=dev, test=test))
    return folder


@pytest.mark.parametrize("other", [b"too short", b"of the same size"], ids=lambda other: other.decode())
def test_archives_of_the_right_names_are_refused_for_their_bytes(archives, tmp_path, capsys, other) -> None:
    words = ["data=wmt14_en_de", "training.max_steps=17", f"output={tmp_path}", f"data.source={archives}"]
    words.append(f"prepared={tmp_path}/prepared")
    assert "configuration, data and disk are checked; memory" in printed(capsys, *words)
    path = archives / "dev.tgz"
    size = path.stat().st_size
    path.write_bytes(other if other == b"too short" else other.ljust(size))
    with pytest.raises(
        DataError, match=rf"dev\.tgz: \d+ bytes .*; expected {size} bytes .*; replace it by http://data"
    ):
        plan.main(compose.compose_row(*words))
    assert "Nothing stands in the way" not in capsys.readouterr().out


def test_it_says_which_things_are_checked_and_which_are_not(archives, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(plan, "free_bytes", lambda folder: 10**15)
    words = ("data=wmt14_en_de", "training.max_steps=17", f"output={tmp_path}", f"prepared={tmp_path}/prepared")
    unread = "; the data is not, it is still to be downloaded"
    *_, last = printed(capsys, *words).splitlines()
    assert last == (f"Nothing stands in the way: configuration and disk are checked{unread}; memory is not, on a CPU.")
    on_a_gpu = (*words, "hardware=gpu", "scale=paper")
    *_, last = printed(capsys, *on_a_gpu).splitlines()
    assert last == f"Nothing stands in the way: configuration, memory and disk are checked{unread}."
    downloads = tmp_path / "prepared" / "downloads"
    downloads.mkdir(parents=True)
    for path in archives.iterdir():
        *_, last = printed(capsys, *on_a_gpu).splitlines()
        assert unread in last
        (downloads / path.name).write_bytes(path.read_bytes())
    *_, last = printed(capsys, *on_a_gpu).splitlines()
    assert last == "Nothing stands in the way: configuration, data, memory and disk are checked."


def test_the_disk_estimate_is_what_a_run_leaves(finished) -> None:
    run = compose.compose_row(*finished)
    folder = folders.run_folder(run)
    files = sum(path.stat().st_size for path in (folder / "checkpoints").glob("*.ckpt"))
    states = estimate.CHECKPOINT_BYTES * parameters(run, 25) * len(list((folder / "checkpoints").glob("*.ckpt")))
    assert states < files < states + 3 * 64_000  # names and shapes, which a model of real size outweighs
    lines = (folder / records.METRICS).stat().st_size / run.training.max_steps
    assert estimate.UPDATE_BYTES / 4 < lines < estimate.UPDATE_BYTES


def test_text_that_is_damaged_is_printed_beside_the_plan_and_then_raised(toy, tmp_path, capsys) -> None:
    assert "Nothing stands in the way" in printed(capsys, *toy)
    run = compose.compose_row(*toy)
    torn = tmp_path / "train.source"
    torn.write_bytes(compose.Path(run.data.train_source).read_bytes() + b"one line more\n")
    with pytest.raises(DataError, match=r"4002 lines, .* has 4001"):
        plan.main(compose.compose_row(*toy, f"data.train_source={torn}", f"prepared={tmp_path}"))
    assert "REFUSED: " in capsys.readouterr().out
    with pytest.raises(compose.ConfigError, match=r"data\.dev_target='/nowhere': no such file"):
        plan.main(compose.compose_row(*toy, "data.dev_target=/nowhere", f"prepared={tmp_path}"))


def test_a_folder_of_another_run_and_a_full_disk_are_refused_before_anything_runs(toy, capsys, monkeypatch) -> None:
    run = compose.compose_row(*toy)
    folder = folders.run_folder(run)
    folder.mkdir(parents=True)
    other = dataclasses.replace(run, data=dataclasses.replace(run.data, max_length=11))
    (folder / "config.yaml").write_text(compose.to_yaml(other))
    with pytest.raises(compose.ConfigError, match=r"data\.max_length=12: .* holds a run with data\.max_length=11"):
        plan.main(run)
    (folder / "config.yaml").unlink()
    plan.main(run)  # control
    monkeypatch.setattr(plan, "free_bytes", lambda folder: 1000)
    with pytest.raises(compose.ConfigError, match=r"output=.*: about 0\.0 GB are to be written and 0\.0 are free"):
        plan.main(run)


def test_each_disk_is_asked_for_its_own_share_and_one_that_holds_both_for_the_sum(toy_run, monkeypatch) -> None:
    run = dataclasses.replace(toy_run, output="runs", prepared="corpora")
    planned, corpus = [estimate.estimate(run, estimate.Corpus())], estimate.Corpus(to_write=7e9)
    free = {"runs": 5 * 10**9, "corpora": 6 * 10**9}
    monkeypatch.setattr(plan, "free_bytes", lambda folder: free[str(folder)])
    monkeypatch.setattr(plan, "disk_of", str)
    runs, corpora = plan.disks(planned, corpus, 1)
    assert (runs.keys, runs.free, corpora.keys, corpora.free) == ("output=runs", 5e9, "prepared=corpora", 6e9)
    assert (runs.needed, corpora.needed) == (planned[0].disk + planned[0].checkpoint, 7e9)
    assert plan.refusals(planned, [runs, corpora]) == [
        "prepared=corpora: about 7.0 GB are to be written and 6.0 are free there; give a larger disk"
    ]
    free["corpora"] = 8 * 10**9
    assert plan.refusals(planned, plan.disks(planned, corpus, 1)) == []  # though `output` has less than the sum
    monkeypatch.setattr(plan, "disk_of", lambda folder: 0)
    (both,) = plan.disks(planned, corpus, 1)
    assert (both.keys, both.needed, both.free) == ("output=runs and prepared=corpora", runs.needed + 7e9, 5e9)
    assert len(plan.refusals(planned, [both])) == 1


def test_free_space_is_that_of_the_disk_where_the_folder_will_be(tmp_path) -> None:
    assert plan.disk_of(tmp_path / "not" / "yet") == os.stat(tmp_path).st_dev
    assert plan.disk_of(tmp_path) != plan.disk_of(compose.Path("/proc"))  # control
    disk = os.statvfs(tmp_path)
    assert plan.free_bytes(tmp_path / "not" / "yet") == pytest.approx(disk.f_bavail * disk.f_frsize, rel=0.01)


def test_a_gpu_s_peak_is_known_in_bf16_only_and_rows_need_as_many_gpus_as_they_ask_for() -> None:
    with pytest.raises(compose.ConfigError, match=r"hardware\.precision=32-true: .* bf16-mixed"):
        planned(*ON_A_GPU, "hardware.precision=32-true")
    with pytest.raises(compose.ConfigError, match=r"plan\.gpus=1: must be at least hardware\.devices=2"):
        plan.main(compose.compose_row("hardware=gpu", "hardware.devices=2", "plan.gpus=1"))
    assert flops.device(compose.compose_row().hardware, "h200") is flops.CORE
