"""The command line: manuals at once, a mistake is one line and exit code 2, and leaves nothing behind."""

import io
import os
import re
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import pytest
import yaml
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.errors import MissingConfigException
from hydra.types import RunMode
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from aiayn import cli, manual
from aiayn.config import compose, folders, schema
from aiayn.core import signals, storage
from aiayn.data import parallel_text
from aiayn.runs import devices
from aiayn.sweep import one_run

MANUALS = [["--help"], *([command, "--help"] for command in manual.COMMANDS)]


def run_main(*arguments: str, worker: Callable[[schema.Config], int] = lambda run: 0) -> tuple[int, str]:
    """Exit code and the line on standard error, in this process, where `worker` is called in place of a real one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["aiayn", *arguments])
        patch.setattr(sys, "path", sys.path[:])
        patch.delitem(Singleton._instances, Plugins, raising=False)  # found once in a process, perhaps without ours
        patch.setenv("HYDRA_FULL_ERROR", "1")
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"1 2 3\n")))
        patch.setattr(one_run, "run_here", worker)
        patch.setattr("aiayn.sweep.launcher.Sweep.work_through", lambda sweep: 0)
        printed: list[str] = []
        patch.setattr(cli, "fail", lambda line, code=2: (printed.append(line), sys.exit(code)))
        try:
            cli.main()
            code: object = 0
        except SystemExit as exit:
            code = exit.code
    assert isinstance(code, int), code
    return code, "\n".join(printed)


@pytest.mark.parametrize("arguments", MANUALS, ids=" ".join)
def test_every_manual_fits_a_screen(arguments, capsys):
    assert run_main(*arguments) == (0, "")
    printed = capsys.readouterr().out
    assert manual.EXIT_CODES in " ".join(printed.split())
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.slow
def test_every_example_of_the_manual_composes(tmp_path, monkeypatch):
    """Without the shell's redirections, and with files where it says `...`; sweeps of all rows have their own tests."""
    monkeypatch.chdir(tmp_path)
    for module, *_ in manual.COMMANDS.values():
        monkeypatch.setattr(f"aiayn.{module}.main", lambda run: None)
    rest = [f"data.{split}_{side}" for split in ("train", "dev", "test") for side in ("source=x.en", "target=x.de")]
    for line in manual.EXAMPLES.splitlines():
        if "-cn" not in line:
            words = [word.strip("'") for word in re.split(" # | [<>] ", line)[0].split()]
            assert run_main(*words[1:-1], *(rest[1:] if words[-1] == "..." else words[-1:])) == (0, ""), line


def test_manuals_sweeps_and_tables_need_no_torch():
    code = (
        "import sys\nfrom aiayn import cli\n"
        f"for arguments in {MANUALS!r}:\n"
        "    sys.argv = ['aiayn', *arguments]\n"
        "    try: cli.main()\n"
        "    except SystemExit: pass\n"
        "print(sorted({'torch', 'pytorch_lightning', 'wandb', 'sacrebleu', 'sentencepiece'} & set(sys.modules)))\n"
        "import aiayn.sweep.launcher, aiayn.data.prepare, aiayn.tables.table\n"
        "print('torch' in sys.modules)\n"
        "import aiayn.paper.loss; print('torch' in sys.modules)"  # control
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-3:] == ["[]", "False", "True"]


WRONG = {
    "trian": "'trian' is no command: one of prepare, train, evaluate, translate, table",
    "train scale=0": "scale=0: must be one of lengths, mini, paper, small, smoke",
    "train model.dropout=nan": "model.dropout=nan",
    "train model.d_k=two": "must be a whole number",
    "train data.name=../up": "../up",
    "evaluate wandb.mode=disabled": "nothing is trained in runs/tiny-mini/base/seed1",
    "train 'scale={}'": "scale={}",
    "table format=pdf": "terminal, md, csv, latex",
    "train -cn table4": "-cn/--config-name: invalid choice: 'table4' (choose from",
    "train data=files": "data.train_source",
    "train model=base model.dropout=0.3": "model=base: is a section; give model.KEY=...",
    "train ~model.dropout": "~model.dropout: no key can be removed; without it model.dropout has its default",
    "train seed=[1,2]": "seed=[1, 2]: must be a whole number",
    "train wandb.project=[1]": "wandb.project=[1]: must be text",
    "train output=/tmp/ü": "quote a value that has special characters: 'output=\"/tmp/ü\"'",
    "train 'model.dropout=${oc.env:NOTHING_OF_THAT_NAME}'": "NOTHING_OF_THAT_NAME",
    "train --cfg jobs": "; the flags are -cn NAME, -m, --cfg job|hydra|all",
    "train --multirun=seed=1,2": "'seed=1,2'; the flags are -cn NAME, -m,",
    "train -m --cfg job": "not allowed with argument",
    "train --conf x": "--conf is no flag of this program: -cn NAME",
    "train seed": "'seed': must be KEY=VALUE, without blanks",
    "train seed=1,2": "seed=1,2: several values are a sweep: `aiayn train -m seed=1,2`; a decimal has a point",
    "train output=": "'output=': must be KEY=VALUE, without blanks; is a shell variable empty?",
    "train hydra/sweeper=optuna": "hydra/sweeper=optuna: sweeps are grids: -m training.learning_rate_factor=0.5,1,2",
    "train hydra.run.dir=x": "hydra.run.dir=x: runs go where output=FOLDER says",
    "train hydra.verbose=true": "only hydra/launcher and hydra.launcher.* are read",
    "train -m seed=1,2,-3": "seed=-3",
    "train -m hardware=cpu,gpu": "hardware.accelerator=cpu and gpu",
    "train -m hardware.threads=1,2": "hardware.threads=1 and 2: the same run, runs/tiny-mini/base/seed1; give each",
    "train -m model.num_layers=7,8": "model.num_layers=7 and model.num_layers=8: one run once scaled, runs/tiny-mini/",
    "train prepared='~nobody-here/x'": "prepared=~nobody-here/x: no such home folder",
    "train -m experiment=glob(x_*)": "the sweep has no run: its glob fits no name, or its range is empty",
    "train -m hydra.launcher.devices=1 hardware.devices=2": "hardware.devices=2: must be at most 1",
    "train -m hardware.devices=2 hydra.launcher.max_devices_per_run=1": "per_run=1: must be 0 or at least hardware.dev",
    "bench hardware.precision=64-true": "bench measures fp32 and bf16",
    "bench fidelity=released_code": "use fidelity=paper",
    "train -m hydra.launcher.devices=x seed=1,2": "hydra.launcher.devices=",
    "train -m hydra.launcher.hang_timeout=0 seed=1,2": "hydra.launcher.hang_timeout=",
    "prepare -m seed=1,2": "only train sweeps",
    "plan -cn table3": "only train sweeps",
    "table experiment=a_h1": "experiment=a_h1",
    "report seed=2": "seed=2",
}


@pytest.mark.parametrize("words", WRONG)
def test_every_wrong_value_is_one_line_that_names_it(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, line = run_main(*shlex.split(words))
    assert (code, line.count("\n")) == (2, 0)
    assert WRONG[words] in line
    assert list(tmp_path.iterdir()) == []


KEYS = [key for key, _, _ in schema.leaves(schema.Config())] + ["data", "scale", "hardware", "nothing", "hydra.run"]
VALUES = st.one_of(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["null", "true", "[]", "{}", "[1,2]", "{a: 1}", "???", "${seed}", "'", "\\", "x" * 300, "1,2"]),
)
OVERRIDES = st.one_of(
    st.builds("{}{}={}".format, st.sampled_from(["", "+", "++", "~"]), st.sampled_from(KEYS), VALUES),
    VALUES.filter(lambda text: not text.startswith("-")),
)


def test_more_threads_than_cores_are_one_line_of_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(devices, "cores", lambda: 3)
    for words, threads in (("threads=999", "999 on 1 device:"), ("devices=4", "1 on 4 devices:"), ("threads=3", None)):
        said = f"aiayn: hardware.threads={threads} more threads than the 3 cores here, which takes longer\n"
        assert run_main("train", f"hardware.{words}") == (0, "")
        assert capsys.readouterr().err == (said if threads else "")
    run_main("evaluate", "hardware.devices=4")  # one process, whatever trained
    assert capsys.readouterr().err == ""


def test_hydras_own_configuration_is_shown_as_hydra_does(aiayn):
    assert yaml.safe_load(aiayn("train", "--cfg", "hydra", "seed=7").stdout)["hydra"]["overrides"]["task"] == ["seed=7"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "rest"),
    [("aiayn ev", "aluate"), ("aiayn train -cn table3 experiment=c_dmodel2", "56"), ("aiayn plan wandb.pr", "oject=")],
)
def test_bash_completes_commands_groups_and_keys(line, rest):
    terminal, inside = os.openpty()
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TERM": "dumb"}
    words, written = ["bash", "--norc", "--noprofile", "-i"], ""
    with subprocess.Popen(words, stdin=inside, stdout=inside, stderr=inside, env=environment, process_group=0) as bash:
        os.write(terminal, f'eval "$(aiayn train -sc install=bash)"\n{line}\t'.encode())
        while not written.endswith(line + rest) and select.select([terminal], [], [], 20)[0]:
            written += os.read(terminal, 4096).decode()
        bash.kill()
    assert written.endswith(line + rest)


@settings(max_examples=60, deadline=None)
@given(st.lists(OVERRIDES, min_size=1, max_size=2))
@example([f"output={'x' * 300}"])
@example(["data.name=a\nb"])
@example(["model.dropout=a\nb"])
@example(["experiment=0"])
@example(["~experiment=0"])
def test_no_override_whatever_ends_in_a_traceback(tmp_path_factory, overrides):
    """Any exception that is not an exit fails this test: it would be a traceback."""
    folder = tmp_path_factory.mktemp("any")
    with chdir(folder):
        code, line = run_main("train", *overrides)
    assert code in (0, 2)
    assert (line == "") == (code == 0)
    assert "\n" not in line
    assert list(folder.iterdir()) == []


def test_an_error_of_the_user_has_the_exit_code_of_its_kind():
    absent = FileNotFoundError(2, "No such file", "a/path")
    kinds = {compose.ConfigError("x"): 2, parallel_text.DataError("x"): 4, storage.StorageError("x"): 5, absent: 5}
    told = {error: "a/path: No such file" if error is absent else "x" for error in kinds}
    assert {error: cli.explained(error) for error in kinds} == {error: (kinds[error], told[error]) for error in kinds}


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("Could not load 'hydra/launcher/submitit_slurm'.", "submitit_slurm is not installed.*pip install"),
        ("Could not find 'hydra/launcher/slrum'\n\nAvailable\n\tslurm\nConfig search path", "must be one of slurm"),
    ],
)
def test_an_absent_launcher_is_named_with_the_remedy(message, line):
    code, said = cli.explained(MissingConfigException(message))
    assert code == 2
    assert re.match(f"hydra/launcher.*{line}", said)


@pytest.mark.parametrize("error", [ZeroDivisionError("x"), ValueError("x"), OSError("libcudart.so.12: cannot open")])
def test_an_error_of_ours_keeps_its_traceback(error):  # control
    """Of numpy, of torch, or of ours, in whatever folder: a line without a place would help nobody."""
    with pytest.raises(type(error)) as raised:
        exec(compile("raise error", "/home/hydra/aiayn/cli.py", "exec"), {"error": error})
    with pytest.raises(type(error)):
        cli.explained(raised.value)


@pytest.mark.parametrize(
    ("mode", "ended", "exits"), [(RunMode.MULTIRUN, 4, False), (RunMode.RUN, 4, True), (RunMode.MULTIRUN, -1, True)]
)
def test_a_task_of_a_sweep_gives_its_code_and_goes_on(mode, ended, exits, monkeypatch):
    monkeypatch.setattr(cli.HydraConfig, "get", lambda: OmegaConf.create({"mode": mode}))
    monkeypatch.setattr(compose, "convert", lambda composed: schema.Config())
    monkeypatch.setattr(one_run, "run_here", lambda run: ended)
    if exits:
        with pytest.raises(SystemExit) as left:
            cli.task("train")(DictConfig({}))
        assert left.value.code == ended
    else:
        assert cli.task("train")(DictConfig({})) == ended


@pytest.mark.parametrize("command", ["prepare", "plan"])
def test_a_signal_in_any_command_is_one_line_and_75(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("aiayn.data.prepare.sources", lambda data: os.kill(os.getpid(), signal.SIGTERM))
    with signals.interrupting():
        assert run_main(command) == (75, "")
    assert capsys.readouterr().err == "aiayn: stopped by SIGTERM; repeat the command to go on from here\n"


def test_a_signal_is_not_hidden_by_a_failing_clean_up(capsys):
    """As in a library's `finally: f.close()`, where the signal came before f was opened."""

    def interrupted_at(signalled):
        with cli.one_line_errors():
            try:
                raise signalled
            finally:
                {}["f"]

    with pytest.raises(SystemExit) as left:
        interrupted_at(signals.Interrupted("stopped by SIGINT"))
    assert (left.value.code, capsys.readouterr().err) == (75, "aiayn: stopped by SIGINT\n")
    with pytest.raises(KeyError):  # control: any other error keeps its traceback
        interrupted_at(RuntimeError())


SURVIVES = "import time, hydra\ndef f():\n try: time.sleep(9)\n except: pass\nhydra.main = lambda **_: lambda _: f"
BUSY = "import time; aiayn.cli.main = lambda: (threading.Thread(target=time.sleep, args=(99,)).start(), time.sleep(9))"


@pytest.mark.parametrize(
    ("number", "amid"), [(signal.SIGTERM, ""), (signal.SIGINT, SURVIVES), (signal.SIGTERM, f"import aiayn.cli\n{BUSY}")]
)
def test_a_signal_in_an_import_or_amid_threads_is_one_line(number, amid, tmp_path):
    code = (
        f"import sys, threading, os\nfrom aiayn import __main__\n{amid}\n"
        f"threading.Timer(0.4, os.kill, (os.getpid(), {int(number)})).start()\n"
        "sys.argv = ['aiayn', 'bench']\n__main__.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (75, "")
    assert done.stderr == f"aiayn: stopped by {number.name}; repeat the command to go on from here\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", ["table", "table format=md"])
def test_a_terminal_of_another_encoding_gets_a_table(words, aiayn, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    printed = aiayn(*words.split()).stdout
    assert "big" in printed
    assert printed.isascii()


@pytest.mark.parametrize(("words", "line"), [("--help", ""), ("table", ""), ("trian", "'trian' is no command")])
def test_a_reader_that_leaves_early_is_no_error(words, line, tmp_path):
    """One that is gone before the first word: what it would have read may fit into the pipe."""
    command = f"{{ sleep 0.1; {sys.executable} -m aiayn {words}; echo $? >&2; }} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path)
    *printed, code = done.stderr.splitlines()
    assert "Traceback" not in done.stderr
    assert len(printed) == bool(line)
    assert line in done.stderr
    assert code in ("2" if line else str(128 + signal.SIGPIPE), "1" if words == "table" else "")  # rich ends itself


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a file to which nothing can be written")
@pytest.mark.parametrize("words", ["--version", "table format=csv"])
def test_output_that_cannot_be_written_is_an_error_of_storage(words, tmp_path):
    command = f"{sys.executable} -m aiayn {words} >/dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == "aiayn: cannot write the output: No space left on device\n"
    assert done.returncode == 5


@pytest.mark.slow
def test_a_training_whose_reader_leaves_goes_on_later(toy, tmp_path, aiayn):
    words = ["train", *toy, "training.max_steps=7"]
    command = shlex.join([sys.executable, "-m", "aiayn", *words])
    bash = ["bash", "-c", f"{command} | true; echo ${{PIPESTATUS[0]}}"]
    done = subprocess.run(bash, capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == (f"{128 + signal.SIGPIPE}\n", "")
    folder = folders.run_folder(compose.compose_row(*words[1:]))
    assert not (folder / "failure.json").exists()
    aiayn(*words)
    assert (folder / "result.json").exists()
