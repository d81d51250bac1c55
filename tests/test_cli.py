"""The command line: manuals at once, a mistake is one line and exit code 2, and leaves nothing behind."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import hydra._internal.utils
import pytest
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.errors import MissingConfigException
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aiayn import cli, manual
from aiayn.config import compose, folders, schema
from aiayn.core import signals, storage
from aiayn.data import parallel_text
from aiayn.runs import jobs

MANUALS = [["--help"], *([command, "--help"] for command in manual.COMMANDS)]


def run_main(*arguments: str) -> tuple[int, str]:
    """Exit code and what was printed to standard error, in this process; a worker is never started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["aiayn", *arguments])
        patch.setattr(sys, "path", sys.path[:])
        patch.delitem(Singleton._instances, Plugins, raising=False)  # found once in a process, perhaps without ours
        patch.setenv("HYDRA_FULL_ERROR", "1")
        patch.setattr(jobs, "run_here", lambda run: 0)
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
def test_every_manual_fits_a_screen_and_has_the_exit_codes(arguments, capsys):
    assert run_main(*arguments) == (0, "")
    printed = capsys.readouterr().out
    assert manual.EXIT_CODES in printed
    assert max(map(len, printed.splitlines())) < 160


def test_the_exit_codes_are_those_of_jobs():
    for code in (jobs.DONE, jobs.WRONG_CONFIGURATION, jobs.NON_FINITE, jobs.BAD_DATA, jobs.STORAGE, jobs.INTERRUPTED):
        assert re.search(rf"\b{code} ", manual.EXIT_CODES)


@pytest.mark.slow
def test_every_example_of_the_manual_composes(tmp_path, monkeypatch):
    """Without the shell's redirections, and with files where it says `...`; sweeps of all rows have their own tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("aiayn.tables.table2.main", lambda run: None)
    monkeypatch.setattr("aiayn.evaluation.translate.main", lambda run: None)
    monkeypatch.setattr("aiayn.data.prepare.main", lambda run: None)
    monkeypatch.setattr("aiayn.tables.table.main", lambda run: None)
    monkeypatch.setattr("aiayn.tables.criteria.main", lambda run: None)
    monkeypatch.setattr("aiayn.report.html_report.main", lambda run: None)
    monkeypatch.setattr("aiayn.report.attention_maps.main", lambda run: None)
    monkeypatch.setattr("aiayn.evaluation.export.main", lambda run: None)
    monkeypatch.setattr("aiayn.bench.bench.main", lambda run: None)
    monkeypatch.setattr("aiayn.cost.plan.main", lambda run: None)
    monkeypatch.setattr("aiayn.report.wandb_workspace.main", lambda run: None)
    rest = [f"data.{split}_{side}=x" for split in ("train", "dev", "test") for side in ("source", "target")]
    for command, examples in manual.EXAMPLES.items():
        for line in examples:
            if "table3" in line or "beyond" in line:
                continue
            words = [word.strip("'") for word in line.partition("<")[0].partition(">")[0].split()]
            if words[-1:] == ["..."]:
                words[-1:] = rest[2:]
            assert run_main(command, *words) == (0, ""), line


def test_the_manuals_come_at_once_and_sweeps_and_tables_need_no_torch():
    code = (
        "import sys\nfrom aiayn import cli\n"
        f"for arguments in {MANUALS!r}:\n"
        "    sys.argv = ['aiayn', *arguments]\n"
        "    try: cli.main()\n"
        "    except SystemExit: pass\n"
        "print(sorted({'torch', 'pytorch_lightning', 'wandb', 'sacrebleu', 'sentencepiece'} & set(sys.modules)))\n"
        "import aiayn.sweep.launcher, aiayn.data.prepare, aiayn.tables.table, aiayn.tables.criteria\n"
        "print('torch' in sys.modules)\n"
        "import aiayn.paper.loss; print('torch' in sys.modules)"  # control
    )
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "aiayn", "--help"], check=True, capture_output=True)
    assert time.monotonic() - began < 10
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-3:] == ["[]", "False", "True"]


@pytest.mark.parametrize("words", ["table experiment=a_h1", "report seed=2", "criteria scale=small experiment=big"])
def test_a_row_asked_of_a_command_that_shows_all_is_refused(words):
    code, line = run_main(*words.split())
    assert code == 2
    assert line.startswith(words.split()[-1])


def test_no_command_at_all_prints_the_manual_and_counts_as_wrong_usage(aiayn):
    assert "Commands" in aiayn(code=2).stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], ("'trian'", "prepare, train, evaluate, translate, table")),
        (["train", "scale=0"], ("scale=0:", "mini, paper, small, smoke")),
        (["train", "-m", "data=null"], ("data=null:", "files, tiny")),
        (["train", "experiment=a_h2"], ("experiment=a_h2", "a_h1", "a_h4")),
        (["train", "model.dropuot=0.1"], ("model.dropuot", "did you mean model.dropout?")),
        (
            ["train", "data=wmt14_en_de", "data.source=no"],
            ("data.source=no", "training-parallel-nc-v9.tgz", "downloads"),
        ),
        (["evaluate", "wandb.mode=disabled"], ("nothing is trained in runs/tiny-mini/base/seed1",)),
        (["train", "model.dropout=[1"], ("model.dropout=[1",)),
    ],
)
def test_a_mistake_is_one_line_exit_code_2_and_nothing_written(aiayn, tmp_path, arguments, words):
    began = time.monotonic()
    done = aiayn(*arguments, code=2)
    assert time.monotonic() - began < 30
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert all(word in line for word in words), line
    assert list(tmp_path.iterdir()) == []


WRONG = [
    ("model.dropout=1", "model.dropout=1.0"),
    ("model.dropout=nan", "model.dropout=nan"),
    ("model.num_layers=0", "model.num_layers=0"),
    ("model.num_heads=-1", "model.num_heads=-1"),
    ("model.d_k=two", "two"),
    ("model.d_model=20", "model.d_model=5"),
    ("training.max_steps=0", "training.max_steps=0"),
    ("training.max_steps=1.5", "1.5"),
    ("training.label_smoothing=1", "training.label_smoothing=1.0"),
    ("training.tokens_per_update=7", "data.max_length=64"),
    ("data.vocab_size=3", "data.vocab_size=3"),
    ("data.name=../up", "'../up'"),
    ("hardware.threads=0", "hardware.threads=0"),
    ("hardware.devices=0", "hardware.devices=0"),
    ("hardware.precision=8-bit", "64-true"),
    ("hardware.tokens_per_micro_batch=5", "data.max_length"),
    ("decoding.beam_size=0", "decoding.beam_size=0"),
    ("seed=-1", "seed=-1"),
    ("seed=1e99", "seed"),
    ("scale=huge", "scale=huge"),
    ("scale={}", "scale={}"),
    ("data={name: x}", "data={name: x}"),
    ("hardware=[cpu]", "hardware=[cpu]"),
    ("scale.width=0", "scale.width=0"),
    ("hardware=tpu", "hardware=tpu"),
    ("split=train", "dev, test"),
    ("format=pdf", "terminal, md, csv, latex"),
    ("average=0", "average=0"),
    ("wandb.mode=on", "wandb.mode"),
    ("data=files", "data.train_source"),
    ("+model.foo=1", "model.foo"),
    ("~model.dropout", "model.dropout"),
    ("model=null", "model"),
    ("model=1", "model=1: is a section; give model.KEY=..."),
    ("output=/tmp/ü", "quote a value that has special characters: 'output=\"/tmp/ü\"'"),
    ("model.dropout=null", "model.dropout"),
    ("model.dropout={a:1}", "model.dropout"),
    ("model.dropout=${model.nothing}", "model"),
    ("model.dropout=${oc.env:NOTHING_OF_THAT_NAME}", "NOTHING_OF_THAT_NAME"),
    ("output=null", "output"),
    ("=", "="),
    ("model.dropout", "model.dropout"),
]


@pytest.mark.parametrize(("override", "words"), WRONG, ids=[override for override, _ in WRONG])
def test_every_wrong_value_is_one_line_that_names_it(override, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, line = run_main("train", override)
    assert (code, line.count("\n")) == (2, 0)
    assert words in line
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
    before = os.getcwd()
    os.chdir(folder)
    try:
        code, line = run_main("train", *overrides)
    finally:
        os.chdir(before)
    assert code in (0, 2)
    assert (line == "") == (code == 0)
    assert "\n" not in line
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (compose.ConfigError("x"), 2),
        (parallel_text.DataError("x"), 4),
        (storage.StorageError("x"), 5),
    ],
)
def test_an_error_that_a_user_can_cause_has_the_exit_code_of_its_kind(error, code):
    assert cli.explained(error) == (code, "x")


def test_an_error_of_the_system_is_the_user_s_where_it_names_a_file():
    assert cli.explained(PermissionError(13, "Permission denied", "a/path")) == (
        5,
        "[Errno 13] Permission denied: 'a/path'",
    )
    with pytest.raises(OSError, match="libcudart"):  # control: leaves its traceback
        cli.explained(OSError("libcudart.so.12: cannot open shared object file"))


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (
            "In 'hydra/launcher/slurm': Could not load 'hydra/launcher/submitit_slurm'.",
            "submitit_slurm is not installed",
        ),
        ("Could not find 'hydra/launcher/joblib'\n\nAvailable options", "joblib is not installed"),
        ("Could not find 'hydra/launcher/slrum'\n\nAvailable\n\tslurm\nConfig search path", "must be one of slurm"),
    ],
)
def test_a_launcher_that_is_an_extra_is_named_with_how_to_install_it(message, line):
    code, said = cli.explained(MissingConfigException(message))
    assert code == 2
    assert said.startswith("hydra/launcher")
    assert line in said
    assert ("pip install" in said) == ("not installed" in said)


@pytest.mark.parametrize("error", [ZeroDivisionError("x"), ValueError("x"), TypeError("x"), KeyError("x")])
def test_an_error_that_only_we_can_cause_keeps_its_traceback(error):  # control
    """Of numpy, of torch, or of ours: a line without a place would help nobody."""
    with pytest.raises(type(error)):
        cli.explained(error)


COMMANDS_WITHOUT_TRAINING = [command for command in manual.COMMANDS if command != "train"]


@pytest.mark.parametrize("command", COMMANDS_WITHOUT_TRAINING)
def test_a_signal_in_any_command_is_one_line_and_75(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main = f"aiayn.{cli.MODULES.get(command, command)}.main"
    monkeypatch.setattr(main, lambda run: os.kill(os.getpid(), signal.SIGTERM))
    with signals.interrupting():
        assert run_main(command) == (75, "")
    assert capsys.readouterr().err == "aiayn: stopped by SIGTERM; repeat the command to go on from here\n"


def test_a_signal_is_not_hidden_by_a_clean_up_that_it_makes_fail(capsys):
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("seconds", [0.05, 0.4])
def test_a_signal_while_a_command_is_imported_is_one_line_and_75(number, seconds, tmp_path):
    code = (
        "import sys, threading, os\nfrom aiayn import __main__\n"
        f"threading.Timer({seconds}, os.kill, (os.getpid(), {int(number)})).start()\n"
        "sys.argv = ['aiayn', 'bench']\n__main__.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (75, "")
    assert done.stderr == f"aiayn: stopped by {number.name}; repeat the command to go on from here\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "override", ["devices=-1", "devices=x", "devices=null", "most=-1", "patience=0", "patience=[1]", "patience=nan"]
)
def test_a_launcher_that_makes_no_sense_is_one_line(override, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, line = run_main("train", "-m", f"hydra.launcher.{override}", "seed=1,2")
    assert code == 2
    assert line.startswith(f"hydra.launcher.{override.partition('=')[0]}=")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [command for command in manual.COMMANDS if command != "train"])
def test_only_train_sweeps(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for sweep in (["-m", "seed=1,2"], ["-cn", "table3"]):
        code, line = run_main(command, *sweep)
        assert code == 2
        assert "only train sweeps" in line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("scale=smoke -m seed=1,2", "-m scale=smoke seed=1,2"),
        ("seed=1 -cn table3 scale=smoke --resolve", "-cn table3 --resolve seed=1 scale=smoke"),
        ("--config-name=table3 a=1 --cfg job", "--config-name=table3 --cfg job a=1"),
        ("a=1 -cn", "-cn a=1"),
        ("", ""),
    ],
)
def test_flags_may_stand_anywhere(words, expected):
    assert cli.flags_first(words.split()) == expected.split()


def test_a_flag_between_two_words_is_understood(aiayn):
    words = ("seed=7", "--cfg", "job", "experiment=a_h1")
    assert "seed: 7" in aiayn("train", *words).stdout
    with pytest.raises(SystemExit):  # control: argparse alone does not
        hydra._internal.utils.get_args_parser().parse_args(words)


def test_a_sweep_file_that_is_not_there_is_refused_with_the_names_of_those_that_are():
    code, line = run_main("train", "-cn", "table4")
    assert code == 2
    assert line == "-cn table4: must be one of beyond, lengths, seeds, table3"


def test_the_version_is_the_installed_one(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli._run(["--version"])
    assert capsys.readouterr().out == f"aiayn {metadata.version('aiayn')}\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--help", ""),
        ("train --help", ""),
        pytest.param("train --cfg job", "", marks=pytest.mark.slow),
        ("table", ""),
        pytest.param("table format=md", "", marks=pytest.mark.slow),
        pytest.param("plan", "", marks=pytest.mark.slow),
        ("trian", "'trian' is no command"),
    ],
)
def test_a_reader_that_leaves_early_is_no_error(words, line, tmp_path):
    """One that is gone before the first word: what it would have read may fit into the pipe."""
    command = f"{{ sleep 0.1; {sys.executable} -m aiayn {words}; echo $? >&2; }} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path)
    *printed, code = done.stderr.splitlines()
    assert "Traceback" not in done.stderr
    assert len(printed) == bool(line)
    assert line in done.stderr
    own = "1" if words.startswith(("table", "plan")) else ""  # rich ends for itself
    assert code in ("2" if line else str(128 + signal.SIGPIPE), own)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a file to which nothing can be written")
@pytest.mark.parametrize("words", ["--version", "table format=csv"])
def test_output_that_cannot_be_written_is_an_error_of_storage_in_one_line(words, tmp_path):
    command = f"{sys.executable} -m aiayn {words} >/dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == "aiayn: cannot write the output: No space left on device\n"
    assert done.returncode == 5


def test_the_first_lines_reach_a_reader_that_wants_no_more(tmp_path):
    command = f"{sys.executable} -m aiayn table | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.startswith("Table 3 at scale mini")
    assert done.stderr == ""


@pytest.mark.slow
def test_a_training_whose_reader_leaves_ends_without_a_word_and_goes_on_later(toy, tmp_path, aiayn):
    words = ["train", *toy, "training.max_steps=7"]
    command = shlex.join([sys.executable, "-m", "aiayn", *words])
    bash = ["bash", "-c", f"{command} | true; echo ${{PIPESTATUS[0]}}"]
    done = subprocess.run(bash, capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == (f"{128 + signal.SIGPIPE}\n", "")
    folder = folders.run_folder(compose.compose_row(*words[1:]))
    assert not (folder / "failure.json").exists()
    aiayn(*words)
    assert (folder / "result.json").exists()
