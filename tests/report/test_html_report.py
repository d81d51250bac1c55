"""The report: one inert file that tells every run's fate and figures, and works in a real browser."""

import base64
import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from aiayn.config import compose, folders
from aiayn.config.schema import ROWS, Config, ConfigError
from aiayn.core import storage
from aiayn.data.encoded import Dataset
from aiayn.data.prepare import prepare
from aiayn.report import contents, figure_files, html_report

HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"> {{7*7}} {% raw %}"
    " \u202egnp.exe\x00\x1b[31m </td></dialog><style>*{display:none}</style> http://example.org/ $x$ &amp;"
)
SEEN = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"> {{7*7}} {% raw %} gnp.exe"


class Elements(HTMLParser):
    """What a browser's parser would find: elements with attributes, and text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {key: value or "" for key, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def put(folder: Path, run: Config, ppl: float, dataset: Dataset, lines: list[str]) -> None:
    """A finished run as train leaves it."""
    bleu = {"paper": 90 / ppl**0.5, "sacrebleu": 25.0, "intl": 27.0}
    result: dict[str, Any] = {
        "schema": 1, "experiment": run.experiment, "seed": run.seed, "scale": run.scale.name, "data": run.data.name,
        "status": "finished", "config": dataclasses.asdict(run), "params": 480_001, "params_at_40960_rows": 3_000_001,
        "steps": run.training.max_steps, "train_seconds": 73.0, "target_tokens": 12_345,
        "dev": {"ppl": ppl, "bits_per_character": 1.7, "bleu": bleu, "bleu_ci95": [24, 26], "signatures": {HOSTILE: 1}},
        "device_seconds": {"cpu": 146.0},
        "sha256": {"data": dataset.sha256, "tokenizer": "7", "checkpoint": "c0ffee"}, "versions": {"torch": HOSTILE},
        "target_tokens_per_second": 169.1, "hardware": {"cores": 2}, "finished_at": HOSTILE,
    }  # fmt: skip
    storage.write_json(folder / "result.json", result)
    storage.write_text(folder / "translations.txt", "".join(line + "\n" for line in lines))
    counts = {"source_tokens": 5, "target_tokens": 7}
    rows = [{"step": s, "train/loss": 9 / s, "train/learning_rate": s / 1e4, "seconds": s / 3} for s in range(1, 18)]
    storage.write_text(folder / "metrics.jsonl", "".join(json.dumps(row | counts) + "\n" for row in rows))
    storage.append_lines(folder / "metrics.jsonl", [json.dumps({"step": 17, "dev/ppl": ppl})])


@pytest.fixture(scope="module")
def report(digits: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a sweep with finished, failed, half-done, stale and missing rows, all full of hostile text."""
    output = tmp_path_factory.mktemp("report")
    run = compose.compose_row(*digits, "scale=smoke", f"output={output}", f"bench.output={output}/bench.json")
    measured = {"lengths": [16, 32], "layers": [{"name": "<script>alert(1)</script>", "seconds_a_token": [3e-6, 5e-6]}]}
    storage.write_json(output / "bench.json", {"parts": {"layers": measured}})
    dataset = prepare(run, lambda message: None)
    references = dataset.texts("dev", "target")
    folder = folders.sweep_folder(run)
    for name, row in compose.rows().items():
        for seed in (1, 2):
            here = folder / name / f"seed{seed}"
            trained = compose.scaled(dataclasses.replace(row, scale=run.scale, data=run.data, seed=seed))
            if name == "c_n8":
                storage.write_json(here / "failure.json", {"exit_code": 3, "cause": HOSTILE, "log": ""})
            elif name == "c_n4":
                storage.append_lines(here / "metrics.jsonl", ['{"step": 3}', HOSTILE])
            elif name == "c_n2":
                changed = dataclasses.replace(trained.model, d_ff=7)
                put(here, dataclasses.replace(trained, model=changed), 9.0, dataset, references)
            elif name != "big":
                kept = [" ".join(line.split()[seed % 2 :]) for line in references]
                put(here, trained, row.paper.ppl * (1 + seed / 100), dataset, [HOSTILE, *kept[1:]])
    for name in ("f_no_positions", "s_rnn"):
        row = compose.rows("paper", (name,))[name]
        trained = compose.scaled(dataclasses.replace(row, scale=run.scale, data=run.data))
        put(folder / name / "seed1", trained, 7.75, dataset, [HOSTILE, *references[1:]])
    html_report.main(run)
    return folder / "report" / "report.html"


@pytest.fixture(scope="module")
def elements(report: Path) -> Elements:
    return Elements(report.read_text("utf-8"))


def test_the_page_asks_for_nothing_and_holds_no_style_or_handler_of_its_own(elements: Elements) -> None:
    for tag, attributes in elements.found:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form", "source"), tag
        for key, value in attributes.items():
            assert not key.startswith("on"), (tag, key)
            assert key != "style", (tag, value)
            if key in ("src", "href", "action", "xlink:href", "srcset", "poster", "background"):
                assert value.startswith(("#", "data:image/png;base64,")), (tag, value)
            assert "url(" not in value or value.startswith("url(#"), (tag, value)


def test_the_policy_allows_the_pages_own_style_and_script_alone(report: Path, elements: Elements) -> None:
    (policy,) = [a["content"] for _, a in elements.found if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert "unsafe" not in policy
    text = report.read_text("utf-8")
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_hostile_text_stays_text(report: Path, elements: Elements) -> None:
    assert [tag for tag, _ in elements.found].count("script") == 1
    assert not [tag for tag, _ in elements.found if tag == "img"]
    told = "".join(elements.texts)
    assert told.count(SEEN) > 20
    assert "49" not in re.findall(r"\S+ (?=\{% raw %\})", told)
    assert not re.search("[\x00\x1b\u202a-\u202e\u2066-\u2069]", report.read_text("utf-8"))
    control = Elements(f"<td>{HOSTILE}</td>")
    assert "script" in [tag for tag, _ in control.found]


def test_every_row_tells_what_became_of_it(report: Path) -> None:
    text = report.read_text("utf-8")
    for row in ROWS:
        assert f'id="run-{row}"' in text
    for status, run in (
        ("failed", "c_n8 seed 1"),
        ("half-done", "c_n4 seed 2"),
        ("stale", "c_n2 seed 1"),
        ("missing", "big"),
    ):
        assert f'<span class="{status}">{status}</span> {run}: ' in text
    assert "d_ff was 7" in text
    assert "16 of 20 rows finished" in text
    assert "scale smoke" in text


def test_the_cells_are_the_results(report: Path) -> None:
    text = report.read_text("utf-8")
    for row in ("base", "a_h32", "e_learned_positions"):
        found = [
            json.loads((report.parents[1] / row / f"seed{seed}" / "result.json").read_text())["dev"]["ppl"]
            for seed in (1, 2)
        ]
        line = text.partition(f'<tr data-opens="run-{row}"')[2].partition("</tr>")[0]
        assert f'data-value="{sum(found) / 2:.2f}"' in line
        assert f'data-value="{sum(found) / 2 + 0.01:.2f}"' not in line  # control


def cells(report: Path, row: str) -> list[tuple[str, str]]:
    """The value by which each cell of a row is sorted, and its style: row, nine sizes, then five of each metric."""
    line = report.read_text("utf-8").partition(f'<tr data-opens="run-{row}"')[2].partition("</tr>")[0]
    return re.findall(r'<td data-value="([^"]*)" class="([^" ]*)', line)


@pytest.mark.parametrize(
    ("row", "ppl", "bleu"),
    [
        # In spreads, the roots of the sum of both rows' variances: 7.4, 1.6, 0.1, 4.8 and 5.5, 3.6 in the other way
        *(("a_h1", "down3", "down3"), ("a_h4", "down1", "down1"), ("a_h16", "PPL", "BLEU")),
        *(("b_dk16", "down3", "down3"), ("c_dmodel1024", "up3", "up3"), ("c_dff4096", "up2", "up2")),
    ],
)
def test_a_colour_says_how_many_spreads_over_seeds_a_row_is_better_or_worse(report, row, ppl, bleu) -> None:
    found = cells(report, row)
    assert (found[14][1], found[19][1]) == (ppl, bleu)
    assert {style for _, style in (*found[10:14], *found[15:19])} == {"PPL", "BLEU"}  # nothing else has a colour


def test_a_column_is_sorted_by_numbers_and_an_empty_place_by_what_base_has(report: Path) -> None:
    base, wide, big = (cells(report, row) for row in ("base", "c_dmodel1024", "big"))
    assert [value for value, _ in base[:10]] == ["0", "6", "512", "2048", "8", "64", "64", "0.1", "0.1", "100000"]
    assert [value for value, _ in wide[1:10]] == ["6", "1024", "2048", "8", "128", "128", "0.1", "0.1", "100000"]
    assert big[9][0] == "300000"
    assert (wide[13][0], big[11][0]) == ("-0.26", "")  # the paper's 4.66 - 4.92; not trained


def test_a_row_says_what_it_changes_and_shows_source_reference_and_ours_of_the_same_sentences(
    report: Path, digits: list[str]
) -> None:
    page = report.read_text("utf-8").partition('id="run-a_h4"')[2].partition("</dialog>")[0]
    scaled = "; ".join(f"model.{key} from 64 to 128 (here 4 to 8)" for key in ("d_k", "d_v"))
    assert f"Differs from base in: model.num_heads from 8 to 4; {scaled}." in page
    sources, references = (
        Path(next(word.partition("=")[2] for word in digits if word.startswith(f"data.dev_{side}="))).read_text()
        for side in ("source", "target")
    )
    ours = (report.parents[1] / "a_h4" / "seed1" / "translations.txt").read_text()
    sample = "".join(f'<td dir="auto">{text.splitlines()[12]}</td>' for text in (sources, references, ours))
    assert sample in page


def test_rows_beyond_table_3_have_a_table_of_their_own_beside_base(report: Path) -> None:
    text = report.read_text("utf-8")
    first, _, second = text.partition('id="beyond"')
    table = second.partition("</table>")[0]
    assert "4 of 10 rows finished" in table
    for row in ("base", "f_no_positions", "s_rnn", "Shaw"):
        assert row in table
    assert "7.75" in table
    assert "f_no_positions" not in first.partition('id="claims"')[0]  # Table 3 is the paper's rows
    assert "Without positions BLEU falls far" in second.partition('id="verdicts-beyond"')[2]


def test_every_figure_is_a_file_too(report: Path) -> None:
    names = {path.stem for path in (report.parent / "figures").iterdir()}
    assert {
        "ranks-ppl",
        "ranks-bleu",
        "schedule",
        "positions",
        "lengths",
        "group-e",
        "curve-dev-ppl-tokens",
        "run-base",
        "layers",
        "beyond-curve",
        "beyond-lengths",
    } <= names
    for name in names:
        assert (report.parent / "figures" / f"{name}.svg").read_bytes().startswith(b"<?xml")
        assert (report.parent / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_run_nothing_is_drawn_and_one_line_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no runs; train one first"):
        html_report.main(compose.compose_row(f"output={tmp_path}"))
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_of_single_seeds_has_a_page_without_colours(digits: list[str], report: Path, tmp_path: Path) -> None:
    nowhere = (f"prepared={tmp_path}/nowhere", f"bench.output={tmp_path}/nowhere.json")
    run = compose.compose_row(*digits, "scale=smoke", f"output={tmp_path}", *nowhere)
    for row in ("base", "a_h4"):
        for name in ("result.json", "metrics.jsonl"):
            content = (report.parents[1] / row / "seed1" / name).read_bytes()
            storage.write_bytes(folders.sweep_folder(run) / row / "seed1" / name, content)
    found = contents.collect(run)
    with figure_files.style():
        text = html_report.page(found, html_report.draw_figures(found))
    assert "2 of 20 rows finished" in text
    assert "No cell is coloured" in text
    assert "not enough rows (2 finished, at least 10 needed)" in text
    assert "No paired bootstrap and no samples" in text
    coloured = r'<td data-value="[^"]*" class="(up|down)[123]'
    assert not re.search(coloured, text)
    assert re.search(coloured, report.read_text("utf-8"))  # control: two seeds have a spread
    for section in ("layers", "beyond"):
        assert f'id="{section}"' not in text
        assert f'id="{section}"' in report.read_text("utf-8")  # control: where layers are measured, and a row is begun


def chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium; skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = chromium()
    if found is None:
        pytest.skip("no Chromium here: install the package chromium to test the page in a browser")
    with playwright.sync_playwright() as driver:
        # Chromium refuses its sandbox to root, as whom containers run
        opened = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(params=[(1280, 900, "light"), (390, 844, "dark")], ids=["desktop-light", "phone-dark"])
def opened(request: pytest.FixtureRequest, browser: Any, report: Path) -> Iterator[Any]:
    """The page in a browser; whatever it says to the console or asks for beyond itself is an error at the end."""
    width, height, scheme = request.param
    tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    said: list[str] = []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda asked: None if asked.url.startswith("data:") else said.append(asked.url))
    tab.goto(report.as_uri())
    yield tab
    tab.close()
    assert said == [report.as_uri()]


def names(tab: Any) -> list[str]:
    return tab.locator("#table3 tbody tr td:first-child").all_inner_texts()


@pytest.mark.slow
def test_in_a_browser_columns_sort_both_ways_and_back_to_the_papers_order(opened: Any) -> None:
    assert tuple(names(opened)) == ROWS
    # The second column of perplexities is ours; what is missing stays below
    ours = opened.locator("#table3 thead tr:last-child th.PPL button").nth(1)
    found = []
    for _ in range(2):
        ours.click()
        assert set(names(opened)[16:]) == {"big", "c_n2", "c_n4", "c_n8"}
        cells = opened.locator("#table3 tbody td.PPL:nth-child(12)").all_inner_texts()
        found.append([float(cell.partition("±")[0]) for cell in cells[:16]])
    assert found[0] == sorted(found[0])
    assert found[1] == found[0][::-1]
    assert len(set(found[0])) > 10  # control
    opened.locator("#table3 thead tr:last-child th button").first.click()
    assert tuple(names(opened)) == ROWS


@pytest.mark.slow
def test_in_a_browser_rows_are_switched_off_and_on(opened: Any) -> None:
    drawn = opened.locator("figure:not(.off) .row-a_h4")
    assert drawn.count() > 3
    assert drawn.first.is_visible()
    opened.locator('input[data-row="a_h4"]').uncheck()
    assert not any(drawn.nth(i).is_visible() for i in range(drawn.count()))
    assert opened.locator("figure:not(.off) .row-a_h16").first.is_visible()
    opened.locator('button[data-group="(A)"]').click()
    assert drawn.first.is_visible()
    assert not opened.locator("figure:not(.off) .row-d_dropout00").first.is_visible()
    opened.locator('input[name="axis"][value="tokens"]').check()
    assert opened.locator("figure[data-axis=tokens] svg").first.is_visible()
    assert not opened.locator("figure[data-axis=steps] svg").first.is_visible()


@pytest.mark.slow
def test_in_a_browser_a_row_opens_its_runs_and_hostile_text_does_nothing(opened: Any) -> None:
    opened.locator('tr[data-opens="run-a_h4"] td').nth(0).click()
    dialog = opened.locator("#run-a_h4")
    assert dialog.is_visible()
    told = dialog.inner_text()
    assert "model.num_heads from 8 to 4" in told
    assert "c0ffee" in told
    assert SEEN in told
    assert dialog.locator("svg").first.is_visible()
    dialog.locator(".close").click()
    assert not dialog.is_visible()
    assert opened.title().startswith("Table 3 at scale smoke")


@pytest.mark.slow
def test_in_a_browser_the_page_fits_the_screen_and_follows_its_colours(opened: Any) -> None:
    assert opened.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    dark = opened.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    paper, ink = (
        sum(map(int, re.findall(r"\d+", opened.evaluate(f"getComputedStyle(document.body).{key}"))))
        for key in ("backgroundColor", "color")
    )
    text = opened.evaluate("getComputedStyle(document.querySelector('figure text')).fill")
    assert (paper < 150, ink > 600) == (dark, dark)
    assert sum(map(int, re.findall(r"\d+", text))) == ink


def test_in_a_browser_the_table_fits_1280_pixels_without_a_scrollbar(browser: Any, report: Path) -> None:
    def overhang(width: int) -> int:
        tab = browser.new_page(viewport={"width": width, "height": 900})
        tab.goto(report.as_uri())
        found = tab.evaluate("(box => box.scrollWidth - box.clientWidth)(document.querySelector('#table3').parentNode)")
        tab.close()
        return int(found)

    assert overhang(1280) == 0
    assert overhang(1280 // 2) > 0  # control: where it does not fit, it is seen


@pytest.mark.slow
def test_in_a_browser_what_the_policy_forbids_does_not_run(browser: Any, report: Path, tmp_path: Path) -> None:
    """The control of the tests above: they would see a script that runs, and only the policy stands in its way."""
    strange = "<script>document.title='owned'</script>"
    for policy, title in ((True, "Table 3"), (False, "owned")):
        text = report.read_text("utf-8").replace("</main>", f"</main>{strange}")
        if not policy:
            text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
        storage.write_text(tmp_path / "page.html", text)
        tab = browser.new_page()
        tab.goto((tmp_path / "page.html").as_uri())
        assert tab.title().startswith(title)
        tab.close()
