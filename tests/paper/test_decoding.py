"""One token at a time against all at once, whatever hypotheses go on from whatever past."""

import model_properties
import pytest
import torch
from models import MODELS, Made, batch, transformer
from torch import Tensor

from aiayn.paper.decoding import TransformerDecoder


@MODELS
def test_one_token_at_a_time_equals_all_at_once(made: Made) -> None:
    model = made()
    model_properties.assert_one_token_at_a_time_equals_all_at_once(model, TransformerDecoder(model))


@MODELS
def test_reordered_hypotheses_go_on_from_their_own_past(made: Made) -> None:
    model = made()

    def logits_after(source: list[int], past: list[int]) -> Tensor:
        given = batch([source], [past])
        given.target_input[:] = torch.tensor(past)
        return model(given)[-1]

    model_properties.assert_hypotheses_go_on_from_their_own_past(
        TransformerDecoder(model).start, logits_after, lambda decoding: decoding.layers[0].memory[0].shape[0]
    )


def test_reordering_matters() -> None:  # control of the test above
    model_properties.assert_reordering_matters(TransformerDecoder(transformer()).start)


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(AssertionError, match="eval"):
        TransformerDecoder(transformer().train())
