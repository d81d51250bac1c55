"""The ladder's numbers are those counted by hand from the runs, and every scale appears as what it is."""

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from aiayn.config import compose, folders
from aiayn.config.schema import Config
from aiayn.cost import flops
from aiayn.data.prepare import prepare
from aiayn.report import contents, figure_files, html_report
from aiayn.tables.ladder import Ladder, Rung, papers_effect
from aiayn.tables.table2 import papers_compute

PutRuns = Callable[..., Config]
HOSTILE = "<script>alert(1)</script> {{7*7}} http://example.org/ \u202e\x1b[31m"


def rung(climbed: Ladder, name: str) -> Rung:
    return next(found for found in climbed.rungs if found.name == name)


def line(found: Rung, row: str) -> Any:
    return next(line for line in found.table.lines if line.name == row)


def test_every_finished_scale_is_a_rung_in_the_order_of_compute(put_runs: PutRuns) -> None:
    put_runs("scale=paper", "data=wmt14_en_de")
    put_runs("scale=small", rows=("base", "a_h1"))
    put_runs("scale=small", "hardware=gpu", rows=("base", "a_h1"))
    # Controls: another corpus, and other formulas, under other conditions than the paper's
    put_runs("scale=mini", "data=tiny", "data.name=other")
    put_runs("scale=small", "fidelity=released_code", rows=("base", "a_h1"))
    run = put_runs("scale=mini")
    assert [found.name for found in contents.collect(run).ladder.rungs] == [
        "mini, tiny",
        "small, tiny",
        "small, tiny.bf16",
        "paper, wmt14_en_de",
    ]
    of_paper = contents.collect(compose.compose_row("scale=paper", "data=wmt14_en_de", f"output={run.output}"))
    assert [found.name for found in of_paper.ladder.rungs] == ["paper, wmt14_en_de"]


def test_a_scale_of_few_updates_is_left_out_whatever_its_name(put_runs: PutRuns) -> None:
    run = put_runs("scale=mini")
    put_runs("scale=mini", "scale.name=short", "scale.steps=0.00099")
    put_runs("scale=mini", "scale.name=smoke2", "scale.steps=0.001")  # control: a hundred are enough
    found = contents.collect(run).ladder
    assert [other.name for other in found.left_out] == ["short, tiny"]
    assert {other.table.scale.name for other in found.rungs} == {"mini", "smoke2"}


def test_a_half_done_scale_is_a_rung_without_figures(put_runs: PutRuns) -> None:
    run = put_runs("scale=mini", rows=("base", "a_h1", "big"))
    half = put_runs("scale=small", rows=("a_h4",))
    (folders.run_folder(compose.row("a_h4", half)) / "result.json").unlink()
    found = rung(contents.collect(run).ladder, "small, tiny")
    assert all(found.effect(own, "PPL") is None for own in found.table.lines)
    assert {finding.verdict for finding in found.findings} == {"undecided"}
    mini = rung(contents.collect(run).ladder, "mini, tiny")
    assert [own.name for own in mini.table.lines if mini.effect(own, "BLEU")] == ["a_h1", "big"]


def test_an_effect_is_the_difference_of_means_and_its_interval_is_welchs(put_runs: PutRuns) -> None:
    random = np.random.default_rng(43)
    ppl = {(row, seed): 9 + random.random() for row in ("base", "a_h1") for seed in (1, 2, 3)}
    bleu = {key: 20 + random.random() for key in ppl}
    run = put_runs(
        "scale=mini",
        rows=("base", "a_h1"),
        seeds=(1, 2, 3),
        ppl=lambda row, seed: ppl[row.experiment, seed],
        bleu=lambda row, seed: bleu[row.experiment, seed],
    )
    (found,) = contents.collect(run).ladder.rungs
    for metric, values in (("PPL", {key: math.log(value) for key, value in ppl.items()}), ("BLEU", bleu)):
        effect = found.effect(line(found, "a_h1"), metric)  # type: ignore[arg-type]
        own, base = ([values[row, seed] for seed in (1, 2, 3)] for row in ("a_h1", "base"))
        assert effect is not None
        assert effect.value == pytest.approx(np.mean(own) - np.mean(base), rel=1e-9)
        theirs = stats.ttest_ind(own, base, equal_var=False).confidence_interval(0.95)
        assert effect.interval == pytest.approx((theirs.low, theirs.high), rel=1e-9)
        assert effect.value != pytest.approx(np.mean(base) - np.mean(own))  # control: the sign


def test_one_seed_has_an_effect_and_no_interval(put_runs: PutRuns) -> None:
    (found,) = contents.collect(put_runs("scale=mini", rows=("base", "big"))).ladder.rungs
    effect = found.effect(line(found, "big"), "PPL")
    assert effect is not None
    assert effect.interval is None
    assert effect.value == pytest.approx(math.log(4.33 / 4.92), rel=1e-9)
    assert found.effect(found.table.base, "PPL") is None


def test_the_compute_is_that_of_the_tokens_that_the_updates_held(put_runs: PutRuns) -> None:
    run = put_runs(
        "scale=mini", "scale.width=0.1875", "scale.layers=0.5", "data.vocab_size=2000", rows=("base", "a_h1")
    )
    (found,) = contents.collect(run).ladder.rungs
    # By hand: N 3, d_model 96, d_ff 384, h 8, d_k = d_v = 12. Weights of an attention 4 x 96 x 96, of a feed-forward
    # 2 x 96 x 384, of keys and values for the decoder 2 x 96 x 96; attention itself 192 a token looked at, of which
    # there are 40, and 20 where it is masked; the vocabulary's 2000 x 96 for each target token; 6 FLOPs each
    updates = line(found, "base").trained.training.max_steps
    source, target = 36_864 + 73_728 + 18_432 + 192 * 40, 36_864 + 73_728 + 18_432 + 192 * (40 + 20)
    by_hand = 6 * updates * (3 * (900 * source + 1000 * target) + 1000 * 2000 * 96)
    assert found.compute(line(found, "base")) == pytest.approx(by_hand, rel=1e-12)
    assert found.planned != pytest.approx(by_hand, rel=1e-3)  # control: updates hold fewer tokens than they may
    assert found.compute(line(found, "big")) is None  # not finished


@pytest.mark.parametrize("count", [None, "many", -1, 0, 10**400, 1.5])
def test_a_run_without_a_sensible_count_of_tokens_has_no_compute(put_runs: PutRuns, count: Any) -> None:
    run = put_runs("scale=mini", rows=("base", "a_h1"))
    path = folders.run_folder(compose.row("a_h1", run)) / "result.json"
    result = json.loads(path.read_text()) | {"source_tokens": count}
    path.write_text(json.dumps(result))
    found = contents.collect(run)
    (own,) = found.ladder.rungs
    effect = own.effect(line(own, "a_h1"), "PPL")
    assert effect is not None
    assert effect.compute is None
    assert own.compute(own.table.base) is not None  # control


def test_the_vocabulary_and_the_lengths_are_those_of_the_corpus_that_is_here(
    put_runs: PutRuns, digits: list[str]
) -> None:
    run = put_runs(*digits, "scale=mini", rows=("base",))
    run = dataclasses.replace(run, prepared=compose.compose_row(*digits).prepared)
    dataset = prepare(run, lambda message: None)
    lengths = [
        float((offsets**2).sum() / offsets.sum())
        for offsets in (
            np.diff(side) for side in (dataset.pairs("train").source_offsets, dataset.pairs("train").target_offsets)
        )
    ]
    found = contents.collect(run).ladder.rungs[0]
    assert (found.subwords, *found.lengths) == pytest.approx((25, *lengths))
    elsewhere = contents.collect(dataclasses.replace(run, prepared="nowhere")).ladder.rungs[0]  # control
    assert (elsewhere.subwords, elsewhere.lengths) == (25, (flops.LENGTH, flops.LENGTH))


def test_the_papers_effect_stands_at_the_compute_of_its_own_training() -> None:
    rows = contents.collect(compose.compose_row("output=nowhere", "prepared=nowhere")).table.lines
    base, big = rows[0], rows[-1]
    assert papers_effect(big, base, "PPL").value == pytest.approx(math.log(4.33 / 4.92))
    assert papers_effect(big, base, "BLEU").value == pytest.approx(0.6)
    # Table 2 has 3.3e18 and 2.3e19, from the time and what the GPUs could do in it
    for row, published in ((base, 3.3e18), (big, 2.3e19)):
        assert published / 4 < papers_compute(row.config) < published
    assert papers_compute(big.config) / papers_compute(base.config) == pytest.approx(3 * 213 / 65, rel=0.25)


@pytest.mark.slow
def test_the_page_names_every_scale_and_what_is_left_out_or_not_begun(put_runs: PutRuns) -> None:
    run = put_runs(
        "scale=mini", seeds=(1, 2), ppl=lambda row, seed: row.paper.ppl * (2 + seed / 1000), bleu=lambda row, seed: 20
    )
    put_runs("scale=smoke")
    put_runs("scale=paper", "data=wmt14_en_de", rows=("base", "a_h1"))
    found = contents.collect(run)
    with figure_files.style():
        text = html_report.page(found, html_report.draw_figures(found))
    told = text.partition('id="scales"')[2].partition("</section>")[0]
    head = told.partition("</thead>")[0]
    assert head.index("mini, tiny") < head.index("paper, wmt14_en_de")
    assert len(re.findall('<span class="(reproduced|contradicted|undecided)">', told)) == 2 * 17
    assert "20 of 20" in told
    assert "2 of 20" in told
    assert "+1.00 (" in told
    assert "all rows are equal" in told
    assert "not enough rows" in told
    assert "smoke, tiny (4)" in told
    assert "No run is here at scale small." in told
    assert "ladder-ppl" in text
    assert "http" not in text.replace("http-equiv", "")


def test_hostile_folders_and_names_are_inert(put_runs: PutRuns) -> None:
    run = put_runs("scale=mini", rows=("base",))
    for name in ("tiny-evil", "tiny-copied"):
        folder = Path(run.output) / name / "base" / "seed1"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(HOSTILE)
    # Copied from another sweep: its config names that one
    source = folders.run_folder(compose.row("base", run)) / "config.yaml"
    (Path(run.output) / "tiny-copied" / "base" / "seed1" / "config.yaml").write_bytes(source.read_bytes())
    named = source.read_text().replace("name: mini", f"name: '{HOSTILE[:40]}'")
    (Path(run.output) / "tiny-evil" / "base" / "seed1" / "config.yaml").write_text(named)
    found = contents.collect(run)
    assert [other.name for other in found.ladder.rungs] == ["mini, tiny"]
    with figure_files.style():
        assert "alert(1)" not in html_report.page(found, html_report.draw_figures(found))
