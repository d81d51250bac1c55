"""Table 2: the paper's own estimate by its own formula, and what runs of base and big computed and scored."""

import dataclasses
import json
import shutil
from collections.abc import Iterator

import numpy as np
import pytest

from aiayn import config, evaluate, flops, storage, table2, train
from aiayn.batching import Updates
from aiayn.dataset import Dataset

SMALL = ("scale=smoke", "scale.steps=0.0001", "training.keep_checkpoints=20", "wandb.mode=disabled")


@pytest.fixture(scope="module")
def trained(digits: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Overrides of base and big, trained for 10 and 30 updates, every one of which is kept."""
    from conftest import handlers_restored

    overrides = [*digits, *SMALL, f"output={tmp_path_factory.mktemp('table2')}/runs"]
    for name in table2.PAPER:
        run = config.compose_row(*overrides, f"experiment={name}")
        folder = config.run_folder(run)
        storage.write_text(folder / "config.yaml", config.to_yaml(run))
        with handlers_restored():
            train.train(run, folder)
    yield overrides
    shutil.rmtree(run.output)


def test_time_by_gpus_by_tflops_is_what_the_paper_prints() -> None:
    for row in table2.PAPER.values():
        found = table2.by_time(row.hours * 3600, 8, table2.P100)
        assert found == pytest.approx(row.flops, rel=0.01)
    assert table2.PAPER["base"].bleu == 27.3
    assert table2.PAPER["big"].bleu == 28.4
    assert table2.by_time(3600, 8, table2.P100) != pytest.approx(3.3e18, rel=0.01)  # control


@pytest.mark.parametrize(
    ("accelerator", "expected"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("cpu", 3 * flops.CORE.peak),
        ("NVIDIA TITAN V", None),
    ],
)
def test_the_peak_is_that_of_the_device_that_the_run_was_trained_on(accelerator, expected) -> None:
    result = {"hardware": {"accelerator": accelerator}, "config": {"hardware": {"threads": 3}}}
    assert table2.peak(result) == expected


def cells(line: str) -> list[str]:
    """The figures of a row of the table, in the order of its columns."""
    return line.partition(")")[2].split()


def test_evaluating_base_and_big_as_the_paper_does_prints_table_2(trained, capsys) -> None:
    rows = {}
    for name, published in table2.PAPER.items():
        run = config.compose_row(*trained, f"experiment={name}", "split=test", f"average={published.average}")
        evaluate.main(run)
        rows[name] = config.run_folder(run)
    text = capsys.readouterr().out
    first, last = text.split("Table 2 at scale ")[1:]
    assert last.startswith("smoke on digits, seed 1 (not the paper's conditions)\n")
    assert cells(first.splitlines()[4])[:5] == ["28.4", "–", "–", "–", "2.30e19"]  # not evaluated by then
    for line, (name, folder) in zip(last.splitlines()[3:5], rows.items(), strict=True):
        figures = json.loads((folder / f"evaluation-{table2.evaluation(name)}.json").read_text())["bleu"]
        result = json.loads((folder / "result.json").read_text())
        by_time = result["train_seconds"] * flops.CORE.peak * 1e12
        assert cells(line) == [
            {"base": "27.3", "big": "28.4"}[name],
            *(f"{figures[kind]:.1f}" for kind in ("paper", "sacrebleu", "intl")),
            {"base": "3.30e18", "big": "2.30e19"}[name],
            flops.power(by_time),
            {"base": "9.54e17", "big": "9.69e18"}[name],
            flops.power(counted_by_hand(config.compose_row(*trained, f"experiment={name}"))),
        ]


def counted_by_hand(run: config.Config) -> float:
    """From the sentences of every update that the plan of the run holds."""
    pairs = Dataset.open(config.Path(run.prepared) / run.data.name).pairs("train")
    lengths = pairs.source_lengths, pairs.target_lengths
    updates = Updates(*lengths, run.training.tokens_per_update, seed=run.seed, start=0)
    seen = [sentences for (_, sentences), _ in zip(updates, range(run.training.max_steps), strict=False)]
    tokens = (sum(int(side[sentences].sum()) for sentences in seen) for side in lengths)
    weighted = (float(np.average(side, weights=side)) for side in lengths)
    return flops.training_flops(run.model, 25, *tokens, *weighted)


@pytest.mark.parametrize("change", ["split=dev", "average=2", "experiment=a_h1", "model.dropout=0.3"])
def test_another_evaluation_is_none_of_table_2(change) -> None:
    words = ("experiment=base", "split=test", "average=5")
    run = config.compose_row(*words)
    assert table2.holds(run, "test-average5")
    assert table2.holds(config.compose_row(*words, "fidelity=released_code"), "test-average5")
    other = config.compose_row(*words, change)
    assert not table2.holds(other, f"{other.split}-average{other.average}")


def test_a_torn_evaluation_or_result_is_a_dash_and_no_traceback(trained, tmp_path) -> None:
    run = config.compose_row(*trained, "experiment=base")
    dataset = Dataset.open(config.Path(run.prepared) / run.data.name)
    copy = dataclasses.replace(run, output=str(tmp_path))
    folder = config.run_folder(copy)
    folder.mkdir(parents=True)
    for text in ("{", "[]", '{"bleu": 7}', '{"bleu": {"paper": "high"}}'):
        (folder / "evaluation-test-average5.json").write_text(text)
        (folder / "result.json").write_text(text)
        line = table2.lines(copy, dataset)[3]
        assert cells(line) == ["27.3", "–", "–", "–", "3.30e18", "–", "9.54e17", "–"]
