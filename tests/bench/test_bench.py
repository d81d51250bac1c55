"""`aiayn bench`: what is asked for is measured, printed and written, every number. No test judges a time."""

import gc
import json
import re
import weakref

import pytest
import torch

from aiayn.bench import bench
from aiayn.config import compose, schema
from tests.bench.test_sheets import PART

GPU = ["hardware=gpu", "hardware.tokens_per_micro_batch=40"]


@pytest.fixture
def here(monkeypatch):
    """Measures in this process, where what is measured can be replaced."""
    monkeypatch.setattr(bench, "apart", lambda measure, *given: measure(*given))


@pytest.mark.parametrize("name", ["f_additive", "f_no_residual"])
def test_a_row_beyond_table_3_is_refused_and_nothing_is_written(name, tmp_path):
    with pytest.raises(schema.ConfigError, match=f"experiment={name}: bench measures the parts of Table 3; give one"):
        bench.main(compose.compose_row(f"experiment={name}", f"bench.output={tmp_path}/all.json"))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_command_prints_tables_and_writes_every_number(toy, tmp_path, capsys):
    sizes = ["model.d_k=8", "model.d_v=8", "bench.mean_length=5", "bench.updates=1", "bench.rounds=1"]
    sizes.append("bench.kind=rivals")
    bench.main(compose.compose_row(*toy, *sizes, f"bench.output={tmp_path}/all.json"))
    out = capsys.readouterr().out
    for words in ("threads", "bf16", "torch 2", "training: 1 updates", "beam 4", "greedy", "padded share"):
        assert words in out
    result = json.loads((tmp_path / "all.json").read_text())
    assert set(result["parts"]) == {"training", "decoding, beam 4", "decoding, greedy"}
    assert result["hardware"]["cpu"]
    assert result["config"]["bench"]["rounds"] == 1
    for part in result["parts"].values():
        assert all(len(line["seconds_a_round"]) == 1 for line in part["lines"])


@pytest.mark.usefixtures("here")
def test_one_kind_alone_is_measured_when_asked(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "training", lambda *_: dict(PART))
    monkeypatch.setattr(bench, "decoding", lambda *_: pytest.fail("not asked for"))
    bench.main(compose.compose_row(*toy, "bench.kind=training", f"bench.output={tmp_path}/all.json"))
    assert set(json.loads((tmp_path / "all.json").read_text())["parts"]) == {"training"}


@pytest.mark.usefixtures("here")
def test_the_tables_are_written_as_markdown_with_command_date_and_machine(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "training", lambda *_: dict(PART))
    monkeypatch.setattr(bench.sys, "argv", ["aiayn bench", "bench.kind=training", "data.name=my own"])
    run = compose.compose_row(*toy, "bench.kind=training", f"bench.output={tmp_path}/all.json")
    bench.main(run)
    text = re.sub(" +", " ", (tmp_path / "all.md").read_text())
    result = json.loads((tmp_path / "all.json").read_text())
    for words in (
        "| | precision | aiayn | slow | fast |",
        "| training | fp32 | 200 | 100 | |",
        "2.00 x the fastest rival",
        f"`aiayn bench bench.kind=training 'data.name=my own'`, {result['made_at']}",
        result["hardware"]["cpu"],
        "d_model 16",
    ):
        assert words in text


@pytest.mark.usefixtures("here")
def test_what_is_measured_is_written_before_the_next_part_begins(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "training", lambda *_: dict(PART))
    monkeypatch.setattr(bench, "decoding", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.main(compose.compose_row(*toy, f"bench.output={tmp_path}/all.json"))
    assert set(json.loads((tmp_path / "all.json").read_text())["parts"]) == {"training"}
    assert "| training | fp32 | 200 | 100 | |" in re.sub(" +", " ", (tmp_path / "all.md").read_text())


@pytest.mark.slow
def test_the_profile_is_torchs_own_table_of_each_precision(toy, tmp_path, capsys):
    sizes = ["bench.kind=profile", "bench.mean_length=5", "bench.updates=1", "bench.rounds=1"]
    run = compose.compose_row(*toy, *sizes, f"bench.output={tmp_path}/all.json")
    bench.main(run)
    found = json.loads((tmp_path / "all.json").read_text())["parts"]["profile"]
    assert set(found) == {"fp32", *(["bf16"] if bench.cpu()["bf16"] else [])}
    printed, written = capsys.readouterr().out, (tmp_path / "all.md").read_text()
    for table in found.values():
        lines = table.strip().splitlines()
        assert "Self CPU %" in lines[1]
        assert sum("# of Calls" not in line and not line.startswith("-") for line in lines[:-2]) == bench.PROFILED
        assert any("Adam" in line for line in lines)  # an update to its end
        assert all(line in printed and line in written for line in lines)


@pytest.mark.parametrize(
    ("kind", "hardware", "expected"),
    [
        ("all", [], ["training", "decoding, beam 4", "decoding, greedy", "growth", "profile"]),
        ("rivals", [], ["training", "decoding, beam 4", "decoding, greedy"]),
        ("decoding", [], ["decoding, beam 4", "decoding, greedy"]),
        ("growth", [], ["growth"]),
        ("profile", [], ["profile"]),
        ("layers", [], ["layers"]),
        ("layers", GPU, ["layers"]),
        ("all", GPU, ["training", "training, big", "newstest2013", "growth", "profile"]),
        ("decoding", GPU, ["newstest2013", "decoding, beam 4", "decoding, greedy"]),
    ],
)
def test_every_kind_has_its_parts_and_a_gpu_those_that_its_ten_minutes_hold(toy, kind, hardware, expected):
    assert list(bench.parts(compose.compose_row(*toy, f"bench.kind={kind}", *hardware))) == expected


def test_a_gpu_is_measured_at_the_papers_own_size_and_its_rivals_in_bf16(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    asked = []
    monkeypatch.setattr(bench, "training", lambda run, *rest: asked.append((run, *rest)) or dict(PART))
    monkeypatch.setattr(bench.storage, "write_json", lambda *_: None)
    monkeypatch.setattr(bench.storage, "write_text", lambda *_: None)
    bench.main(compose.compose_row("hardware=gpu", "bench.kind=training", "experiment=a_h1"))
    (small, precisions), (big, *_, against_rivals) = asked
    assert not against_rivals
    assert (precisions, small.hardware.device) == (["bf16"], "cuda")
    paper = compose.rows()
    assert small.model == paper["a_h1"].model
    assert big.model == paper["big"].model
    assert (small.data.vocab_size, small.training.tokens_per_update) == (37000, 25000)
    assert small.hardware.precision == "bf16-mixed"


def test_a_gpu_that_is_not_there_is_refused_in_one_line(toy, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(schema.ConfigError, match="torch sees no GPU here"):
        bench.main(compose.compose_row(*toy, *GPU))


def test_on_a_gpu_a_part_begins_without_the_models_of_the_part_before(toy_run):
    class Model:
        pass

    model = Model()
    model.itself = model  # as every accelerated layer holds itself
    left = weakref.ref(model)
    del model
    bench.apart(lambda run: None, schema.vary(toy_run, hardware={"accelerator": "gpu"}))
    gc.collect()
    assert left() is None


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # torch's compiler asks a rival's memory, which is no leaf, for its .grad
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.usefixtures("signals")
def test_on_a_gpu_every_part_is_measured(digits, tmp_path, monkeypatch):
    """At toy sizes: the paper's are the command's."""
    monkeypatch.setattr(bench.growth, "paper_sized", lambda run: run)
    monkeypatch.setattr(bench, "NEWSTEST", 11)
    sizes = [
        "scale=smoke",
        "hardware=gpu",
        "bench.updates=1",
        "bench.rounds=1",
        "bench.seconds=0",
        "bench.mean_length=5",
    ]
    bench.main(compose.compose_row(*digits, *sizes, f"bench.output={tmp_path}/all.json", f"output={tmp_path}/runs"))
    parts = json.loads((tmp_path / "all.json").read_text())["parts"]
    assert list(parts) == ["training", "training, big", "newstest2013", "growth", "profile"]
    assert len(parts["growth"]["rows"]) == 20
    assert "Self CUDA" in parts["profile"]["bf16"]
