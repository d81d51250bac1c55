"""Table 2: the paper's own estimate by its own formula, and what runs of base and big computed and scored."""

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator

import numpy as np
import pytest
import trained_runs

from aiayn.config import compose, folders
from aiayn.core.signals import StopFlag
from aiayn.cost import flops
from aiayn.data.dataset import Dataset
from aiayn.data.update_plan import training_plan
from aiayn.tables import table2


@pytest.fixture(scope="module")
def trained(digits: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Overrides of base and big, trained for 10 and 30 updates, every one of which is kept."""
    small = ("scale=smoke", "scale.steps=0.0001", "training.keep_checkpoints=20", "wandb.mode=disabled")
    overrides = [*digits, *small, f"output={tmp_path_factory.mktemp('table2')}/runs"]
    for name in table2.PAPER:
        run = compose.compose_row(*overrides, f"experiment={name}")
        with StopFlag():
            trained_runs.trained(run, folders.run_folder(run))
    yield overrides
    shutil.rmtree(run.output)


def rows(lines: list[str]) -> list[list[str]]:
    """The cells of each row of the table, in the order of its columns."""
    return [re.split(r" {2,}", line) for line in lines[2:14]]


PRINTED, HERE = "the paper's table", "measured here"
# Copied by hand from the paper's Table 2: BLEU en-de and en-fr, FLOPs en-de and en-fr
TABLE_2 = """
ByteNet                    | 23.75 | –     | –       | –
Deep-Att + PosUnk          | –     | 39.2  | –       | 1.0e20
GNMT + RL                  | 24.6  | 39.92 | 2.3e19 | 1.4e20
ConvS2S                    | 25.16 | 40.46 | 9.6e18 | 1.5e20
MoE                        | 26.03 | 40.56 | 2.0e19 | 1.2e20
Deep-Att + PosUnk Ensemble | –     | 40.4  | –       | 8.0e20
GNMT + RL Ensemble         | 26.30 | 41.16 | 1.8e20 | 1.1e21
ConvS2S Ensemble           | 26.36 | 41.29 | 7.7e19 | 1.2e21
Transformer (base)         | 27.3  | 38.1  | 3.3e18 | 3.3e18
Transformer (big)          | 28.4  | 41.8  | 2.3e19 | 2.3e19
"""
AS_PRINTED = [[cell.strip() for cell in line.split("|")] for line in TABLE_2.strip().splitlines()]


def test_evaluating_as_the_paper_does_prints_table_2(trained, capsys) -> None:
    rows_of, counted = {}, {}
    for name, published in table2.PAPER.items():
        run = compose.compose_row(*trained, f"experiment={name}", "split=test", f"average={published.average}")
        table2.main(run)
        rows_of[name], counted[name] = folders.run_folder(run), flops.power(counted_by_hand(run))
    text = capsys.readouterr().out
    first, last = text.split("Table 2 at scale ")[1:]
    assert last.startswith("smoke on digits, en-de, seed 1 (not the paper's conditions)\n")
    assert rows(first.splitlines())[11] == ["Transformer (big)", HERE, *["–"] * 4, counted["big"]]
    found = rows(last.splitlines())
    assert [row[:3] for row in found[:10]] == [[name, PRINTED, bleu] for name, bleu, *_ in AS_PRINTED]
    for row, (name, folder) in zip(found[10:], rows_of.items(), strict=True):
        evaluation = json.loads((folder / f"evaluation-test-average{table2.PAPER[name].average}.json").read_text())
        figures = evaluation["bleu"]
        assert evaluation["signatures"]["paper"].endswith("-de-compounds")  # scored in the target language
        bleu = [f"{figures[kind]:.1f}" for kind in ("paper", "sacrebleu", "intl")]
        assert row == [f"Transformer ({name})", HERE, *bleu, "–", counted[name]]


def counted_by_hand(run: compose.Config) -> float:
    """From the sentences of every update that the plan of the run holds."""
    pairs = Dataset(folders.prepared_folder(run)).pairs("train")
    lengths = pairs.source_lengths, pairs.target_lengths
    updates = training_plan(*lengths, run.training.tokens_per_update, seed=run.seed, start=0)
    seen = [sentences for (_, sentences), _ in zip(updates, range(run.training.max_steps), strict=False)]
    tokens = (sum(int(side[sentences].sum()) for sentences in seen) for side in lengths)
    weighted = (float(np.average(side[:], weights=side[:])) for side in lengths)
    return flops.training_flops(run.model, 25, *tokens, *weighted)


@pytest.mark.parametrize(
    ("change", "holds"),
    [("fidelity=released_code", True), ("split=dev", False), ("average=2", False), ("model.dropout=0.3", False)],
)
def test_table_2_holds_the_papers_evaluation_of_a_row(change, holds) -> None:
    run = compose.compose_row("experiment=base", "split=test", "average=5", change)
    assert table2.holds(run, f"{run.split}-average{run.average}") is holds


@pytest.mark.parametrize(("language", "bleu", "subwords"), [("de", 0, 37_000), ("fr", 1, 32_000)])  # 5.1
def test_the_papers_figures_are_of_the_runs_languages(language: str, bleu: int, subwords: int) -> None:
    run = compose.compose_row(f"data=wmt14_en_{language}", "scale=paper", "experiment=base", "output=nowhere")
    lines = table2.lines(run, dataset=None)  # type: ignore[arg-type]
    assert lines[0] == f"Table 2 at scale paper on wmt14_en_{language}, en-{language}, seed 1"
    found = rows(lines)
    for row, (name, *figures) in zip(found, AS_PRINTED, strict=False):
        assert row[:6] == [name, PRINTED, figures[bleu], "–", "–", figures[bleu + 2]]
    assert [row[6] for row in found[:8]] == ["–"] * 8
    for row, name in zip(found[8:10], table2.PAPER, strict=True):
        model, tokens = compose.rows()[name].model, compose.rows()[name].training.max_steps * 25_000
        assert row[6] == flops.power(flops.training_flops(model, subwords, tokens, tokens, 40, 40))
    assert found[10:] == [[f"Transformer ({name})", HERE, *["–"] * 5] for name in table2.PAPER]
    assert language == "fr" or [row[6] for row in found[8:10]] == ["9.54e17", "9.69e18"]


def test_a_torn_or_older_evaluation_is_a_dash(trained, tmp_path) -> None:
    original = compose.compose_row(*trained, "experiment=base")
    dataset = Dataset(folders.prepared_folder(original))
    run = dataclasses.replace(original, output=str(tmp_path))
    folder = folders.run_folder(run)
    shutil.copytree(folders.run_folder(original), folder)
    steps = json.loads((folder / "result.json").read_text())["steps"]
    seven = '"bleu": {"paper": 7.0, "sacrebleu": 7.0, "intl": 7.0}}'
    whole, older = f'{{"steps": {steps}, {seven}', f'{{"steps": {steps - 1}, {seven}'
    for text, bleu in ((whole, "7.0"), (older, "–"), ("{", "–"), (whole.replace("7.0", '"x"'), "–")):
        (folder / "evaluation-test-average5.json").write_text(text)
        assert rows(table2.lines(run, dataset))[10][2] == bleu
    (folder / "result.json").write_text("{")
    assert rows(table2.lines(run, dataset))[10] == ["Transformer (base)", HERE, *["–"] * 5]
