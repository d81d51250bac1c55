"""W&B is a view: missing, unreachable, hanging or raising, it changes no weight, says one line and holds nobody up."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aiayn.config import compose, schema
from aiayn.core import storage
from aiayn.core.signals import Interrupted
from aiayn.data.prepare import prepare
from aiayn.report import wandb_workspace
from aiayn.runs import checkpoint
from aiayn.training import train, wandb_log

SENTINEL = "s3ntinel-pa55word"


class Fake:
    """Stands for the module wandb and for the run that it returns; misbehaves in one place."""

    def __init__(self, trouble: str = "", kind: str = "raises") -> None:
        self.trouble, self.kind, self.rows, self.finished = trouble, kind, [], False
        self.Settings = SimpleNamespace
        self.released = threading.Event()

    def misbehave(self, where: str) -> None:
        if where == self.trouble and self.kind == "hangs":
            self.released.wait(60)
        elif where == self.trouble:
            raise {"raises": RuntimeError, "exits": SystemExit}[self.kind](f"no way to api.wandb.ai with {SENTINEL}")

    def init(self, **arguments: Any) -> "Fake":
        self.arguments = arguments
        self.misbehave("init")
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        self.metrics = (name, step_metric)

    def Table(self, columns: list[str], data: list[list[str]]) -> tuple[list[str], list[list[str]]]:
        return columns, data

    def log(self, row: dict[str, Any]) -> None:
        self.misbehave("log")
        self.rows.append(row)

    def finish(self) -> None:
        self.misbehave("finish")
        self.finished = True


def shown(run: schema.Config) -> schema.Config:
    return schema.dataclasses.replace(run, wandb=schema.dataclasses.replace(run.wandb, mode="online"))


def offline(run: schema.Config, row: str) -> schema.Config:
    replace = schema.dataclasses.replace
    return replace(run, experiment=row, wandb=replace(run.wandb, mode="offline"))


def weights(run: schema.Config, folder: Path) -> dict[str, Any]:
    storage.write_text(folder / "config.yaml", compose.to_yaml(run))
    train.train(run, folder)
    return checkpoint.load(checkpoint.newest(folder / "checkpoints")[0])["state_dict"]


@pytest.fixture(scope="module")
def undisturbed(digits, tmp_path_factory) -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [
        ("", ""),
        ("import", "raises"),
        *((where, "raises") for where in ("init", "log", "finish")),
        *((where, "hangs") for where in ("init", "log", "finish")),
        ("init", "exits"),
    ],
)
def test_whatever_wandb_does_the_weights_are_the_same_and_one_line_says_so(
    toy_run, tmp_path, monkeypatch, capsys, trouble, kind, undisturbed
):
    fake = Fake(trouble, kind)
    monkeypatch.setitem(sys.modules, "wandb", None if trouble == "import" else fake)
    monkeypatch.setenv("WANDB_API_KEY", SENTINEL)
    monkeypatch.setattr(wandb_log, "PATIENCE_SECONDS", 0.2)
    if not undisturbed:
        undisturbed |= weights(toy_run, tmp_path / "disabled")
        capsys.readouterr()
    began = time.monotonic()
    found = weights(shown(toy_run), tmp_path / "run")
    fake.released.set()
    assert time.monotonic() - began < 30
    assert found.keys() == undisturbed.keys()
    assert all(found[name].equal(undisturbed[name]) for name in found)
    printed = capsys.readouterr().out
    assert SENTINEL not in printed
    lines = [line for line in printed.splitlines() if "W&B" in line]
    assert len(lines) == bool(trouble)
    if not trouble:
        assert fake.finished
        assert [row["step"] for row in fake.rows if "train/loss" in row] == [1, 2, 3, 4, 5, 6]
        assert fake.arguments["resume"] == "allow"
        shown_as_the_result(fake, tmp_path / "run")


def shown_as_the_result(fake: Fake, folder: Path) -> None:
    """Group, job type, tags, configuration, curves, summaries and samples are those of the run's own files."""
    result = json.loads((folder / "result.json").read_text())
    group = f"{result['data']}-{result['scale']}-{result['sha256']['data'][:8]}"
    assert (fake.arguments["group"], fake.arguments["job_type"]) == (group, "train")
    assert set(fake.arguments["tags"]) == {"base", result["scale"], result["data"]}
    # What is shown and where may change under a run; all that its figures depend on is the same
    expected = result["config"] | {"wandb": {}, "row_group": "base", "experiment": result["experiment"]}
    assert fake.arguments["config"] | {"wandb": {}} == expected
    assert result["experiment"].startswith("base+")  # control: a run with values of its own is not shown as its row
    assert fake.metrics == ("*", "step")
    curves = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert fake.rows[:-1] == curves
    dev = result["dev"]
    figures = {
        **{"dev/ppl": dev["ppl"], "dev/bits_per_character": dev["bits_per_character"]},
        **{"dev/bleu": dev["bleu"]["paper"], "dev/bleu_sacrebleu": dev["bleu"]["sacrebleu"]},
        **{"dev/bleu_intl": dev["bleu"]["intl"]},
    }
    columns, samples = fake.rows[-1].pop("dev/translations")
    assert fake.rows[-1] == {"step": result["steps"], **figures}
    assert columns == ["source", "reference", "ours"]
    translations = (folder / "translations.txt").read_text().splitlines()
    assert len(samples) == wandb_log.SAMPLES
    assert [sample[2] for sample in samples] == translations[:: len(translations) // wandb_log.SAMPLES][
        : wandb_log.SAMPLES
    ]


def kept_offline(folder: Path) -> list[dict[str, Any]]:
    """The records of the one run that the real W&B has kept offline, read back with its own tool."""
    (kept,) = folder.glob("wandb/offline-run-*/*.wandb")
    tool = Path(sys.executable).with_name("wandb")
    read = subprocess.run([tool, "leet", "inspect", "--json", kept], capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in read.splitlines()]


def history_of(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of figures, without what W&B adds."""
    rows = [record["history"]["item"] for record in records if record["type"] == "history"]
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]


def summary_of(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures by which W&B lists and compares a run: the last of each."""
    summary: dict[str, Any] = {}
    for record in records:
        summary |= record.get("summary", {}).get("update", {})
    return summary


def test_what_wandb_keeps_offline_is_what_was_shown(toy_run, tmp_path, monkeypatch):
    """The real W&B, read back with its own tool."""
    rows = [{"step": 2, "train/loss": 3.5}, {"step": 2, "dev/ppl": 7.25}, {"step": 6, "dev/ppl": 5.5, "dev/bleu": 11.0}]
    monkeypatch.delenv("WANDB_ERROR_REPORTING", raising=False)
    with wandb_log.view(offline(toy_run, "c_n2"), tmp_path, 0) as show:
        for row in rows:
            show(row)
        show({"step": 6, wandb_log.TRANSLATIONS: [["<b>", "{{7*7}}", "$x$"]]})
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"
    records = kept_offline(tmp_path)
    history = history_of(records)
    assert history[:3] == rows
    assert history[3][f"{wandb_log.TRANSLATIONS}.ncols"] == 3
    (run,) = [record["run"] for record in records if record["type"] == "run"]
    assert set(run["tags"]) == {"c_n2", "(C)", toy_run.scale.name, toy_run.data.name}
    assert run["job_type"] == "train"
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/dev/*.json")
    assert json.loads(table.read_text())["data"] == [["<b>", "{{7*7}}", "$x$"]]


def test_every_number_of_the_dashboard_is_the_runs_own(toy_run, tmp_path, monkeypatch):
    """A real run with the real W&B: all that a panel or column shows is in `result.json` and `metrics.jsonl`."""
    measured = train.evaluate

    def apart(*arguments: Any) -> Any:
        """Six updates are too few for any BLEU but 0: figures that differ, so that one taken for another is seen."""
        figures, translations = measured(*arguments)
        return figures | {"bleu": {"paper": 11.3, "sacrebleu": 13.7, "intl": 17.1}}, translations

    monkeypatch.setattr(train, "evaluate", apart)
    weights(offline(toy_run, "base"), tmp_path)
    records = kept_offline(tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    *curves, last = history_of(records)
    assert curves == [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    figures = wandb_log.dev_row(result["dev"])
    assert {key: last[key] for key in figures} == figures
    assert last["step"] == result["steps"]
    summary, newest = summary_of(records), {key: value for row in curves for key, value in row.items()}
    panels = [panel for panels in wandb_workspace.SECTIONS.values() for panel in panels if panel.metric]
    shown = {panel.metric for panel in panels} | set(wandb_workspace.COLUMNS)
    for metric in shown - {wandb_log.TRANSLATIONS}:
        assert summary[metric] == (newest | figures)[metric], metric
    assert (
        len({summary[metric] for metric in shown - {wandb_log.TRANSLATIONS}}) == len(shown) - 1
    )  # control: none twice
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/dev/*.json")
    found = json.loads(table.read_text())
    assert found["columns"] == ["source", "reference", "ours"]
    dataset = prepare(toy_run, lambda message: None)
    sides = (dataset.texts("dev", "source"), dataset.texts("dev", "target"))
    assert found["data"] == wandb_log.samples(*sides, (tmp_path / "translations.txt").read_text().splitlines())
    (run,) = [record["run"] for record in records if record["type"] == "run"]
    kept = run["config"]["update"]
    shown = result["config"] | {"experiment": result["experiment"]}
    assert {key: kept[key] for key in shown} == shown
    assert kept[wandb_log.ROW_GROUP] == "base"
    assert run["run_group"] == wandb_log.group(toy_run)


def test_under_an_agent_of_wandb_sweep_the_run_keeps_the_agents_name(toy_run, tmp_path, monkeypatch):
    rows = {}
    for sweep in ("", "s7"):
        for key, value in (("WANDB_RUN_ID", "agents11"), ("WANDB_SWEEP_ID", sweep)):
            monkeypatch.setenv(key, value) if value else monkeypatch.delenv(key, raising=False)
        __import__("wandb").teardown()  # which has read the environment already
        with wandb_log.view(offline(toy_run, "base"), tmp_path / sweep / "run", 0) as show:
            show({"step": 1})
        records = kept_offline(tmp_path / sweep / "run")
        (rows[sweep],) = [record["run"] for record in records if record["type"] == "run"]
    assert (rows["s7"]["run_id"], rows["s7"]["sweep_id"]) == ("agents11", "s7")
    assert rows["s7"]["run_group"] == wandb_log.group(toy_run)
    kept = (tmp_path / "run" / "wandb.id").read_text().strip()
    assert rows[""]["run_id"] == kept != "agents11"  # control: one such name in the environment is no agent


def test_a_run_is_shown_in_the_project_and_entity_that_were_asked_for(toy_run, tmp_path, monkeypatch):
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    asked = {"mode": "online", "project": "lesson", "entity": "my-team"}
    with wandb_log.view(schema.vary(toy_run, wandb=asked), tmp_path / "run", 0) as show:
        show({"step": 1})
    assert {key: fake.arguments[key] for key in asked} == asked


def test_a_run_keeps_its_curves_when_it_is_resumed_and_gets_new_ones_when_it_is_made_anew_or_elsewhere(
    toy_run, tmp_path, monkeypatch
):
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)

    def shown_as(folder: Path) -> str:
        with wandb_log.view(shown(toy_run), folder, 0) as show:
            show({"step": 1})
        return fake.arguments["id"]

    first = shown_as(tmp_path / "run")
    assert shown_as(tmp_path / "run") == first  # resumed
    others = {shown_as(tmp_path / "elsewhere")}
    for _ in range(2):
        shutil.rmtree(tmp_path / "run")
        others.add(shown_as(tmp_path / "run"))
    assert len({first, *others}) == 4


def test_a_view_that_does_not_answer_keeps_only_so_many_rows(toy_run, tmp_path, monkeypatch, capsys):
    fake = Fake("init", "hangs")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(wandb_log, "ROWS_KEPT", 3)
    monkeypatch.setattr(wandb_log, "PATIENCE_SECONDS", 0.0)
    with wandb_log.view(shown(toy_run), tmp_path, 0) as show:
        for step in range(7):
            show({"step": step})
    fake.released.set()
    assert len([line for line in capsys.readouterr().out.splitlines() if "W&B" in line]) == 1


@pytest.mark.parametrize(("error", "patience"), [(None, 60.0), (Interrupted("stopped"), 10.0), (OSError(), 10.0)])
def test_a_run_that_leaves_waits_for_wandb_for_less_than_slurm_would_leave_it(
    error, patience, toy_run, tmp_path, monkeypatch
):
    waited = []
    monkeypatch.setitem(sys.modules, "wandb", Fake("", ""))
    monkeypatch.setattr(wandb_log.View, "close", lambda self, seconds: waited.append(seconds))
    with pytest.raises(type(error)) if error else nullcontext(), wandb_log.view(shown(toy_run), tmp_path, 0):
        if error:
            raise error
    assert waited == [patience]


def test_a_disabled_view_and_any_but_the_first_rank_never_import_wandb(toy_run, tmp_path, monkeypatch):
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
    weights(
        schema.dataclasses.replace(toy_run, wandb=schema.dataclasses.replace(toy_run.wandb, mode="offline")), folder
    )
    assert list(folder.glob("wandb/offline-run-*/*.wandb"))
    train.end_with_failure(folder, 1, f"cannot reach {' '.join(SECRETS.values())}")
    assert "cannot reach" in (folder / "failure.json").read_text()
    (folder / "control").write_text(os.environ["HTTPS_PROXY"])
    found = [path.name for path in tmp_path.rglob("*") if path.is_file() and SENTINEL.encode() in path.read_bytes()]
    assert found == ["control"]
