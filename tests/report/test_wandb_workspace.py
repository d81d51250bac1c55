"""The dashboard: what W&B is sent is what is said without it, and nothing is asked of the network unless asked for."""

import json
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from aiayn.config import schema
from aiayn.config.schema import Config
from aiayn.report import wandb_workspace
from aiayn.training import wandb_log

KEY = "s3ntinel" * 5
TABLE = [panel for panels in wandb_workspace.SECTIONS.values() for panel in panels]


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The workspaces that W&B would be sent; a corpus is prepared, and a key is there."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        wandb, workspaces = map(pytest.importorskip, ("wandb", "wandb_workspaces.workspaces"))
    found: list[Any] = []
    for name, value in {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": "http://127.0.0.1:9", "NETRC": os.devnull}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(wandb_log.prepare, "sha256", lambda run: "0123456789" * 6)
    monkeypatch.setattr(workspaces.Workspace, "url", "http://127.0.0.1:9/somebody/aiayn")
    monkeypatch.setattr(workspaces.Workspace, "save", lambda workspace: found.append(workspace) or workspace)
    wandb.teardown()  # it remembers settings and keys
    yield found
    wandb.teardown()


def in_mode(run: Config, mode: str) -> Config:
    return schema.vary(run, wandb={"mode": mode, "entity": "somebody"})


def test_what_is_sent_is_every_panel_that_is_listed(toy_run, saved, capsys) -> None:
    wandb_workspace.main(in_mode(toy_run, "online"))
    printed = capsys.readouterr().out
    (sent,) = saved
    assert printed.splitlines()[-1] == "http://127.0.0.1:9/somebody/aiayn"
    assert (sent.entity, sent.name) == ("somebody", "Table 3 at scale paper on digits")
    view = sent._to_model().spec.section.model_dump_json(by_alias=True)
    section = json.loads(view)
    panels = [panel for found in section["panelBankConfig"]["sections"] for panel in found["panels"]]
    for panel, listed in zip(panels, TABLE, strict=True):
        assert listed.metric in json.dumps(panel["config"])
        assert str(listed) in printed
    assert "digits-paper-01234567" in json.dumps(section["runSets"])
    assert KEY not in printed + view


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_unless_asked_for_the_network_is_not_asked(toy_run, saved, monkeypatch, capsys, mode) -> None:
    for package in ("wandb", "wandb_workspaces"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setenv("WANDB_DIR", "/its own")
    wandb_workspace.main(in_mode(toy_run, mode))
    printed = capsys.readouterr().out
    assert all(str(panel) in printed for panel in (*TABLE, "wandb sync '/its own'/wandb/offline-run-*\n"))
    assert saved == []


REFUSED = Mock(side_effect=ValueError(f"no\n{KEY}"))


@pytest.mark.parametrize(
    ("trouble", "told"),
    [
        (lambda patch: patch.delenv("WANDB_API_KEY"), "wandb login, or set WANDB_API_KEY"),
        (lambda patch: patch.setattr("wandb_workspaces.workspaces.Workspace.save", REFUSED), "ValueError: no ***"),
    ],
    ids=["no key", "refusal"],
)
def test_what_cannot_be_built_is_one_line_without_the_key(toy_run, saved, monkeypatch, capsys, trouble, told) -> None:
    trouble(monkeypatch)
    monkeypatch.setattr("aiayn.training.worker.leave", lambda code: sys.exit(-code))  # W&B's own exit may wait minutes
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)  # and it waits for no key
    with pytest.raises(SystemExit) as exit:
        wandb_workspace.main(in_mode(toy_run, "online"))
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert (exit.value.code, told in line, KEY in printed.out + line) == (-1, True, False)


def test_a_server_that_never_answers_holds_nobody_up(aiayn, tmp_path: Path, monkeypatch) -> None:
    """A process of its own: W&B, too, may do things at its end."""
    pytest.importorskip("wandb_workspaces")
    aiayn("prepare", "scale=smoke")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = {"WANDB_BASE_URL": f"http://127.0.0.1:{silent.getsockname()[1]}", "WANDB_API_KEY": KEY}
        for name, value in (settings | {"WANDB_HTTP_TIMEOUT": "1", "WANDB_ERROR_REPORTING": "false"}).items():
            monkeypatch.setenv(name, value)
        done = aiayn("dashboard", "wandb.mode=online", "scale=smoke", code=1)
    assert "nothing was built" in done.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "prepared"]
