"""`aiayn dashboard`: a W&B workspace that compares the rows of one scale and data set, built from the list below."""

import os
import shlex
import sys
import warnings
from typing import Any, Literal, NamedTuple

from aiayn.config import folders
from aiayn.config.schema import Config, ConfigError
from aiayn.core import exit_codes
from aiayn.runs import records
from aiayn.training import wandb_log, worker

MOST_RUNS = 200


class Panel(NamedTuple):
    """One panel of the workspace: what it shows of which metric."""

    kind: Literal["bars", "lines", "comparer", "samples"]
    title: str
    metric: str = ""
    logarithm: bool = False

    def __str__(self) -> str:
        return f"{self.title}: {self.kind} {self.metric}{', logarithmic' if self.logarithm else ''}"


SECTIONS = {
    "Table 3": (
        Panel("bars", "dev BLEU", "dev/bleu"),
        Panel("bars", "dev PPL", "dev/ppl"),
        Panel("comparer", "Differences"),
    ),
    "Learning curves": (
        Panel("lines", "dev PPL", "dev/ppl", logarithm=True),
        Panel("lines", "dev BLEU", "dev/bleu"),
        Panel("lines", "training loss", "train/loss"),
        Panel("lines", "learning rate", "train/learning_rate"),
    ),
    "Translations": (Panel("samples", "Samples of the dev set", wandb_log.TRANSLATIONS),),
}
COLUMNS = ("dev/bleu", "dev/ppl", "dev/bits_per_character", "dev/bleu_sacrebleu", "dev/bleu_intl")
LEVELS = (wandb_log.ROW_GROUP, "experiment")  # the paper's groups, in them the rows: keys of a run's configuration


def main(run: Config) -> None:
    """Says what is to be built and, if `wandb.mode=online`, builds it and prints its link, or exits with 1."""
    run = wandb_log.resolved(run)
    asked = wandb_log.variable("DIR", "")
    kept = shlex.quote(asked or str(folders.sweep_folder(run))) + "/*/*" * (not asked)
    print(
        f"W&B workspace {name(run)!r} of {run.wandb.entity or 'your own entity'}/{run.wandb.project}",
        f"runs: those of group {wandb_log.group(run)}, by {', then '.join(LEVELS)}; columns {', '.join(COLUMNS)}",
        *(f"{section}: {panel}" for section, panels in SECTIONS.items() for panel in panels),
        f"runs kept offline are sent with: wandb sync {kept}/wandb/offline-run-*",
        sep="\n",
    )
    if run.wandb.mode != "online":
        print(f"wandb.mode={run.wandb.mode}: W&B was not asked; with wandb.mode=online it is built")
        return
    link, trouble = built(run)
    if trouble:
        print(f"aiayn: nothing was built: {trouble}", file=sys.stderr)
        worker.leave(exit_codes.FAILED)
    print(link)


def name(run: Config) -> str:
    """The workspace's name: scale and data are never left out."""
    return f"Table 3 at scale {run.scale.name} on {folders.setting(run)}"


def built(run: Config) -> tuple[str, str]:
    """The link of the workspace, or why there is none: a few questions, for each of which WANDB_HTTP_TIMEOUT holds."""
    os.environ.setdefault("WANDB_SILENT", "true")
    try:
        with warnings.catch_warnings():
            # wandb-workspaces 0.4.13 still declares its classes in pydantic's old way
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            import wandb
            import wandb_workspaces.workspaces  # noqa: F401
        # Without a prompt: the terminal may be unattended
        if not wandb.login(prompt=False, verify=False):
            return "", f"there is no key for {wandb.setup().settings.base_url}; wandb login, or set WANDB_API_KEY"
        entity = run.wandb.entity or wandb.Api().default_entity
        if not entity:
            return "", "your key belongs to no entity: give wandb.entity=..."
        return str(workspace(run, entity).save().url), ""
    except ImportError as error:
        raise ConfigError(f"{error}; pip install 'aiayn[dashboard]'") from error
    except Exception as error:  # of many kinds, for one cause: no network, a wrong key, a project that is not there
        return "", " ".join(records.without_secrets(f"{type(error).__name__}: {error}").split())[:300]


def workspace(run: Config, entity: str) -> Any:
    """The workspace as wandb-workspaces has it; nothing is asked of the network before it is saved."""
    from wandb_workspaces import workspaces as ws

    sections = [
        ws.Section(name=title, panels=[*map(_built, panels)], is_open=True) for title, panels in SECTIONS.items()
    ]
    return ws.Workspace(
        entity=entity,
        project=run.wandb.project,
        name=name(run),
        sections=sections,
        settings=ws.WorkspaceSettings(x_axis=wandb_log.STEP, max_runs=MOST_RUNS),
        runset_settings=ws.RunsetSettings(
            filters=ws.And(ws.Metric("Group") == wandb_log.group(run)),
            groupby=[ws.Config(level) for level in LEVELS],
            order=[ws.Ordering(ws.Config(level), ascending=True) for level in LEVELS],
            pinned_columns=[f"summary:{column}" for column in COLUMNS],
        ),
    )


def _built(panel: Panel) -> Any:
    from wandb_workspaces.reports import v2 as wr

    by_row: Any = {"groupby": wr.Config("experiment"), "groupby_aggfunc": "mean", "max_runs_to_show": MOST_RUNS}
    if panel.kind == "bars":
        by_row |= {"groupby_rangefunc": "stddev", "max_bars_to_show": MOST_RUNS}
        return wr.BarPlot(title=panel.title, metrics=[panel.metric], **by_row)
    if panel.kind == "lines":
        by_row |= {"groupby_rangefunc": "minmax", "x": wandb_log.STEP, "log_y": panel.logarithm}
        return wr.LinePlot(title=panel.title, y=[panel.metric], **by_row)
    if panel.kind == "samples":
        return wr.WeavePanelSummaryTable(table_name=panel.metric)
    return wr.RunComparer(diff_only="split")
