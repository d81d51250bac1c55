"""`aiayn plan` prints what the table takes, and refuses now what would fail later."""

import dataclasses
import hashlib
import itertools
import os
import re
from types import SimpleNamespace

import pytest

from aiayn.config import compose, folders, schema
from aiayn.core import storage
from aiayn.cost import device_schedule, estimate, plan
from aiayn.data import wmt14
from aiayn.data.download import Remote
from aiayn.data.parallel_text import DataError
from tests.cost.test_estimate import ON_A_GPU, planned


def printed(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    plan.main(compose.compose_row(*overrides))
    return capsys.readouterr().out


def test_memory_grows_with_the_micro_batch() -> None:
    key = "hardware.tokens_per_micro_batch"
    small, large = (planned(*ON_A_GPU, f"{key}={n}")[0] for n in (1_000, 25_000))
    assert large.memory > 2 * small.memory > 2 * 16 * small.parameters
    fifth, shared = (planned(*ON_A_GPU, word)[0] for word in (f"{key}=5_000", "hardware.devices=5"))
    assert large.memory > shared.memory == fifth.memory  # of one update of 25 000 tokens


@pytest.mark.parametrize(("gpu", "gigabytes"), [("rtx4060", 8), ("rtx4080", 16), ("rtx4090", 24)])
def test_a_row_that_does_not_fit_is_told_a_value_that_does(gpu: str, gigabytes: int) -> None:
    corpus = estimate.CorpusStatistics(source_length=250.0, target_length=250.0)
    for name in ("a_h1", "big", "f_additive"):
        words = (*ON_A_GPU, f"experiment={name}", f"plan.gpu={gpu}")
        row = estimate.estimate(compose.compose_row(*words), corpus)
        (line,) = plan.refusals([row], [], corpus) or [""]
        assert (row.memory > gigabytes * 1e9) == bool(line)
        if value := re.search(r"give (\d+)$", line):
            fits = compose.compose_row(*words, f"hardware.tokens_per_micro_batch={value[1]}")
            assert plan.refusals([estimate.estimate(fits, corpus)], [], corpus) == []


def test_the_plan_has_times_epochs_and_disk() -> None:
    rows = planned(*ON_A_GPU, "plan.efficiency=0.41")
    turns = device_schedule.best_schedule({row.name: row.seconds for row in rows}, 1, 8, 8)
    rows[-1] = dataclasses.replace(rows[-1], run=schema.vary(rows[-1].run, hardware={"devices": 3}))
    corpus = estimate.CorpusStatistics(31.5, 29.25, 37_000, 10**9)
    text = "\n".join(plan.text(rows, turns, corpus, 8, [plan.Disk("output=x", 7e9, 9 * 10**9)], "given"))
    hours = rows[-1].seconds / 3600
    assert re.search(rf"^big .* 3 +{hours:.1f} h +{hours / 3:.1f} h$", text, re.MULTILINE)
    assert "31.5 source and 29.2 target tokens, weighted by tokens; 2.5 epochs of base." in text  # 100K times 25 000
    assert "8 x h200: peak 989.4 TFLOP/s, training sustains 41%, given." in text
    assert "Disk: 7.00 GB to be written, 9.0 GB free for output=x." in text


@pytest.mark.parametrize("words", [[], ["fidelity=released_code"]])
def test_a_cpu_is_planned_by_what_it_sustains_now(monkeypatch, words: list[str]) -> None:
    clock = itertools.count(0.5)
    monkeypatch.setattr(plan, "time", SimpleNamespace(thread_time=lambda: next(clock)))
    share = plan.sustained(compose.compose_row("scale=mini", *words), estimate.CorpusStatistics())
    # An update of at most 400 tokens took a second: all 2 240 take so many seconds, or somewhat more
    (base, *_) = planned("scale=mini", *words, f"plan.efficiency={share}")
    assert 2_240 <= base.seconds < 1.2 * 2_240


def test_overrides_of_a_row_s_own_are_planned_alone() -> None:
    assert [row.name for row in planned("experiment=big", "scale=mini")] == list(compose.rows())
    (row,) = planned("experiment=big", "scale=paper", "training.max_steps=17")
    assert row.name.startswith("big+")
    assert row.tokens == 17 * 25_000


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


def test_archives_of_the_right_names_are_refused_for_their_bytes(archives, tmp_path, capsys) -> None:
    words = ["data=wmt14_en_de", "training.max_steps=17", f"output={tmp_path}", f"data.source={archives}"]
    words.append(f"prepared={tmp_path}/prepared")
    said = r"(?s)%, measured now in updates of base\..*configuration, data and disk are checked; memory"
    assert re.search(said, printed(capsys, *words))
    path = archives / "dev.tgz"
    path.write_bytes(bytes(size := path.stat().st_size))
    with pytest.raises(DataError, match=rf"dev\.tgz: \d+ bytes .*; expected {size} bytes .*; replace it by http://"):
        plan.main(compose.compose_row(*words))
    assert "Nothing stands in the way" not in capsys.readouterr().out


def test_it_says_which_things_are_checked_and_which_are_not(archives, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(plan, "free_bytes", lambda folder: 10**15)
    words = ("data=wmt14_en_de", "training.max_steps=17", f"output={tmp_path}", f"prepared={tmp_path}/prepared")
    nothing, unread = "Nothing stands in the way: configuration", "; the data is not, it is still to be downloaded"
    assert printed(capsys, *words).endswith(f"{nothing} and disk are checked{unread}; memory is not, on a CPU.\n")
    words += ("hardware=gpu", "scale=paper")
    for path in archives.iterdir():
        said = [printed(capsys, *words, f"plan.gpus={n}") for n in (1, 8)]
        alone, shared = (float(re.search(r"(?m)^base\+.* (\d+\.\d+) +[18]  ", text)[1]) for text in said)
        assert said[1].endswith(f"{nothing}, memory and disk are checked{unread}.\n")
        assert alone > 1.5 * shared  # GB on each GPU
        storage.write_bytes(tmp_path / "prepared" / "downloads" / path.name, path.read_bytes())
    assert printed(capsys, *words).endswith(f"{nothing}, data, memory and disk are checked.\n")


def test_damaged_text_is_raised_after_the_plan(toy, tmp_path, capsys, monkeypatch) -> None:
    said = printed(capsys, *toy, "hardware.threads=2")
    assert "Nothing stands in the way" in said
    assert re.search(r"\d x group of 2 CPU cores: peak 0\.\d+ TFLOP/s", said)
    monkeypatch.setattr(plan, "free_bytes", lambda folder: 1000)
    run = compose.compose_row(*toy)
    torn, blank = tmp_path / "train.source", tmp_path / "dev.target"
    blank.write_text("\n" * 41)
    with pytest.raises(DataError, match="leaves no dev pair"):
        plan.main(compose.compose_row(*toy, f"data.dev_target={blank}", f"prepared={tmp_path}"))
    torn.write_bytes(compose.Path(run.data.train_source).read_bytes() + b"one line more\n")
    with pytest.raises(DataError, match=r"4002 lines, .* has 4001"):
        plan.main(compose.compose_row(*toy, f"data.train_source={torn}", f"prepared={tmp_path}"))
    said = capsys.readouterr().out
    assert "Data: not usable" in said
    assert "\nREFUSED: output" in said


def test_another_run_s_folder_and_a_full_disk_are_refused(toy, capsys, monkeypatch) -> None:
    run = compose.compose_row(*toy)
    folder = folders.run_folder(run)
    storage.write_text(folder / "config.yaml", compose.to_yaml(schema.vary(run, data={"max_length": 11})))
    storage.write_text(folder / "data.sha256", "0" * 64 + "\n")
    with pytest.raises(compose.ConfigError, match=r"data\.max_length=12: .* holds a run with data\.max_length=11"):
        plan.main(run)
    (folder / "config.yaml").unlink()
    plan.main(run)  # control
    monkeypatch.setattr(plan, "free_bytes", lambda folder: 1000)
    with pytest.raises(compose.ConfigError, match=r"output=.*: about 0\.0 GB are to be written and 0\.0 are free"):
        plan.main(run)


def test_two_disks_hold_a_share_each_and_one_the_sum(toy_run, monkeypatch) -> None:
    run = dataclasses.replace(toy_run, output="runs", prepared="corpora")
    planned, corpus = [estimate.estimate(run, estimate.CorpusStatistics())], estimate.CorpusStatistics(to_write=7e9)
    free = {"runs": 5 * 10**9, "corpora": 6 * 10**9}
    monkeypatch.setattr(plan, "free_bytes", lambda folder: free[str(folder)])
    monkeypatch.setattr(plan, "disk_of", str)
    runs, corpora = plan.disks(planned, corpus, 1)
    assert (runs.keys, runs.free, corpora.keys, corpora.free) == ("output=runs", 5e9, "prepared=corpora", 6e9)
    assert (runs.needed, corpora.needed) == (planned[0].disk + planned[0].checkpoint, 7e9)
    assert plan.refusals(planned, [runs, corpora], corpus) == [
        "prepared=corpora: about 7.0 GB are to be written and 6.0 are free there; give a larger disk"
    ]
    free["corpora"] = 8 * 10**9
    assert plan.refusals(planned, plan.disks(planned, corpus, 1), corpus) == []  # though `output` has less than the sum
    monkeypatch.setattr(plan, "disk_of", lambda folder: 0)
    (both,) = plan.disks(planned, corpus, 1)
    assert (both.keys, both.needed, both.free) == ("output=runs and prepared=corpora", runs.needed + 7e9, 5e9)
    assert len(plan.refusals(planned, [both], corpus)) == 1


def test_free_space_is_that_of_the_disk_where_the_folder_will_be(tmp_path) -> None:
    assert plan.disk_of(tmp_path / "not" / "yet") == os.stat(tmp_path).st_dev
    assert plan.disk_of(tmp_path) != plan.disk_of(compose.Path("/proc"))  # control
    disk = os.statvfs(tmp_path)
    assert plan.free_bytes(tmp_path / "not" / "yet") == pytest.approx(disk.f_bavail * disk.f_frsize, rel=0.01)


def test_other_precisions_and_too_few_gpus_are_refused() -> None:
    with pytest.raises(compose.ConfigError, match=r"hardware\.precision=32-true: .* bf16-mixed"):
        planned(*ON_A_GPU, "hardware.precision=32-true")
    with pytest.raises(compose.ConfigError, match=r"plan\.gpus=1: must be at least hardware\.devices=2"):
        plan.main(compose.compose_row("hardware=gpu", "hardware.devices=2", "plan.gpus=1"))
