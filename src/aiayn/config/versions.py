"""The installed versions that this program refuses to run with, asked before any of them is imported."""

from contextlib import suppress
from importlib import metadata

from packaging.requirements import Requirement

from aiayn.config.schema import ConfigError


def refuse() -> None:
    """ConfigError names an installed package of a version outside our own bounds, some of which bar unsafe releases."""
    for asked in map(Requirement, metadata.requires("aiayn") or ()):
        with suppress(metadata.PackageNotFoundError):
            installed = metadata.version(asked.name)
            if not asked.marker and not asked.specifier.contains(installed, prereleases=True):
                raise ConfigError(f"{asked.name} {installed} is unsafe or untested here: pip install '{asked}'")
