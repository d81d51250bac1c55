"""Lightning writes and reads its checkpoints verified: a hash beside each, and none that is not finite."""

from pathlib import Path

import pytest
import pytorch_lightning as lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from aiayn.core.storage import StorageError
from aiayn.runs import checkpoint
from aiayn.training.checkpoint_io import VerifiedCheckpointIO


class Regression(lightning.LightningModule):
    """The smallest model that Lightning trains."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.linear(batch).square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def trainer(folder: Path, steps: int) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        plugins=[VerifiedCheckpointIO()],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fit(folder: Path, steps: int, model: Regression, resumed: Path | None = None) -> lightning.Trainer:
    made = trainer(folder, steps)
    batches = DataLoader([torch.ones(5, 3)], batch_size=None)  # one an epoch: where a run resumes changes no batch
    made.fit(model, batches, ckpt_path=resumed)
    return made


pytestmark = pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")


def test_the_trainer_writes_a_hash_beside_its_checkpoint_and_goes_on_from_there(tmp_path: Path) -> None:
    path, model, straight = tmp_path / "step-000000002.ckpt", Regression(), Regression()
    straight.load_state_dict(model.state_dict())
    fit(tmp_path, 2, model).save_checkpoint(path)
    saved = model.linear.weight.clone()
    assert checkpoint.is_intact(path)
    assert {found.name for found in tmp_path.iterdir()} == {path.name, f"{path.name}.sha256"}
    resumed = Regression()
    assert fit(tmp_path, 6, resumed, path).global_step == 6
    fit(tmp_path, 6, straight)
    torch.testing.assert_close(resumed.linear.weight, straight.linear.weight, rtol=0, atol=0)
    assert not torch.equal(saved, straight.linear.weight)  # control: the steps after it change something


def test_the_trainer_refuses_a_checkpoint_whose_bytes_have_changed(tmp_path: Path) -> None:
    path, model = tmp_path / "step-000000002.ckpt", Regression()
    fit(tmp_path, 2, model).save_checkpoint(path)
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(StorageError, match=f"{path.name} is damaged"):
        fit(tmp_path, 6, model, path)


def test_weights_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    path, model = tmp_path / "step-000000002.ckpt", Regression()
    made = fit(tmp_path, 2, model)
    with torch.no_grad():
        model.linear.bias[1] = torch.inf
    with pytest.raises(StorageError, match=r"is not written: linear\.bias is not finite"):
        made.save_checkpoint(path)
    assert list(tmp_path.iterdir()) == []


def test_removing_a_checkpoint_removes_its_hash_and_again_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "step-000000002.ckpt"
    fit(tmp_path, 2, Regression()).save_checkpoint(path)
    for _ in range(2):
        VerifiedCheckpointIO().remove_checkpoint(path)
        assert list(tmp_path.iterdir()) == []
