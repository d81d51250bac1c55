"""Checkpoints that Lightning writes and reads through `runs.checkpoint`: hashed, verified, tensors only."""

from pathlib import Path
from typing import Any

from pytorch_lightning.plugins.io import CheckpointIO

from aiayn.runs import checkpoint as verified


class VerifiedCheckpointIO(CheckpointIO):
    """Every checkpoint of a Trainer through `checkpoint`: a SHA-256 beside each file, tensors and plain values only."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Writes the checkpoint and its hash. StorageError for weights that are not finite."""
        verified.save(checkpoint, Path(path))

    def load_checkpoint(self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = True) -> Any:
        """The checkpoint's dictionary, on the CPU. StorageError when it is damaged or not one of ours."""
        return verified.load(Path(path), map_location)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes the file and its hash; a missing one is no error."""
        verified.remove(Path(path))
