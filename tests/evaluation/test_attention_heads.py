"""The weights that are drawn are those that the model attends with, for every layer and head."""

import numpy as np
import pytest
import torch
from models import PARTS, batch, transformer

from aiayn.evaluation.attention_heads import weights_of

ONE = batch([[5, 7, 11, 13, 3]], [[8, 9, 10, 3]])


def test_every_head_has_weights_and_each_row_sums_to_1() -> None:
    found = weights_of(transformer(), ONE)
    shapes = {kind: [of_layer.shape for of_layer in layers] for kind, layers in found.items()}
    assert shapes == {"encoder": [(3, 5, 5)] * 2, "decoder": [(3, 4, 4)] * 2, "cross": [(3, 4, 5)] * 2}
    assert all(np.allclose(of_layer.sum(-1), 1, atol=1e-5) for layers in found.values() for of_layer in layers)
    assert all((np.triu(of_layer, 1) == 0).all() for of_layer in found["decoder"])
    assert not (np.triu(found["encoder"][0], 1) == 0).all()  # control


@pytest.mark.parametrize("name", PARTS)
def test_weights_follow_the_scores_of_the_row(name: str) -> None:
    found, plain = weights_of(transformer(**PARTS[name]), ONE), weights_of(transformer(), ONE)
    assert np.allclose(found["encoder"][0].sum(-1), 1, atol=1e-5)
    same = np.allclose(found["encoder"][0], plain["encoder"][0])
    assert same == (PARTS[name].get("positions", "sinusoids") == "sinusoids" and "scores" not in PARTS[name])


def test_the_weights_are_those_that_made_the_output() -> None:
    """The last layer's attention to the encoder, put together by hand from the weights, is what that layer returned."""
    model = transformer()
    before = model(ONE)
    attention = model.get_submodule("decoder.1.memory_attention")
    seen: list[torch.Tensor] = []
    with attention.register_forward_hook(lambda module, inputs, output: seen.extend((*inputs[:2], output))):
        weights = torch.from_numpy(weights_of(model, ONE)["cross"][-1]).double()
    # Rows after the last token belong to no sentence
    memory, output = seen[1][:5], seen[2][:4]
    _, values = torch.split(attention.key_value(memory), [3 * 5, 3 * 7], -1)
    values = values.unflatten(-1, (3, 7)).transpose(0, 1)  # (H, M, V)
    for given, same in ((weights, True), (weights.flip(-1), False)):  # the other one is a control
        by_hand = attention.output((given @ values).transpose(0, 1).flatten(1))
        assert torch.allclose(by_hand, output, atol=1e-5) == same
    assert torch.equal(model(ONE), before)
    assert not any(module._forward_hooks for module in model.modules())
