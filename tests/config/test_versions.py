"""Known-bad versions are refused before they are imported; what we ask for is pinned."""

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from aiayn.config import versions

ROOT = Path(__file__).parents[2]
PINNED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ASKED = [Requirement(line) for line in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]]


@pytest.mark.parametrize(
    ("name", "version"),
    [
        *(("pytorch-lightning", version) for version in ("2.6.2", "2.6.3", "2.6.5", "2.5.0")),
        *(("hydra-core", "1.3.5"), ("torch", "2.9.1"), ("torch", "2.9.1+cpu"), ("sentencepiece", "0.2.1")),
        *(("wandb", "0.29.9"), ("sentencepiece", "0.1.99")),
    ],
)
def test_a_known_bad_version_is_refused_by_name_with_a_remedy(monkeypatch, name, version):
    installed = metadata.version
    monkeypatch.setattr(metadata, "version", lambda asked: version if asked == name else installed(asked))
    with pytest.raises(ValueError, match=f"^{name} {re.escape(version)} .*: pip install '{name}") as refused:
        versions.refuse()
    # What is to be typed replaces that version, in a checkout and elsewhere
    assert not Requirement(str(refused.value).split("'")[1]).specifier.contains(version)


def test_every_extra_that_a_remedy_names_exists():
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    remedies = {*re.findall(r"pip install 'aiayn\[(\w+)\]'", source)}
    assert remedies == {"launchers", "export", "dashboard"} <= PROJECT["optional-dependencies"].keys()
    assert "pip install -" not in source  # as `-e .`, which needs a checkout


def test_installed_and_missing_packages_are_not_refused(monkeypatch):  # control
    versions.refuse()

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    versions.refuse()


def test_it_is_refused_before_it_is_imported():
    code = (
        "import sys\nfrom importlib import metadata\nfound = metadata.version\n"
        "metadata.version = lambda name: '2.6.2' if name == 'pytorch-lightning' else found(name)\n"
        "from aiayn import cli\nsys.argv = ['aiayn', 'train']\n"
        "try: cli.main()\n"
        "except SystemExit as exit: print(exit.code, {'torch', 'pytorch_lightning', 'wandb', 'hydra._internal'} & "
        "(set(sys.modules) - {'hydra._internal'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2 set()\n"
    assert done.stderr == (
        "aiayn: pytorch-lightning 2.6.2 is unsafe or untested here: pip install 'pytorch-lightning<3,>=2.6.6'\n"
    )


def test_everything_that_we_ask_for_is_pinned_within_what_we_ask():
    pins = {name.lower().replace("_", "-"): version for name, version in PINNED.items()}
    for asked in ASKED:
        assert asked.specifier.contains(pins[asked.name.lower()]), asked
