"""How Hydra's multirun becomes worker processes. Hydra takes plugins only from packages named `hydra_plugins`."""

import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

# As in aiayn.jobs, which takes too long to import for a manual
FAILED, INTERRUPTED = 1, 75


class Rows(BasicSweeper):
    """Hydra's grid sweep, without the `multirun.yaml` that it writes before anything is checked."""

    def sweep(self, arguments: list[str]) -> Any:
        """Hands every point of the grid to the launcher at once."""
        assert self.hydra_context is not None
        assert self.launcher is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        overrides = parser.parse_overrides([*self._parse_config(), *arguments])
        (points,) = self.split_arguments(overrides, max_batch_size=None)
        jobs = self.launcher.launch(points, initial_job_idx=0)
        # What SideBySide has not said itself; a job that a launcher has lost raises here
        codes = [job.return_value for job in jobs]
        if any(codes):
            sys.exit(INTERRUPTED if INTERRUPTED in codes else FAILED)
        return jobs


class SideBySide(Launcher):
    """One worker process per run on this machine."""

    def __init__(self, devices: int, most: int, patience: float) -> None:
        self.devices, self.most, self.patience = devices, most, patience

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keeps what Hydra hands over; the runs go to workers, so that the task function is not called."""
        self.hydra_context, self.config, self.command = hydra_context, config, task_function.__name__

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Checks every run, then works through what is not finished. Exits with 75 or 1 unless all are done."""
        from aiayn import cli, config, devices, jobs, launcher, prepare

        if self.command != "train":
            cli.fail(f"{self.command} takes one run: only train sweeps, with -m or a sweep file")
        if "RANK" in os.environ:
            cli.fail("torchrun's ranks share one run: give it one, without -m and -cn")
        for key, value, nought in (("devices", self.devices, "all"), ("most", self.most, "what aiayn plan gives it")):
            if not isinstance(value, int) or value < 0:
                cli.fail(f"hydra.launcher.{key}={value}: must be a whole number, 0 for {nought}")
        if not isinstance(self.patience, int | float) or not self.patience > 0:
            cli.fail(f"hydra.launcher.patience={self.patience}: must be a number of minutes above 0")
        loader = self.hydra_context.config_loader
        composed = [loader.load_sweep_config(self.config, list(overrides)) for overrides in job_overrides]
        with cli.one_line_errors():
            runs = [config.convert(point) for point in composed]
            for run in runs:
                prepare.check(run)
            names = devices.names(runs[0].hardware, self.devices)
            launcher.prepare_once(runs)
            sweep = launcher.Sweep(runs, names, 60 * self.patience, self.most)
        code = sweep.work_through()
        if code != jobs.DONE:
            sys.exit(code)
        return [JobReturn(overrides=list(o), status=JobStatus.COMPLETED, _return_value=0) for o in job_overrides]


class SlurmDryRun(Launcher):
    """Prints what hydra/launcher=slurm would hand to sbatch, and submits nothing."""

    def __init__(self, **options: Any) -> None:
        plain = {key: OmegaConf.to_object(v) if OmegaConf.is_config(v) else v for key, v in options.items()}
        self.options: dict[str, Any] = {key: value for key, value in plain.items() if value is not None}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Nothing: no run is composed."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Prints the file that submitit would write for these runs, and which run is which job of the array."""
        from submitit.slurm import slurm

        class Executor(slurm.SlurmExecutor):  # type: ignore[misc]
            """As on a machine that has SLURM, wherever it is asked."""

            @classmethod
            def affinity(cls) -> int:
                return 1

        executor = Executor(self.options.pop("submitit_folder"), self.options.pop("max_num_timeout"))
        executor.update_parameters(**executor._convert_parameters(self.options))
        if len(job_overrides) > 1:
            executor.parameters["map_count"] = len(job_overrides)
        print(executor._make_submission_file_text(executor._submitit_command_str, ""))
        for number, overrides in enumerate(job_overrides):
            print(f"# {number}: aiayn train {shlex.join(overrides)}")
        return [JobReturn(overrides=list(o), status=JobStatus.COMPLETED, _return_value=0) for o in job_overrides]
