"""How Hydra's multirun becomes worker processes. Hydra takes plugins only from packages named `hydra_plugins`."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Hydra's grid of overrides, which no public name has
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

# What takes seconds to import is imported where it is used: Hydra loads this file for every command
if TYPE_CHECKING:
    from aiayn.config.schema import Config

IN_THE_QUEUE = (
    "; jobs that are submitted go on: squeue --me shows them, scancel --me --name=aiayn stops them,"
    " and when they have ended the same command goes on from there"
)


class Rows(BasicSweeper):
    """Hydra's grid sweep, of which all is checked before the first run starts, and the finished are left out."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keeps what Hydra hands over."""
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        self.command = task_function.__name__

    def sweep(self, arguments: list[str]) -> Any:
        """Hands every point of the grid to the launcher at once. Exits with 75 or 1 unless all are done."""
        from aiayn import cli
        from aiayn.sweep import launcher

        if self.command != "train":
            cli.fail(f"{self.command} takes one run: only train sweeps, with -m or a sweep file")
        if "RANK" in os.environ:
            cli.fail("torchrun's ranks share one run: give it one, without -m and -cn")
        assert self.hydra_context is not None
        assert self.launcher is not None
        assert self.config is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        overrides = parser.parse_overrides([*self._parse_config(), *arguments])
        (points,) = self.split_arguments(overrides, max_batch_size=None)
        if isinstance(self.launcher, SideBySide):  # does the rest itself
            return self.launcher.launch(points, initial_job_idx=0)
        with cli.one_line_errors():
            runs = checked_runs(self.hydra_context, self.config, points)
        code = launcher.hand_over(runs, lambda numbers: self.codes([points[number] for number in numbers]))
        if code:
            sys.exit(code)
        return []

    def codes(self, points: Sequence[Sequence[str]]) -> list[int]:
        """The exit codes of runs that submitit has started. Exits when it is stopped or fails."""
        from aiayn import cli
        from aiayn.core import exit_codes, signals

        assert self.launcher is not None
        try:
            ended = self.launcher.launch(points, initial_job_idx=0)
        except signals.Interrupted:
            cli.fail(f"stopped{IN_THE_QUEUE}", exit_codes.INTERRUPTED)
        except Exception as error:  # of a type of its own: no cluster, a job that it has lost
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            queue = "; start it where sbatch is" if "on a slurm cluster?" in cause else IN_THE_QUEUE
            cli.fail(f"hydra/launcher: {cause[:1000]}{queue}", exit_codes.FAILED)
        return [job.return_value for job in ended]


def checked_runs(context: HydraContext, composed: DictConfig, points: Sequence[Sequence[str]]) -> "list[Config]":
    """The runs of a sweep, or the errors of `compose.convert` and `prepare.check`."""
    from aiayn.config import compose, folders
    from aiayn.config.schema import ConfigError, leaves
    from aiayn.data import prepare

    if not points:
        raise ConfigError("the sweep has no run: its glob fits no name, or its range is empty")
    runs = [compose.convert(context.config_loader.load_sweep_config(composed, list(point))) for point in points]
    if len(kinds := sorted({run.hardware.accelerator for run in runs})) > 1:
        both = " and ".join(kinds)
        raise ConfigError(f"hardware.accelerator={both}: a sweep has one; give each a command of its own")
    known: dict[Path, tuple[Config, Sequence[str]]] = {}
    for run, point in zip(runs, points, strict=True):
        first, typed = known.setdefault(folders.run_folder(run), (run, point))
        for (key, value, _), (_, before, _) in zip(leaves(run), leaves(first), strict=True):
            if value != before:
                both = f"{key}={before} and {value}: the same run, {folders.run_folder(run)}"
                raise ConfigError(f"{both}; give each a command, output=FOLDER and prepared=FOLDER of its own")
        if typed != point:
            pairs = zip(*((a, b) for a, b in zip(typed, point, strict=True) if a != b), strict=True)
            both = " and ".join(map(" ".join, pairs))
            raise ConfigError(f"{both}: one run once scaled, {folders.run_folder(run)}; leave one out")
    for run in {(folders.prepared_folder(run), str(run.data)): run for run in runs}.values():  # once for each corpus
        prepare.check(run)
    return runs


class SideBySide(Launcher):
    """Side by side on this machine, each run with one worker a device."""

    def __init__(self, devices: int, max_devices_per_run: int, hang_timeout: float) -> None:
        self.devices, self.max_devices_per_run, self.hang_timeout = devices, max_devices_per_run, hang_timeout

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keeps what Hydra hands over; the runs go to workers, so that the task function is not called."""
        self.hydra_context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Checks every run, then works through what is not finished. Exits with 75 or 1 unless all are done."""
        from aiayn import cli
        from aiayn.core.exit_codes import DONE
        from aiayn.runs import devices
        from aiayn.sweep import launcher

        for key in ("devices", "max_devices_per_run"):
            if type(value := getattr(self, key)) is not int or value < 0:
                cli.fail(f"hydra.launcher.{key}={value}: must be a whole number from 0 up")
        if type(self.hang_timeout) not in (int, float) or not self.hang_timeout > 0:
            cli.fail(f"hydra.launcher.hang_timeout={self.hang_timeout}: must be a number of minutes above 0")
        with cli.one_line_errors():
            runs = checked_runs(self.hydra_context, self.config, job_overrides)
            if 0 < (most := self.max_devices_per_run) < (fewest := runs[0].hardware.devices):
                cli.fail(f"hydra.launcher.max_devices_per_run={most}: must be 0 or at least hardware.devices={fewest}")
            pool = devices.Pool(runs[0].hardware, devices.names(runs[0].hardware, self.devices), self.devices)
            devices.warn_of_threads(runs[0].hardware, pool.limit)
            launcher.prepare_once(runs)
            sweep = launcher.Sweep(runs, pool, 60 * self.hang_timeout, self.max_devices_per_run)
        code = sweep.work_through()
        if code != DONE:
            sys.exit(code)
        return []
