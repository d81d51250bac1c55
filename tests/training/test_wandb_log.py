"""W&B is a view: missing, unreachable, hanging or raising, it changes no weight, says one line and holds nobody up."""

import json
import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trained_runs import equal, trained

from aiayn.config import schema
from aiayn.core.signals import Interrupted
from aiayn.data.prepare import prepare
from aiayn.report import wandb_workspace
from aiayn.runs import checkpoint
from aiayn.training import train, wandb_log

SENTINEL = "s3ntinel-pa55word"


class Fake:
    """Stands for the module wandb and for the run that it returns; misbehaves in one place."""

    def __init__(self, trouble: str = "", kind: str = "raises") -> None:
        self.trouble, self.kind, self.rows = trouble, kind, []
        self.finished = self.given_up = False
        self.Settings, self.Table, self.define_metric = SimpleNamespace, dict, lambda name, step_metric: None
        self.released, self.arguments, self.starting_step = threading.Event(), dict[str, Any](), 0
        self.dir, self.mark_preempting = "a folder/files", lambda: self.rows.append("preempting")

    def misbehave(self, where: str) -> None:
        if where == self.trouble and self.kind == "hangs":
            self.given_up = not self.released.wait(60)
        elif where == self.trouble:
            raise {"raises": RuntimeError, "exits": SystemExit}[self.kind](f"no way to api.wandb.ai with {SENTINEL}")

    def init(self, **arguments: Any) -> "Fake":
        self.arguments = arguments
        self.misbehave("init")
        return self

    def log(self, row: dict[str, Any], step: int) -> None:
        self.misbehave("log")
        self.rows.append(row)

    def finish(self, exit_code: int) -> None:
        self.misbehave("finish")
        self.finished, self.exit_code = True, exit_code


def shown(run: schema.Config, mode: str = "online") -> schema.Config:
    return schema.vary(run, wandb={"mode": mode, "project": "lesson", "entity": "my-team"})


def weights(run: schema.Config, folder: Path) -> dict[str, Any]:
    return checkpoint.load(checkpoint.newest(trained(run, folder) / "checkpoints")[0])["state_dict"]


@pytest.mark.parametrize(("trouble", "kind"), [("", ""), ("import", "raises"), ("init", "hangs"), ("finish", "exits")])
def test_whatever_wandb_does_the_weights_are_the_same(toy_run, tmp_path, monkeypatch, capsys, trouble, kind):
    fake = Fake(trouble, kind)
    monkeypatch.setitem(sys.modules, "wandb", None if trouble == "import" else fake)
    monkeypatch.setenv("WANDB_API_KEY", SENTINEL)
    monkeypatch.setattr(wandb_log, "HANG_TIMEOUT", 0.2)
    undisturbed = weights(toy_run, tmp_path / "disabled")
    capsys.readouterr()
    found = weights(shown(toy_run), tmp_path / "run")
    assert not fake.given_up  # the run has not waited until W&B answered
    fake.released.set()
    assert equal(found, undisturbed)
    printed = capsys.readouterr().out
    assert SENTINEL not in printed
    assert sum("W&B" in line for line in printed.splitlines()) == bool(trouble)
    if not trouble:
        assert (fake.finished, fake.exit_code) == (True, 0)
        assert [row["step"] for row in fake.rows if "train/loss" in row] == [1, 2, 3, 4, 5, 6]
        assert fake.arguments["resume"] == "allow"


def test_every_number_of_the_dashboard_is_the_runs_own(toy_run, tmp_path, monkeypatch):
    """A real run with the real W&B: all that a panel or column shows is in `result.json` and `metrics.jsonl`."""
    measured = train.evaluate

    def apart(*arguments: Any) -> Any:
        """Six updates are too few for any BLEU but 0: figures that differ, so that one taken for another is seen."""
        figures, translations = measured(*arguments)
        return figures | {"bleu": {"paper": 11.3, "sacrebleu": 13.7, "intl": 17.1}}, translations

    monkeypatch.setattr(train, "evaluate", apart)
    monkeypatch.delenv("WANDB_ERROR_REPORTING", raising=False)
    weights(shown(toy_run, "offline"), tmp_path)
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"
    (kept,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    command = [Path(sys.executable).with_name("wandb"), "leet", "inspect", "--json", kept]
    read = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    records = [json.loads(line) for line in read.splitlines()]
    result = json.loads((tmp_path / "result.json").read_text())
    rows = [record["history"]["item"] for record in records if record["type"] == "history"]
    *curves, last = [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]
    assert curves == [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    figures = wandb_log.dev_row(result["dev"])
    assert {key: last[key] for key in figures} == figures
    assert last["step"] == result["steps"]
    summary: dict[str, Any] = {}  # the last of each figure, by which W&B lists and compares runs
    for record in records:
        summary |= record.get("summary", {}).get("update", {})
    newest = {key: value for row in curves for key, value in row.items()}
    panels = [panel for panels in wandb_workspace.SECTIONS.values() for panel in panels if panel.metric]
    displayed = ({panel.metric for panel in panels} | {*wandb_workspace.COLUMNS}) - {wandb_log.TRANSLATIONS}
    assert all(summary[metric] == (newest | figures)[metric] for metric in displayed)
    assert len({summary[metric] for metric in displayed}) == len(displayed)  # control: none twice
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/dev/*.json")
    found = json.loads(table.read_text())
    assert found["columns"] == ["source", "reference", "ours"]
    dataset = prepare(toy_run, lambda message: None)
    sides = (dataset.texts("dev", "source"), dataset.texts("dev", "target"))
    assert found["data"] == wandb_log.samples(*sides, (tmp_path / "translations.txt").read_text().splitlines())
    (run,) = [record["run"] for record in records if record["type"] == "run"]
    expected = result["config"] | {"experiment": result["experiment"], wandb_log.ROW_GROUP: "base"}
    assert {key: run["config"]["update"][key] for key in expected} == expected
    assert (run["project"], run["entity"], run["run_group"]) == ("lesson", "my-team", wandb_log.group(toy_run))
    assert set(run["tags"]) == {"base", toy_run.scale.name, toy_run.data.name}


OURS = {"mode": "offline", "project": "aiayn", "entity": None}
OTHERS = {"mode": "online", "project": "p", "entity": "e", "group": "g", "name": "n"}
OTHERS |= {"tags": ["a", "b"], "dir": Path("d")}
SET = {"MODE": "online", "PROJECT": "p", "ENTITY": "e", "RUN_GROUP": "g", "NAME": "n", "TAGS": "a,b", "DIR": "d"}


@pytest.mark.parametrize(
    ("variables", "keys", "expected"),
    [
        ({"PROJECT": ""}, {}, OURS),
        (SET, {}, OTHERS),
        (SET, OURS | {"entity": "f"}, OTHERS | OURS | {"entity": "f"}),
        ({"MODE": "dryrun", "RUN_ID": "x", "CONSOLE": "wrap"}, {}, OURS),
        ({"DISABLED": "true", "MODE": "online"}, {}, {}),
        ({"DISABLED": "true"}, {"mode": "offline"}, OURS),
        # W&B takes WANDB_RUN_ID, which its agent has set
        ({"SWEEP_ID": "s7", "RUN_ID": "agent"}, {"mode": "online"}, {"id": None}),
        ({"TAGS": "t" * 65}, {}, {"tags": ["t" * 64]}),
    ],
)
def test_wandb_s_variables_hold_where_no_key_is_set(toy_run, tmp_path, monkeypatch, capsys, variables, keys, expected):
    fake, null = Fake(), dict.fromkeys(("mode", "project", "entity"))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name, value in variables.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    prepare(toy_run, lambda message: None)
    with wandb_log.view(schema.vary(toy_run, wandb=null | keys), tmp_path, 0):
        pass
    assert {key: value for key, value in fake.arguments.items() if key in expected} == expected
    assert bool(fake.arguments) == bool(expected)
    assert ("WANDB_CONSOLE, WANDB_RUN_ID: not used" in capsys.readouterr().out) == ("CONSOLE" in variables)
    assert (wandb_log.identity(tmp_path) == "agent") == ("SWEEP_ID" in variables)  # for whom continues it by hand


@pytest.mark.parametrize("sent", ["", "offline-run-1-{}/run.wandb.synced", "run-1-{}/run.wandb"])
@pytest.mark.parametrize(("mode", "begins", "expected"), [("online", 4, [2, 2, 3]), ("offline", 0, [1, 2, 2, 3])])
def test_a_resumed_run_shows_each_update_once(toy_run, tmp_path, monkeypatch, capsys, mode, begins, expected, sent):
    """Offline in place of what it kept, online after what the server has; a new run where `wandb sync` would append."""
    first, goes_on = wandb_log.identity(tmp_path), mode == "online" or not sent
    kept = [tmp_path / "wandb" / f"offline-run-1-{name}" for name in (first, "another")]
    prepare(toy_run, lambda message: None)
    monkeypatch.setitem(sys.modules, "wandb", fake := Fake())
    fake.starting_step = begins
    for folder in (*kept, tmp_path / "wandb" / sent.format(first)):
        (folder / "files").mkdir(parents=True)
    with wandb_log.view(shown(toy_run, mode), tmp_path, 0) as show:
        for step, update in ((1, True), (2, True), (2, False), (3, True)):
            show({"step": step} | ({"train/loss": 1.0} if update else {}))
    assert [row["step"] for row in fake.rows] == expected
    assert fake.arguments["id"] == wandb_log.identity(tmp_path)
    assert (fake.arguments["id"] == first) == (f"delete run {first}" not in capsys.readouterr().out) == goes_on
    assert [folder.exists() for folder in kept] == [False, True]


LEAVING = [(None, 60.0, 0), (Interrupted("stopped"), 10.0, 75), (OSError(), 10.0, 1)]


@pytest.mark.parametrize(("error", "timeout", "code"), LEAVING)
def test_a_run_that_leaves_waits_less_than_slurm_would(error, timeout, code, toy_run, tmp_path, monkeypatch):
    waited, join = [], threading.Thread.join
    monkeypatch.setitem(sys.modules, "wandb", fake := Fake())
    monkeypatch.setattr(threading.Thread, "join", lambda self, timeout=None: (waited.append(timeout), join(self)))
    prepare(toy_run, lambda message: None)
    with pytest.raises(type(error)) if error else nullcontext(), wandb_log.view(shown(toy_run), tmp_path, 0):
        if error:
            raise error
    assert (waited, fake.exit_code, fake.rows) == ([timeout], code, ["preempting"] * (code == 75))


def test_a_disabled_view_and_other_ranks_never_import_wandb(toy_run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    for run, rank in ((toy_run, 0), (shown(toy_run), 1)):
        with wandb_log.view(run, tmp_path, rank) as show:
            show({"step": 1})


SECRETS = {name: f"{name}-{SENTINEL}" for name in ("WANDB_API_KEY", "HF_TOKEN", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY")}
SECRETS |= dict.fromkeys(("HTTPS_PROXY", "http_proxy"), f"http://user:{SENTINEL}@127.0.0.1:9")


def test_no_secret_of_the_environment_is_in_any_file_of_a_run(toy_run, tmp_path, monkeypatch):
    """With the real W&B, offline: every byte of every file, after a run and after failures that name the secrets."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "run"
    weights(shown(toy_run, "offline"), folder)
    assert list(folder.glob("wandb/offline-run-*/*.wandb"))
    train.end_with_failure(folder, 1, f"cannot reach {' '.join(SECRETS.values())}")
    assert "cannot reach" in (folder / "failure.json").read_text()
    (folder / "control").write_text(os.environ["HTTPS_PROXY"])
    found = [path.name for path in tmp_path.rglob("*") if path.is_file() and SENTINEL.encode() in path.read_bytes()]
    assert found == ["control"]
