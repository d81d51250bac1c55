"""One token at a time against all at once, whatever hypotheses go on from whatever past."""

import model_properties
import pytest
import torch
from models import (
    BOS,
    DECODERS,
    EOS,
    KINDS,
    PARTS,
    ROUNDING,
    SOURCES,
    batch,
    decoder,
    in_its_precision,
    pack,
    transformer,
)
from torch import Tensor

from aiayn.paper.fast.decoding import FastDecoder
from aiayn.paper.incremental_decoding import IncrementalDecoder

# And the paper's decoder with each part of the rows beyond Table 3
DECODERS_AND_PARTS = pytest.mark.parametrize("kind", [*KINDS, *PARTS])


@DECODERS_AND_PARTS
@pytest.mark.parametrize("positions", ["sinusoids", "learned"])
def test_one_token_at_a_time_equals_all_at_once(positions: str, kind: str) -> None:
    model = in_its_precision(transformer(**{"positions": positions, **PARTS.get(kind, {})}), kind)
    target = [[8, 4, 6, 10, 9, 5, 7, 11, EOS]] * len(SOURCES)  # beyond max_length, too
    expected = model(batch(SOURCES, target)).unflatten(0, (len(SOURCES), -1))
    decoding = decoder(model, kind).start(*pack(SOURCES))
    for t, token in enumerate([BOS, *target[0][:-1]]):
        logits = decoding.step(torch.full((len(SOURCES), 1), token))
        torch.testing.assert_close(logits[:, 0], expected[:, t], **ROUNDING.get(kind, {}))


@DECODERS_AND_PARTS
def test_reordered_hypotheses_of_kept_sentences_go_on_from_their_own_past(kind: str) -> None:
    model = in_its_precision(transformer(**PARTS.get(kind, {})), kind)

    def logits_after(source: list[int], past: list[int]) -> Tensor:
        given = batch([source], [past])
        given.target_input[:] = torch.tensor(past)
        return model(given)[-1]

    model_properties.assert_hypotheses_go_on_from_their_own_past(
        decoder(model, kind).start,
        logits_after,
        lambda decoding: decoding.layers[0].memory[0].shape[0],
        **ROUNDING.get(kind, {}),
    )


@DECODERS
def test_reordering_matters(kind: str) -> None:  # control of the test above
    model_properties.assert_reordering_matters(decoder(in_its_precision(transformer(), kind), kind).start)


def test_a_model_in_training_mode_is_refused() -> None:
    for kind in (IncrementalDecoder, FastDecoder):
        with pytest.raises(AssertionError, match="eval"):
            kind(transformer().train())


@DECODERS
def test_one_layout_serves_many_batches_and_keeps_nothing_of_them(kind: str) -> None:
    model = in_its_precision(transformer(), kind)
    one, steps = decoder(model, kind), []
    for _ in range(2):
        decoding = one.start(*pack(SOURCES))
        decoding.step(torch.full((len(SOURCES), 1), BOS))
        steps.append(decoding.step(torch.full((len(SOURCES), 1), 5)))
        one.start(*pack(SOURCES[1:])).step(torch.full((len(SOURCES) - 1, 1), 7))
    assert torch.equal(*steps)


def test_in_bf16_the_weights_are_cast_once_and_the_logits_stay_close() -> None:
    model, target = transformer().float(), [[8, 4, 6, EOS]] * len(SOURCES)
    expected = model(batch(SOURCES, target)).unflatten(0, (len(SOURCES), -1))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        decoding = FastDecoder(model).start(*pack(SOURCES))
        for t, token in enumerate([BOS, *target[0][:-1]]):
            logits = decoding.step(torch.full((len(SOURCES), 1), token))
            assert logits.dtype == torch.bfloat16  # control: this is not float32
            torch.testing.assert_close(logits[:, 0].float(), expected[:, t], atol=0.1, rtol=0.05)
