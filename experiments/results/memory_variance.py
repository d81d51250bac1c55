"""Prints, for each checkpoint of a run folder, how far the encoder's tokens differ within a sentence.

    python experiments/results/memory_variance.py runs/tiny-mini/big/seed1

The variance among the tokens of a sentence, as a share of the mean square of an encoder layer's output, over the first
400 dev sentences: 0 when all tokens of a sentence are alike, so that attention to them has nothing to choose from. Give
the command in the folder where the run was trained.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from aiayn.config import compose
from aiayn.data.prepare import prepare
from aiayn.data.update_plan import gather
from aiayn.evaluation.evaluate import build
from aiayn.paper.transformer import Transformer
from aiayn.runs import checkpoint

SENTENCES = 400


def share_within(x: Tensor, lengths: list[int]) -> float:
    """The variance within sentences of packed tokens (S, D), over their mean square."""
    centred = torch.cat([sentence - sentence.mean(0) for sentence in x.split(lengths)])
    return float(centred.square().mean() / x.square().mean())


def main(folder: Path) -> None:
    """One line for each checkpoint: its update, and the share after each layer of the encoder."""
    run = compose.read(folder / "config.yaml")
    dataset = prepare(run, lambda message: None)
    model = build(run, dataset.tokenizer.vocab_size).eval()
    assert isinstance(model, Transformer)
    shares: list[float] = []
    batch = gather(dataset.pairs("dev"), np.arange(SENTENCES))
    lengths = batch.source_offsets.diff().tolist()
    for layer in model.encoder:
        layer.register_forward_hook(lambda *of: shares.append(share_within(of[-1][: sum(lengths)].double(), lengths)))
    for path in reversed(checkpoint.newest(folder / "checkpoints", 1_000)):
        weights = checkpoint.load(path)["state_dict"]
        model.load_state_dict({name.removeprefix("transformer."): value for name, value in weights.items()})
        shares.clear()
        with torch.no_grad():
            model.hidden(batch)
        print(checkpoint.step_of(path), *(f"{share:.4f}" for share in shares))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
