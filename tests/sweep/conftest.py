"""What tests of sweeps share."""

import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture
def ray_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ray's files in a folder of their own, whose path is short enough for its sockets."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)  # else it writes one into the home
        yield
