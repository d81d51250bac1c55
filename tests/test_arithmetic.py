"""The arithmetic of training and of dev, row by row: nats that stay what they are, whatever computes them."""

from pathlib import Path

import pytest

from aiayn.config import compose, folders
from aiayn.core import storage
from aiayn.runs import records
from aiayn.training import train

# In float64, seed 1, at smoke: computed by commit a33561a, whose attention, loss and decoder were other code
NATS = {
    "base": 11264.904989429757,
    "b_dk16": 11245.417024325312,
    "c_n2": 11150.300278234728,
    "d_dropout00": 11388.027691042604,
    "e_learned_positions": 11466.003020654516,
    "f_relative_positions": 11264.542045582863,
    "s_rnn_attention": 17734.828508921364,
}


@pytest.mark.slow
@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("row", NATS)
def test_dev_nats_in_float64_are_those_of_a33561a(row: str, tmp_path: Path) -> None:
    words = (f"experiment={row}", "scale=smoke", "hardware.precision=64-true", "wandb.mode=disabled")
    run = compose.compose_row(*words, f"output={tmp_path}", f"prepared={tmp_path}")
    folder = folders.run_folder(run)
    storage.write_text(folder / "config.yaml", compose.to_yaml(run))
    train.train(run, folder)
    assert records.read_result(folder / "result.json")["dev"]["nats"] == pytest.approx(NATS[row], rel=1e-9)
