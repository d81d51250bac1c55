"""Table 2: the paper's own estimate by its own formula, and what runs of base and big computed and scored."""

import dataclasses
import json
import shutil
from collections.abc import Iterator

import numpy as np
import pytest

from aiayn.config import compose, folders
from aiayn.core import storage
from aiayn.cost import flops
from aiayn.data.encoded import Dataset
from aiayn.data.update_plan import Updates
from aiayn.tables import table2
from aiayn.training import train

SMALL = ("scale=smoke", "scale.steps=0.0001", "training.keep_checkpoints=20", "wandb.mode=disabled")


@pytest.fixture(scope="module")
def trained(digits: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Overrides of base and big, trained for 10 and 30 updates, every one of which is kept."""
    from conftest import handlers_restored

    overrides = [*digits, *SMALL, f"output={tmp_path_factory.mktemp('table2')}/runs"]
    for name in table2.PAPER:
        run = compose.compose_row(*overrides, f"experiment={name}")
        folder = folders.run_folder(run)
        storage.write_text(folder / "config.yaml", compose.to_yaml(run))
        with handlers_restored():
            train.train(run, folder)
    yield overrides
    shutil.rmtree(run.output)


def test_time_by_gpus_by_tflops_is_what_the_paper_prints(monkeypatch) -> None:
    monkeypatch.setattr(flops, "peak_of", {"P100": table2.P100}.get)
    for row in table2.PAPER.values():
        assert table2.by_time({"P100": 8 * row.hours * 3600}) == pytest.approx(row.flops, rel=0.01)
    assert table2.PAPER["base"].bleu == {"en-de": 27.3, "en-fr": 38.1}
    assert table2.PAPER["big"].bleu == {"en-de": 28.4, "en-fr": 41.8}
    assert table2.by_time({"P100": 8 * 3600}) != pytest.approx(3.3e18, rel=0.01)  # control


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("cpu", flops.CORE.peak),
        ("NVIDIA TITAN V", None),
    ],
)
def test_the_peak_is_that_of_the_device_that_the_run_was_trained_on(device, expected) -> None:
    assert table2.peak(device) == expected


def test_each_device_counts_with_its_own_seconds_and_peak() -> None:
    both = table2.by_time({"NVIDIA H200": 7.0, "cpu": 11.0})
    assert both == pytest.approx((7 * 989.4 + 11 * flops.CORE.peak) * 1e12)
    assert table2.by_time({"NVIDIA H200": 7.0, "NVIDIA TITAN V": 11.0}) is None
    assert table2.by_time({}) is None


def cells(line: str) -> list[str]:
    """The figures of a row of the table, in the order of its columns."""
    return line.partition(")")[2].split()


def test_evaluating_base_and_big_as_the_paper_does_prints_table_2(trained, capsys) -> None:
    rows = {}
    for name, published in table2.PAPER.items():
        run = compose.compose_row(*trained, f"experiment={name}", "split=test", f"average={published.average}")
        table2.main(run)
        rows[name] = folders.run_folder(run)
    text = capsys.readouterr().out
    first, last = text.split("Table 2 at scale ")[1:]
    assert last.startswith("smoke on digits, en-de, seed 1 (not the paper's conditions)\n")
    assert cells(first.splitlines()[4])[:5] == ["28.4", "–", "–", "–", "2.30e19"]  # not evaluated by then
    for line, (name, folder) in zip(last.splitlines()[3:5], rows.items(), strict=True):
        evaluation = json.loads((folder / f"evaluation-{table2.evaluation(name)}.json").read_text())
        figures = evaluation["bleu"]
        assert evaluation["signatures"]["paper"].endswith("-de-compounds")  # scored in the target language
        result = json.loads((folder / "result.json").read_text())
        assert result["device_seconds"]["cpu"] == pytest.approx(result["train_seconds"], abs=0.002)
        by_time = result["device_seconds"]["cpu"] * flops.CORE.peak * 1e12
        assert cells(line) == [
            {"base": "27.3", "big": "28.4"}[name],
            *(f"{figures[kind]:.1f}" for kind in ("paper", "sacrebleu", "intl")),
            {"base": "3.30e18", "big": "2.30e19"}[name],
            flops.power(by_time),
            {"base": "9.54e17", "big": "9.69e18"}[name],
            flops.power(counted_by_hand(compose.compose_row(*trained, f"experiment={name}"))),
        ]


def counted_by_hand(run: compose.Config) -> float:
    """From the sentences of every update that the plan of the run holds."""
    pairs = Dataset.open(compose.Path(run.prepared) / run.data.name).pairs("train")
    lengths = pairs.source_lengths, pairs.target_lengths
    updates = Updates(*lengths, run.training.tokens_per_update, seed=run.seed, start=0)
    seen = [sentences for (_, sentences), _ in zip(updates, range(run.training.max_steps), strict=False)]
    tokens = (sum(int(side[sentences].sum()) for sentences in seen) for side in lengths)
    weighted = (float(np.average(side[:], weights=side[:])) for side in lengths)
    return flops.training_flops(run.model, 25, *tokens, *weighted)


@pytest.mark.parametrize("change", ["split=dev", "average=2", "experiment=a_h1", "model.dropout=0.3"])
def test_another_evaluation_is_none_of_table_2(change) -> None:
    words = ("experiment=base", "split=test", "average=5")
    run = compose.compose_row(*words)
    assert table2.holds(run, "test-average5")
    assert table2.holds(compose.compose_row(*words, "fidelity=released_code"), "test-average5")
    other = compose.compose_row(*words, change)
    assert not table2.holds(other, f"{other.split}-average{other.average}")


def printed(*words: str) -> list[str]:
    """The table of runs that are not there, on a corpus that is not asked for."""
    return table2.lines(compose.compose_row(*words, "output=nowhere"), dataset=None)  # type: ignore[arg-type]


def test_the_paper_s_figures_are_those_of_the_languages_of_the_run() -> None:
    words = ("scale=paper", "experiment=base")
    german, french = (printed(f"data=wmt14_en_{language}", *words) for language in ("de", "fr"))
    assert german[0] == "Table 2 at scale paper on wmt14_en_de, en-de, seed 1"
    assert french[0] == "Table 2 at scale paper on wmt14_en_fr, en-fr, seed 1"
    for row, number in (("base", 3), ("big", 4)):
        columns = [cells(lines[number]) for lines in (german, french)]
        assert [found[0] for found in columns] == [str(bleu) for bleu in table2.PAPER[row].bleu.values()]
        assert columns[0][4] == columns[1][4] == flops.power(table2.PAPER[row].flops)
        model = compose.rows()[row].model
        tokens = compose.rows()[row].training.max_steps * 25_000
        for found, pieces in zip(columns, (37_000, 32_000), strict=True):  # 5.1
            assert found[6] == flops.power(flops.training_flops(model, pieces, tokens, tokens, 40, 40))
    assert not any("0.1" in line for line in german)
    assert "big" in french[7]
    assert french[7].endswith("with dropout 0.1 (6.1)")


def test_languages_that_the_paper_has_not_give_no_table() -> None:
    run = compose.compose_row("experiment=base", "split=test", "average=5", "data=wmt14_en_fr")
    assert table2.holds(run, "test-average5")
    for change in ({"target_language": "it"}, {"source_language": "de"}, {"source_language": "fr"}):
        other = dataclasses.replace(run, data=dataclasses.replace(run.data, **change))
        assert not table2.holds(other, "test-average5")


def test_the_footnote_says_over_how_many_updates_ours_and_the_paper_s_checkpoints_are_averaged(
    tmp_path, result_of
) -> None:
    # 12 hours are 100 000 updates and 84 hours 300 000; 5 and 20 checkpoints have 4 and 19 times 10 minutes between
    assert table2.published_span("base") == pytest.approx(4 * 100_000 / 72)
    assert table2.published_span("big") == pytest.approx(19 * 300_000 / 504)
    base, big = printed("scale=paper", "data=wmt14_en_de")[6:8]
    assert base == (
        "  base: the last 5, over 20,000 of 100,000 updates;"
        " the paper's, one each 10 minutes, over about 5,600 of 100,000"
    )
    assert big == (
        "  big: the last 20, over 95,000 of 300,000 updates;"
        " the paper's, one each 10 minutes, over about 11,300 of 300,000"
    )
    # As the run was trained, whatever the command that evaluates it says
    words = ("scale=paper", "data=wmt14_en_de", f"output={tmp_path}")
    trained_run = compose.compose_row(*words, "training.checkpoint_every=1400")
    storage.write_json(folders.run_folder(trained_run) / "result.json", result_of(trained_run))
    lines = table2.lines(compose.compose_row(*words), dataset=None)  # type: ignore[arg-type]
    assert "over 4,800 of 100,000 updates" in lines[6]  # from 68 times 1400
    assert lines[7] == big


@pytest.mark.parametrize(("last", "every", "count"), [(10, 1, 5), (100, 7, 5), (100, 100, 1), (98, 7, 3), (5, 7, 1)])
def test_the_span_is_that_of_the_checkpoints_that_training_writes(last, every, count) -> None:
    written = [step for step in range(1, last + 1) if step % every == 0 or step == last]  # as callbacks.Save has it
    assert table2.span(last, every, count) == written[-1] - written[-count]


def test_a_torn_evaluation_or_result_is_a_dash_and_no_traceback(trained, tmp_path) -> None:
    run = compose.compose_row(*trained, "experiment=base")
    dataset = Dataset.open(compose.Path(run.prepared) / run.data.name)
    copy = dataclasses.replace(run, output=str(tmp_path))
    folder = folders.run_folder(copy)
    folder.mkdir(parents=True)
    for text in ("{", "[]", '{"bleu": 7}', '{"bleu": {"paper": "high"}}'):
        (folder / "evaluation-test-average5.json").write_text(text)
        (folder / "result.json").write_text(text)
        line = table2.lines(copy, dataset)[3]
        assert cells(line) == ["27.3", "–", "–", "–", "3.30e18", "–", "9.54e17", "–"]
