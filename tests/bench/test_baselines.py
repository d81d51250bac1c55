"""The baselines compute what we compute: the comparison is of speed alone."""

import numpy as np
import pytest
import torch

from aiayn.bench import baselines, cases
from aiayn.config import compose, schema
from aiayn.data.update_plan import gather
from aiayn.runs.models import build
from aiayn.training.lightning_data import Update

SIZES = ["model.d_model=38", "model.d_ff=43", "model.num_heads=2", "model.num_layers=2", "data.vocab_size=97"]
SIZES += ["scale=paper", "bench.mean_length=7"]
RUN = compose.compose_row(*SIZES, "model.d_k=19", "model.d_v=19")
BASELINES = {"torch.nn": baselines.TorchTransformer, "Marian": baselines.MarianTransformer}


@pytest.mark.parametrize("name", ["torch.nn", "Marian"])
def test_a_baseline_has_our_loss_and_our_gradient(name):
    if name == "Marian":
        pytest.importorskip("transformers", reason="needs the extra: pip install -e '.[bench]'")
    model = build(RUN, 97).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    batch = gather(cases.synthetic_pairs(RUN, 17), np.arange(17))
    assert (baselines.padded(batch)[0].source == 0).any()  # control: there is padding
    no_smoothing = schema.vary(RUN, training={"label_smoothing": 0.0})
    ours, theirs, control = (
        cases.Trainer(one, [Update(0, 0, len(batch.target), [batch])], "fp32", run)
        for one, run in ((model, RUN), (BASELINES[name](model).eval(), RUN), (model, no_smoothing))
    )
    loss = float(ours.backward(0))
    assert float(theirs.backward(0)) == pytest.approx(loss, rel=1e-5)
    assert float(control.backward(0)) != pytest.approx(loss, rel=5e-4)  # the smoothing counts
    gradient, expected = theirs.model.embedding.weight.grad, ours.model.embedding.weight.grad
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("words", [["model.d_k=20", "model.d_v=19"], ["experiment=e_learned_positions"]])
def test_a_row_that_a_baseline_cannot_hold_is_refused(words):
    row = compose.compose_row(*SIZES, "model.d_k=19", "model.d_v=19", *words)
    with pytest.raises(schema.ConfigError, match="cannot hold this row"):
        baselines.sizes(build(row, 97))
