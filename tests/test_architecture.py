"""The shape of the house: imports point one way, and each library has its rooms."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "aiayn"

# In dependency order: a module imports only from earlier ones.
MODULES = (
    *("config", "storage", "corpus", "tokenizer", "dataset", "batching", "linear"),
    *("attention", "transformer", "loss", "schedule", "beam_search", "metrics"),
    *("checkpoint", "lightning_data", "lightning_model", "callbacks", "results", "report"),
    *(
        "prepare",
        "jobs",
        "evaluate",
        "train",
        "translate",
        "table",
        "export",
        "rivals",
        "contest",
        "bench",
        "launcher",
        "cli",
        "__main__",
    ),
)
THE_PAPER = ("linear", "attention", "transformer", "loss", "schedule", "beam_search", "metrics")
ROOMS = {
    "wandb": {"train"},
    "hydra": {"config", "cli"},
    "omegaconf": {"config", "cli"},
    "pytorch_lightning": {"checkpoint", "lightning_data", "lightning_model", "callbacks", "train"},
    "sacrebleu": {"metrics"},
    "sentencepiece": {"tokenizer"},
    "ctranslate2": {"export", "rivals"},
    "transformers": {"export"},
    "safetensors": {"export"},
}


def imports(module: str) -> set[str]:
    """Every module that a file imports anywhere, `aiayn.x` as it is."""
    found = set()
    for node in ast.walk(ast.parse((SOURCE / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "aiayn":
            found |= {f"aiayn.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def upward(order: tuple[str, ...]) -> list[str]:
    return [
        f"{module} imports {name}"
        for place, module in enumerate(order)
        for name in (found.removeprefix("aiayn.") for found in imports(module) if found.startswith("aiayn."))
        if name not in order[:place]
    ]


def test_every_module_is_in_the_order():
    assert {path.stem for path in SOURCE.glob("*.py")} - {"__init__"} == set(MODULES)


def test_imports_point_one_way():
    assert upward(MODULES) == []
    assert upward(tuple(reversed(MODULES)))  # control: the test sees an arrow that points the other way


def test_each_library_has_its_rooms():
    for library, rooms in ROOMS.items():
        found = {m for m in MODULES if any(name.split(".")[0] == library for name in imports(m))}
        assert found == rooms, library


def test_the_papers_modules_know_no_framework():
    for module in THE_PAPER:
        assert not {"hydra", "omegaconf", "pytorch_lightning", "wandb", "aiayn.config"} & imports(module), module


def test_only_storage_opens_files_for_writing():
    writers = ("write_text(", "write_bytes(", 'open("w', 'open("a', "torch.save(", "np.save(", "json.dump(")
    for path in SOURCE.glob("*.py"):
        text = path.read_text().replace("storage.write_text(", "").replace("storage.write_bytes(", "")
        for writer in writers:
            allowed = path.stem == "storage" or (path.stem, writer) in {
                ("checkpoint", "torch.save("),  # into memory, then through storage
                ("dataset", "np.save("),  # into storage's file
                ("jobs", 'open("a'),  # a worker's log, written by the worker
            }
            assert allowed or writer not in text, f"{path.name}: {writer}"


def test_every_module_has_a_test_file():
    tests = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    assert set(MODULES) - {"__main__"} <= tests
