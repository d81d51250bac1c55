"""The shape of the house: imports point one way, and each library has its rooms."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "aiayn"
TESTS = ROOT / "tests"

# In dependency order: a module imports from its own package, without a circle, and from those before it.
ALONE = ("manual", "cli", "__main__")  # modules in no package
PACKAGES = (
    *("core", "config", "paper", "alternatives", "data", "runs", "evaluation"),
    *("training", "bench", "cost", "sweep", "tables", "report", *ALONE),
)
ROOMS = {
    "wandb": {"training.wandb_log", "report.wandb_workspace"},
    "wandb_workspaces": {"report.wandb_workspace"},
    "hydra": {"config.compose", "cli"},
    "omegaconf": {"config.schema", "config.compose", "cli"},
    "pytorch_lightning": {"training.lightning_model", "training.callbacks", "training.train"},
    "sacrebleu": {"evaluation.metrics"},
    "jinja2": {"report.html_report"},
    "sentencepiece": {"data.sentencepiece_bpe"},
    "subword_nmt": {"data.moses_bpe"},
    "tarfile": {"data.parallel_text"},
    "urllib": {"data.download"},
    "ctranslate2": {"evaluation.export", "bench.baselines"},
    "transformers": {"bench.baselines"},
    "safetensors": {"evaluation.export"},
}


FILES = [path for path in SOURCE.rglob("*.py") if "plugins" not in path.parts and path.stem != "__init__"]
MODULES = {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in FILES}


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
    return {name.removeprefix("aiayn.") for name in imports(MODULES[module]) if name.startswith("aiayn.")}


def upward(order: Sequence[str]) -> list[str]:
    """The imports that point to a later package."""
    place = {package: number for number, package in enumerate(order)}
    top = {module: place[module.partition(".")[0]] for module in MODULES}
    return [f"{module} imports {name}" for module in MODULES for name in ours(module) if top[name] > top[module]]


def test_every_module_is_in_a_package_of_three_to_nine():
    sizes = Counter(module.rpartition(".")[0] for module in MODULES)
    assert {*sizes, *ALONE} - {""} == {*PACKAGES}
    assert {module for module in MODULES if "." not in module} == {*ALONE}
    assert {package: size for package, size in sizes.items() if package and not 3 <= size <= 9} == {}


def test_imports_point_downward_and_in_no_circle():
    assert upward(PACKAGES) == []
    assert upward(PACKAGES[::-1])  # control: the test sees an arrow that points the other way
    list(TopologicalSorter({module: ours(module) for module in MODULES}).static_order())
    with pytest.raises(CycleError):  # control
        list(TopologicalSorter({module: ours(module) | {"bench.bench"} for module in MODULES}).static_order())


def lines(*patterns: str) -> int:
    """Lines of all files of the checkout that match."""
    return sum(len(path.read_text().splitlines()) for pattern in patterns for path in sorted(ROOT.glob(pattern)))


@pytest.mark.parametrize(
    ("patterns", "most"),
    [
        *((["src/**/*.py"], 10_000), (["tests/**/*.py"], 12_000), (["README.md"], 110)),
        *((["src/**/*.c", "src/**/*.cpp"], 0), (["src/aiayn/paper/*.py"], 1_300), (["src/aiayn/bench/*.py"], 600)),
        (["src/aiayn/report/*.py", "src/aiayn/report/templates/*"], 1_000),
        (["src/aiayn/cli.py", "src/aiayn/manual.py"], 300),
    ],
    ids=str,
)
def test_the_house_stays_within_its_caps(patterns: list[str], most: int) -> None:
    assert lines(*patterns) <= most


def test_no_module_is_longer_than_350_lines() -> None:
    lengths = {module: lines(str(path.relative_to(ROOT))) for module, path in MODULES.items()}
    assert {module: length for module, length in lengths.items() if length > 350} == {}


def test_kept_results_have_at_most_10_megabytes_and_three_scripts() -> None:
    files = [path for path in ROOT.glob("experiments/results/**/*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 10_000_000
    assert {path.name for path in files if path.suffix == ".py"} <= {"keep.py", "quoted.py", "criteria.py"}


def test_the_walk_from_a_row_to_the_table_has_at_most_18_files() -> None:
    text = (ROOT / "docs/developing.md").read_text()
    walk = text.partition("## From a configuration to a cell of the table")[2].partition("\n## ")[0]
    steps = re.findall(r"^\| (\d+) \| `([\w/.]+)` \|", walk, flags=re.MULTILINE)
    assert [int(number) for number, _ in steps] == [*range(1, len(steps) + 1)]
    assert 9 < len(steps) <= 18
    for _, file in steps:
        assert (ROOT / file).exists() or (SOURCE / file).exists(), file


def test_prose_has_at_most_20_000_words() -> None:
    """Licences, printed tables and code apart."""
    pages = ("*.md", *(f"{top}/**/*.md" for top in ("docs", "experiments", "src", "tests")))
    files = [path for page in pages for path in ROOT.glob(page)]
    text = "\n".join(path.read_text() for path in files if path.name != "LICENSE.md")
    text = re.sub(r"```.*?```|^\|.*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert len(text.split()) <= 20_000


def test_each_library_has_its_rooms():
    for library, rooms in ROOMS.items():
        found = {m for m, path in MODULES.items() if any(name.split(".")[0] == library for name in imports(path))}
        assert found == rooms, library


def test_the_papers_modules_import_each_other_and_torch_alone():
    """Inside of functions, too."""

    def others(module: str) -> set[str]:
        names = {name for name in imports(MODULES[module]) if not name.startswith("aiayn.paper.")}
        return {name for name in names if name.partition(".")[0] not in {"torch"} | sys.stdlib_module_names}

    assert {name for module in MODULES if module.startswith("paper.") for name in others(module)} == set()
    assert others("data.update_plan")  # control


WRITES = {"write_text", "write_bytes", "writelines", "touch", "mkdir", "unlink", "rmdir", "rename", "save", "dump"}
WRITES |= {"symlink_to", "hardlink_to", "chmod", "tofile", "makedirs", "remove", "removedirs", "truncate", "memmap"}
SAVED_ELSEWHERE = {
    "checkpoint": {"torch.save"},  # into memory; its own, both through storage
    "callbacks": {"checkpoint.save"},  # through storage
    "export": {"ctranslate2_spec(model.float(), subwords).save"},  # into a folder that storage stages
    "baselines": {"tempfile"},  # CTranslate2 reads its weights from files
    "wandb_workspace": {"workspace(run, entity).save"},  # on the server of W&B
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
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        modes = [str(word.value) for word in given if isinstance(word, ast.Constant)]
        if method == "open" and any(set(mode) & set("wax+") for mode in modes if mode.isascii()):
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


def test_every_module_has_a_test_file_in_its_folder():
    # The second has constants alone, which all tests use
    for module in MODULES.keys() - {"__main__", "core.exit_codes"}:
        path = TESTS.joinpath(*module.split("."))
        assert path.with_name(f"test_{path.name}.py").exists(), module


def test_no_parameter_is_called_how_found_own_each_or_most() -> None:
    trees = (ast.parse(path.read_text()) for path in (ROOT / "src").rglob("*.py"))
    names = {node.arg for tree in trees for node in ast.walk(tree) if isinstance(node, ast.arg)}
    assert names & {"how", "found", "own", "each", "most"} == set()
