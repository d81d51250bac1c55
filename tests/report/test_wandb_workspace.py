"""The dashboard: what W&B is sent is what is said without it, and nothing is asked of the network unless asked for."""

import json
import os
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from aiayn.config import schema
from aiayn.config.schema import Config
from aiayn.report import wandb_workspace
from aiayn.training import wandb_log

KEY = "s3ntinel" * 5
TABLE = [panel for panels in wandb_workspace.SECTIONS.values() for panel in panels]


class GraphQL(ThreadingHTTPServer):
    """The endpoint of W&B's API on this machine: it remembers what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.asked: list[dict[str, Any]] = []
        self.refusal = ""
        self.silent = False
        self.ended = Event()

    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        if "upsertView" in asked["query"]:
            if self.refusal:
                return {"errors": [{"message": self.refusal}]}
            return {"data": {"upsertView": {"view": {"id": "7", "name": asked["variables"]["name"]}, "inserted": True}}}
        viewer = {"id": "3", "entity": "somebody", "username": "somebody", "email": "", "flags": "{}"}
        return {"data": {"viewer": viewer | {"teams": {"edges": []}}}}


class Answer(BaseHTTPRequestHandler):
    server: GraphQL

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        if self.server.silent:
            self.server.ended.wait(60)
            return
        text = json.dumps(self.server.answer(asked)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def graphql(monkeypatch: pytest.MonkeyPatch) -> Iterator[GraphQL]:
    """The fake server, to which this process and those that it starts talk as to W&B."""
    with GraphQL() as running:
        thread = Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("WANDB_BASE_URL", running.url())
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
        monkeypatch.setenv("NETRC", os.devnull)
        yield running
        running.ended.set()
        running.shutdown()
        thread.join()


@pytest.fixture
def wandb(graphql: GraphQL) -> Iterator[Any]:
    """W&B as this process finds it at its start: it remembers settings and keys."""
    pytest.importorskip("wandb_workspaces", reason="not installed: pip install -c constraints.txt -e '.[dashboard]'")
    import wandb

    wandb.teardown()
    yield wandb
    wandb.teardown()


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A corpus is there, with this hash."""
    monkeypatch.setattr(wandb_log.prepare, "sha256", lambda run: "0123456789" * 6)


def online(run: Config, **others: Any) -> Config:
    return schema.dataclasses.replace(run, wandb=schema.dataclasses.replace(run.wandb, mode="online", **others))


def test_what_is_sent_is_every_panel_that_is_listed(toy_run, wandb, graphql, capsys) -> None:
    wandb_workspace.main(online(toy_run))
    printed = capsys.readouterr().out
    (asked,) = [asked for asked in graphql.asked if "upsertView" in asked["query"]]
    sent = asked["variables"]
    assert printed.splitlines()[-1] == f"{graphql.url()}/somebody/aiayn?nw={sent['name'][3:-2]}"
    assert (sent["entityName"], sent["projectName"], sent["type"]) == ("somebody", "aiayn", "project-view")
    assert sent["displayName"] == "Table 3 at scale paper on digits"
    section = json.loads(sent["spec"])["section"]
    sections = section["panelBankConfig"]["sections"]
    assert [found["name"] for found in sections] == list(wandb_workspace.SECTIONS)
    panels = [panel for found in sections for panel in found["panels"]]
    assert len(panels) == len(TABLE)
    for panel, listed in zip(panels, TABLE, strict=True):
        shown = panel["config"]
        if listed.kind == "lines":
            assert panel["viewType"] == "Run History Line Plot"
            assert (shown["xAxis"], shown["metrics"], shown["groupBy"]) == ("step", [listed.metric], "experiment.value")
            assert shown.get("yLogScale", False) == listed.logarithm
        elif listed.kind == "bars":
            assert panel["viewType"] == "Bar Chart"
            assert (shown["metrics"], shown["groupBy"]) == ([listed.metric], "experiment.value")
            assert (shown["groupAgg"], shown["groupArea"]) == ("mean", "stddev")
        elif listed.kind == "samples":
            assert listed.metric in json.dumps(shown)
        else:
            assert panel["viewType"] == "Run Comparer"
        assert str(listed) in printed
    (runs,) = section["runSets"]
    filters = [
        {"key": {"section": "run", "name": "group"}, "op": "=", "value": "digits-paper-01234567", "disabled": False}
    ]
    assert runs["filters"]["filters"] == filters
    assert [level["name"] for level in runs["grouping"]] == ["row_group.value", "experiment.value"]
    assert runs["runFeed"]["columnOrder"][1:] == [f"summary:{column}" for column in wandb_workspace.COLUMNS]
    assert KEY not in printed + json.dumps(graphql.asked)


def test_runs_with_another_vocabulary_are_in_another_group_and_without_a_corpus_nothing_is_asked(
    toy_run, monkeypatch, graphql
) -> None:
    hashes = iter(("0123456789" * 6, "9876543210" * 6))
    monkeypatch.setattr(wandb_log.prepare, "sha256", lambda run: next(hashes, None))
    assert [wandb_log.group(toy_run) for _ in range(2)] == ["digits-paper-01234567", "digits-paper-98765432"]
    with pytest.raises(schema.ConfigError, match="holds no corpus for these runs; `aiayn prepare`"):
        wandb_workspace.main(online(toy_run))
    assert graphql.asked == []


def test_every_metric_of_a_panel_is_one_that_a_run_logs() -> None:
    logged = {*wandb_log.dev_row({"ppl": 1, "bits_per_character": 1, "bleu": {"paper": 1, "sacrebleu": 1, "intl": 1}})}
    logged |= {"train/loss", "train/learning_rate", wandb_log.TRANSLATIONS}  # by the record of the updates
    assert {panel.metric for panel in TABLE if panel.metric} <= logged
    assert set(wandb_workspace.COLUMNS) <= logged


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_unless_it_is_asked_for_nothing_is_asked_of_the_network(toy_run, graphql, monkeypatch, capsys, mode) -> None:
    for package in ("wandb", "wandb_workspaces"):
        monkeypatch.setitem(sys.modules, package, None)
    wandb_workspace.main(
        schema.dataclasses.replace(toy_run, wandb=schema.dataclasses.replace(toy_run.wandb, mode=mode))
    )
    printed = capsys.readouterr().out
    assert all(str(panel) in printed for panel in TABLE)
    assert "with wandb.mode=online it is built" in printed
    assert graphql.asked == []


def refused(run: Config, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a dashboard that could not be built; what it would be is said all the same."""
    with pytest.raises(SystemExit) as exit:
        wandb_workspace.main(online(run))
    assert exit.value.code == 1
    printed = capsys.readouterr()
    assert all(str(panel) in printed.out for panel in TABLE)
    (line,) = printed.err.splitlines()
    assert KEY not in printed.out + printed.err
    return line


def test_without_the_extra_it_says_how_to_install_it(toy_run, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert refused(toy_run, capsys).endswith("pip install -c constraints.txt -e '.[dashboard]'")


def test_without_a_key_it_says_so_and_never_waits_for_one(toy_run, wandb, graphql, monkeypatch, capsys) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert refused(toy_run, capsys).endswith("wandb login, or set WANDB_API_KEY")
    assert graphql.asked == []


def test_what_the_server_refuses_is_one_line_without_the_key(toy_run, wandb, graphql, capsys) -> None:
    graphql.refusal = f"no project aiayn\nfor {KEY}"
    assert "no project aiayn for ***" in refused(toy_run, capsys)


def test_a_server_that_never_answers_holds_nobody_up(aiayn, tmp_path: Path, graphql, monkeypatch) -> None:
    """A process of its own: W&B, too, may do things at its end."""
    pytest.importorskip("wandb_workspaces")
    graphql.silent = True
    monkeypatch.setenv("WANDB_HTTP_TIMEOUT", "1")
    aiayn("prepare", "scale=smoke")
    began = time.monotonic()
    done = aiayn("dashboard", "wandb.mode=online", "scale=smoke", code=1)
    assert time.monotonic() - began < 30
    assert len(done.stderr.splitlines()) == 1
    assert "nothing was built" in done.stderr
    assert str(TABLE[0]) in done.stdout
    assert graphql.asked
    assert list(tmp_path.iterdir()) == [tmp_path / "prepared"]
