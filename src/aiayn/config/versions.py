"""The installed versions that this program refuses to run with, asked before any of them is imported."""

from contextlib import suppress
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from aiayn.config.schema import ConfigError

REFUSED = (
    ("pytorch-lightning", ">=2.6.2,<=2.6.3", "is malicious"),
    ("pytorch-lightning", "<2.6.6", "can be made to execute code"),
    ("hydra-core", "<1.3.6", "is known to be unsafe"),
    ("torch", "<2.10", "is known to be unsafe"),
    ("sentencepiece", "<=0.2.1", "is known to be unsafe"),
    ("wandb", "<0.30", "is known to be unsafe"),
)


def refuse() -> None:
    """ConfigError names an installed package of a version that is known to be bad, and the remedy."""
    for name, bad, why in REFUSED:
        with suppress(metadata.PackageNotFoundError):
            installed = metadata.version(name)
            if SpecifierSet(bad, prereleases=True).contains(installed):
                asked = [line for line in metadata.requires("aiayn") or () if Requirement(line).name == name]
                raise ConfigError(f"{name} {installed} {why}: pip install '{asked[0]}'")
