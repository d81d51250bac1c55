"""The shape of the house: imports point one way, and each library has its rooms."""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from aiayn.config import compose
from aiayn.core import storage

SOURCE = Path(__file__).parents[1] / "src" / "aiayn"

# In dependency order: a module imports from its own package, without a circle, and from those before it.
PACKAGES = (
    *(
        "core",
        "config",
        "paper",
        "alternatives",
        "data",
        "runs",
        "evaluation",
        "training",
        "cost",
        "sweep",
        "tables",
        "report",
        "bench",
    ),
    *("manual", "cli", "__main__"),
)
ALONE = {"manual", "cli", "__main__"}  # modules in no package
ROOMS = {
    "wandb": {"training.wandb_log", "report.wandb_workspace"},
    "wandb_workspaces": {"report.wandb_workspace"},
    "hydra": {"config.compose", "cli"},
    "omegaconf": {"config.schema", "config.compose", "cli"},
    "pytorch_lightning": {"training.lightning_model", "training.callbacks", "training.train"},
    "sacrebleu": {"evaluation.metrics"},
    "jinja2": {"report.html_page"},
    "sentencepiece": {"data.sentencepiece_bpe"},
    "subword_nmt": {"data.moses_bpe"},
    "tarfile": {"data.parallel_text"},
    "urllib": {"data.download"},
    "ctranslate2": {"evaluation.export", "bench.rivals"},
    "transformers": {"evaluation.export"},
    "safetensors": {"evaluation.export"},
}


def module_of(path: Path) -> str:
    """The name of the module in a source file, without `aiayn.`: `paper.fast.model`."""
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


def source(module: str) -> Path:
    """The file of a module."""
    return SOURCE / f"{module.replace('.', '/')}.py"


MODULES = {module_of(path) for path in SOURCE.rglob("*.py") if "plugins" not in path.parts and path.stem != "__init__"}
PAPER = sorted(module for module in MODULES if module.startswith("paper."))


@cache
def imports(path: Path) -> set[str]:
    """Every module that a file imports anywhere, in full: `aiayn.core.storage`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in inside if name.removeprefix("aiayn.") in MODULES} or {node.module}
    return found


def ours(module: str) -> set[str]:
    """The modules of ours that a module imports."""
    return {name.removeprefix("aiayn.") for name in imports(source(module)) if name.startswith("aiayn.")}


def upward(order: Sequence[str]) -> list[str]:
    """The imports that point to a later package."""
    place = {package: number for number, package in enumerate(order)}
    top = {module: place[module.partition(".")[0]] for module in MODULES}
    return [f"{module} imports {name}" for module in MODULES for name in ours(module) if top[name] > top[module]]


def test_every_module_is_in_a_package_of_three_to_nine():
    sizes = Counter(module.rpartition(".")[0] for module in MODULES)
    assert {*sizes, *ALONE} - {""} == {*PACKAGES, "paper.fast"}
    assert {module for module in MODULES if "." not in module} == ALONE
    assert {package: size for package, size in sizes.items() if package and not 3 <= size <= 9} == {}


def test_imports_point_downward_and_in_no_circle():
    assert upward(PACKAGES) == []
    assert upward(PACKAGES[::-1])  # control: the test sees an arrow that points the other way
    list(TopologicalSorter({module: ours(module) for module in MODULES}).static_order())
    with pytest.raises(CycleError):  # control
        list(TopologicalSorter({module: ours(module) | {"bench.bench"} for module in MODULES}).static_order())


def test_no_module_is_longer_than_350_lines_and_the_papers_not_than_1200_together():
    lengths = {module: len(source(module).read_text().splitlines()) for module in MODULES}
    assert {module: length for module, length in lengths.items() if length > 350} == {}
    assert (
        sum(length for module, length in lengths.items() if module.startswith("paper.") and "fast" not in module)
        <= 1200
    )


def test_each_library_has_its_rooms():
    for library, rooms in ROOMS.items():
        found = {m for m in MODULES if any(name.split(".")[0] == library for name in imports(source(m)))}
        assert found == rooms, library


LOADED = """
import os, sys
import torch
alone = {name.partition(".")[0] for name in sys.modules} | sys.stdlib_module_names
for module in sys.argv[1:]:
    sys.stdout.flush()
    if os.fork() == 0:
        try:
            __import__(module)
            ours = {name for name in sys.modules if name.startswith("aiayn.")}
            others = {name.partition(".")[0] for name in sys.modules} - alone - {"aiayn"}
            slow = {"torch._dynamo"} & set(sys.modules)  # torch.compile: seconds, for what only a GPU needs
            print(module, *ours, *others, *slow, flush=True)
        finally:
            os._exit(0)
    os.wait()
"""


def loaded(modules: list[str]) -> dict[str, set[str]]:
    """Of ours and of third parties what each module loads, alone in a process that has imported torch and no more."""
    done = subprocess.run([sys.executable, "-c", LOADED, *modules], capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    return {module: set(names) for module, *names in lines}


def test_the_papers_modules_load_each_other_and_torch_and_without_fast_nothing_of_it():
    found = loaded(["aiayn.data.update_plan", *(f"aiayn.{module}" for module in PAPER)])
    control = found.pop("aiayn.data.update_plan")
    assert {"aiayn.config.schema", "aiayn.paper.batch"} < control
    assert len(found) == len(PAPER)
    for module, names in found.items():
        assert module in names
        inside = "aiayn.paper" if ".fast" in module else "aiayn.paper(?!.fast)"
        assert [name for name in names if not re.match(inside, name)] == [], module


def test_the_papers_modules_import_nothing_else_later():
    """Inside of their functions, where the test above would not see it."""
    for module in PAPER:
        tops = {name.partition(".")[0] for name in imports(source(module))}
        assert tops <= {"aiayn", "torch"} | sys.stdlib_module_names, module
    assert (
        not {name.partition(".")[0] for name in imports(source("evaluation.metrics"))}
        <= {"aiayn"} | sys.stdlib_module_names
    )  # control


def test_the_metrics_know_no_framework():
    assert not {"hydra", "omegaconf", "pytorch_lightning", "wandb", "aiayn.config.compose"} & imports(
        source("evaluation.metrics")
    )


WRITES = {"write_text", "write_bytes", "writelines", "touch", "mkdir", "unlink", "rmdir", "rename", "save", "dump"}
WRITES |= {"symlink_to", "hardlink_to", "chmod", "tofile", "makedirs", "remove", "removedirs", "truncate", "memmap"}
SAVED_ELSEWHERE = {
    "checkpoint": {"torch.save", "remove"},  # into memory; its own, both through storage
    "callbacks": {"checkpoint.save"},  # through storage
    "export": {"ctranslate2_spec(model.float(), subwords).save"},  # into a folder that storage stages
    "rivals": {"tempfile"},  # a rival reads its weights from files
    "wandb_workspace": {"workspace(run, entity).save"},  # on the server of W&B
    "signals": {"shutil"},  # only asks where a program is
    "kernels": {"shutil", "tempfile"},  # asks where the compiler is, and has it write into a temporary folder
}


def writes(tree: ast.AST) -> set[str]:
    """The calls that change files, and the modules that exist for it, other than through storage."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {node.module} if isinstance(node, ast.ImportFrom) else {alias.name for alias in node.names}
            found |= names & {"shutil", "tempfile", "fileinput", "sqlite3", "shelve"}
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        *owner, method = name.split(".")
        modes = [
            word.value for word in [*node.args, *(k.value for k in node.keywords)] if isinstance(word, ast.Constant)
        ]
        if method == "open" and any(set(str(mode)) & set("wax+") for mode in modes if str(mode).isascii()):
            found.add(name)
        if owner[:1] != ["storage"] and method in WRITES:
            found.add(name)
        if owner == ["os"] and method in ("open", "write", "replace", "link", "symlink", "truncate"):
            found.add(name)
    return found


def test_only_storage_writes_files():
    for path in SOURCE.rglob("*.py"):
        found = writes(ast.parse(path.read_text()))
        if path.stem == "storage":
            assert found  # control: the test sees what is written
        else:
            assert found == SAVED_ELSEWHERE.get(path.stem, set()), path


@pytest.mark.parametrize(
    "line",
    [
        *(
            "open(p, 'w')",
            "p.open('ab')",
            "open(p, mode='r+')",
            "gzip.open(p, 'wt')",
            "p.write_text(t)",
            "os.remove(p)",
        ),
        *(
            "p.unlink()",
            "os.replace(a, b)",
            "p.rename(q)",
            "import tempfile",
            "from shutil import move",
            "json.dump(a, b)",
        ),
    ],
)
def test_a_line_that_writes_is_seen(line):  # control
    assert writes(ast.parse(line))


@pytest.mark.usefixtures("signals")
def test_a_run_writes_through_storage_alone(toy_run, tmp_path):
    """What the lint cannot see: the files that this process really changes, and whose frame asks for it."""
    from aiayn.training import train

    watching, strangers, ours = True, [], 0

    def watch(event: str, arguments: tuple) -> None:
        nonlocal ours
        if not watching or event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.truncate"):
            return
        if event == "open" and not (arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            return
        frame, stack = sys._getframe(1), []
        while frame is not None:
            stack.append(frame.f_code.co_filename)
            frame = frame.f_back
        if str(SOURCE / "core" / "storage.py") in stack:
            ours += 1
        elif "__pycache__" not in str(arguments[0]):
            strangers.append((event, *arguments[:1]))

    sys.addaudithook(watch)
    try:
        storage.write_text(tmp_path / "run" / "config.yaml", compose.to_yaml(toy_run))
        train.train(toy_run, tmp_path / "run")
        assert strangers == []
        assert ours > 20
        (tmp_path / "stranger").touch()  # control
        assert strangers == [("open", str(tmp_path / "stranger"))]
    finally:
        watching = False


TESTS = Path(__file__).parent
FILES = {path.stem.removeprefix("test_"): path for path in TESTS.rglob("test_*.py")}
# What is fast is tested together with what it equals
TESTED_AS = {
    "paper.fast.attention": "fast_attention",
    "paper.fast.decoding": "incremental_decoding",
    "paper.fast.search": "beam_search",
}


def test_every_module_has_a_test_file_in_its_folder():
    for module in MODULES - {"__main__"} - set(TESTED_AS):
        path = TESTS.joinpath(*module.split("."))
        assert path.with_name(f"test_{path.name}.py").exists(), module
    for module, test in TESTED_AS.items():
        assert f"aiayn.{module}" in imports(FILES[test]), module


def test_no_two_test_files_have_one_name():
    assert len(FILES) == len(list(TESTS.rglob("test_*.py")))


ROW = re.compile(
    r"^\| *([^|]*?) *\|(.*)\|(.*)\|(.*)\|[^|]*\|$", re.MULTILINE
)  # number, promise, tests, controls, seconds


def named(cell: str) -> set[tuple[str, str]]:
    """The tests that a cell names, each with its module."""
    return set(re.findall(r"`(\w+)`: (\w+)", cell))


def collected(session: pytest.Session, module: str) -> set[str]:
    """What pytest itself finds in a test file: its functions without their parameters, and its classes."""
    path = FILES[module]
    items = list(pytest.Module.from_parent(session, path=path).collect())
    assert all(item.nodeid.startswith(path.relative_to(session.config.rootpath).as_posix()) for item in items)
    return {item.originalname if isinstance(item, pytest.Function) else item.name for item in items}


def missing(session: pytest.Session, names: set[tuple[str, str]]) -> list[str]:
    found = {module: collected(session, module) for module in {module for module, _ in names}}
    return sorted(f"{module}: {name}" for module, name in names if not {name, f"test_{name}"} & found[module])


def test_every_test_that_the_table_of_promises_names_is_collected(request: pytest.FixtureRequest) -> None:
    names = named((TESTS / "README.md").read_text())
    assert len(names) > 80
    assert missing(request.session, names) == []
    # Control: a word that only stands in a file, and a function that pytest does not collect
    absent = {("architecture", "collected"), ("architecture", "no_such_test"), ("cli", "run_main")}
    assert len(missing(request.session, absent)) == 3


def without_a_test(table: str) -> list[str]:
    """The promises that no test is named for, and the numbers that are left out."""
    rows = [(number, named(tests)) for number, _, tests, _ in ROW.findall(table) if re.fullmatch(r"[A-Z]\d+", number)]
    gaps = []
    for letter in "ABCDEFGHIJ":
        numbers = [int(number[1:]) for number, _ in rows if number[0] == letter]
        gaps += [f"{letter}{number}" for number in range(1, max(numbers, default=1) + 1) if numbers.count(number) != 1]
    return gaps + [number for number, tests in rows if not tests]


def test_every_promise_of_the_table_has_a_test() -> None:
    table = (TESTS / "README.md").read_text()
    assert len(ROW.findall(table)) > 40
    assert without_a_test(table) == []
    bare = re.sub(r"^(\| A2 \|[^|]*\|)[^|]*\|", r"\1 - |", table, flags=re.MULTILINE)
    assert without_a_test(bare) == ["A2"]  # control
    assert without_a_test(re.sub(r"^\| A2 .*\n", "", table, flags=re.MULTILINE)) == ["A2"]
    assert without_a_test(re.sub(r"^\| J\d .*\n", "", table, flags=re.MULTILINE)) == ["J1"]
