"""The report: one inert file that holds Table 3, the claims, what became of every run, and each figure as its file."""

import base64
import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from run_results import finish

from aiayn.config import compose, folders
from aiayn.config.schema import ROWS, Config, ConfigError
from aiayn.core import storage
from aiayn.data.prepare import prepare
from aiayn.report import html_report
from aiayn.report.html_report import Section, page
from aiayn.runs import records
from aiayn.tables import beyond

HOSTILE = (
    "</title><script>alert(1)</script><img src=x onerror=alert(1)> {{7*7}} {% raw %} \u202egnp.exe\x00\x1b[31m"
    " </td></table><style>*{display:none}</style> http://example.org/ $x$ &amp;"
)
SEEN = "</title><script>alert(1)</script><img src=x onerror=alert(1)> {{7*7}} {% raw %} gnp.exe"


class Elements(HTMLParser):
    """What a browser's parser would find: elements with attributes, and text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {key: value or "" for key, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture(scope="module")
def run(digits: list[str], tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run of a sweep whose corpus is prepared, and none of whose rows is begun."""
    output = tmp_path_factory.mktemp("report")
    places = [f"output={output}", f"prepared={output}/prepared", f"bench.output={output}/bench.json"]
    return compose.compose_row(*digits, "scale=smoke", *places)


@pytest.fixture(scope="module")
def report(run: Config) -> Path:
    """The page of a sweep with finished, failed, half-done, stale and missing rows, some full of hostile text."""
    references = list(prepare(run, lambda message: None).texts("dev", "target"))
    folder = folders.sweep_folder(run)
    for name in (*ROWS[:-1], "f_no_positions", "s_rnn"):
        row = compose.row(name, run)
        if name == "c_n8":
            storage.write_json(folder / name / "seed1" / "failure.json", {"exit_code": 3, "cause": HOSTILE})
        elif name == "c_n4":
            storage.append_lines(folder / name / "seed1" / "metrics.jsonl", ['{"step": 3}', HOSTILE])
        else:
            ppl = 7.75 if row.paper.ppl is None else 2 * row.paper.ppl
            finish(row, ppl, 12.5 + len(name), [HOSTILE, *references[1:]])
            update = {"step": 1, "train/loss": 9, "seconds": 3, "source_tokens": 5, "target_tokens": 7}
            storage.write_text(folder / name / "seed1" / "metrics.jsonl", json.dumps(update) + "\n")
    stale = folder / "c_n2" / "seed1" / "result.json"
    result = json.loads(stale.read_text())
    result["config"]["model"]["d_ff"] = 7
    storage.write_json(stale, result)
    html_report.main(run)
    return folder / "report" / "report.html"


@pytest.fixture(scope="module")
def elements(report: Path) -> Elements:
    return Elements(report.read_text("utf-8"))


def test_the_page_asks_for_nothing_and_runs_nothing(report: Path, elements: Elements) -> None:
    text = report.read_text("utf-8")
    (policy,) = [a["content"] for _, a in elements.found if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules.pop("style-src") == "'unsafe-inline'"  # no script-src: the default holds for scripts
    assert rules == {"default-src": "'none'", "img-src": "data:", "base-uri": "'none'", "form-action": "'none'"}
    assert {key for _, attributes in elements.found for key in attributes} <= {
        *("charset", "http-equiv", "content", "name", "lang", "class", "id", "scope", "tabindex", "dir", "alt"),
        *("href", "src"),
    }
    assert SEEN in "".join(elements.texts)  # control: the hostile text is there, as text
    asked = [a.get("src", a.get("href", "#")) for _, a in elements.found]
    assert all(address.startswith(("#", "data:image/svg+xml;base64,")) for address in asked)
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in elements.found}
    assert not re.search("[\x00\x1b\u202a-\u202e\u2066-\u2069]", text)
    assert (text.count("<style>"), "url(" in text, "@import" in text) == (1, False, False)


def test_every_place_of_a_section_is_inert() -> None:
    def elements(text: str) -> list[str]:
        row = True, [(text, "good")]
        section = Section(text, [text], [(text, "l")], [row], [(text, "failed", text)], [(text, "data:,")])
        return [tag for tag, _ in Elements(page(text, [section])).found]

    assert elements(HOSTILE) == elements("x")
    assert "script" in [tag for tag, _ in Elements(f"<td>{HOSTILE}</td>").found]  # control


def test_the_page_tells_what_became_of_every_row(report: Path) -> None:
    text = report.read_text("utf-8")
    ends = {"c_n8 seed 1": "failed", "c_n4 seed 1": "half-done", "c_n2 seed 1": "stale", "big": "missing"}
    for name, status in ends.items():
        assert f'class="{status}">{status}</span> {name}: ' in text
    claims = (
        "Single-head attention is worse",
        "Without positions BLEU falls far",
        "effects: scale smoke, corpus digits",
    )
    assert all(told in text for told in ("16 of 20 rows finished", *claims, ">9.84</td>", ">7.75</td>"))


def test_every_figure_is_a_file_and_the_page_holds_its_bytes(report: Path) -> None:
    names = {path.stem for path in (report.parent / "figures").iterdir()}
    expected = ("effects", "lengths", "beyond-curve", "beyond-lengths", "curve-dev-ppl-steps", "group-e")
    assert names >= set(expected)
    for name in names:
        drawn = (report.parent / "figures" / f"{name}.svg").read_bytes()
        assert base64.b64encode(drawn).decode() in report.read_text("utf-8")


def test_without_a_run_or_a_corpus_it_says_so(run: Config, report: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no runs; train one first"):
        html_report.main(compose.compose_row(f"output={tmp_path}"))
    assert list(tmp_path.iterdir()) == []
    made = beyond.table(run, records.read_runs(folders.sweep_folder(run)))
    _, counts, _ = beyond.on_dev(run, made.lines)  # control
    assert {("base", 1), ("a_h1", 1), ("f_no_positions", 1)} <= set(counts)
    words, counts, missing = beyond.on_dev(dataclasses.replace(run, prepared="nowhere"), made.lines)
    assert ("holds no prepared data" in missing, words, counts) == (True, [], {})
