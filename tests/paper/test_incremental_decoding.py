"""One token at a time against all at once, whatever hypotheses go on from whatever past."""

import pytest
import torch
from models import (
    BOS,
    DECODERS,
    EOS,
    KINDS,
    PARTS,
    ROUNDING,
    SIZES,
    SOURCES,
    VOCAB,
    batch,
    decoder,
    in_its_precision,
    pack,
    transformer,
)

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
    decoding = decoder(model, kind).start(*pack(SOURCES))
    sources, pasts = SOURCES, [[[]] for _ in SOURCES]
    random = torch.Generator().manual_seed(3)
    for width, kept in ((3, [0, 1, 2]), (4, [2, 0]), (2, [0, 1]), (5, [1])):
        old = len(pasts[0])
        tokens = torch.randint(4, VOCAB, (len(sources), old), generator=random)
        pasts = [
            [[*past, int(token)] for past, token in zip(hypotheses, row, strict=True)]
            for hypotheses, row in zip(pasts, tokens, strict=True)
        ]
        logits = decoding.step(tokens)
        assert logits.shape == (len(sources), old, VOCAB)
        for source, hypotheses, row in zip(sources, pasts, logits, strict=True):
            for past, ours in zip(hypotheses, row, strict=True):
                given = batch([source], [past])
                given.target_input[:] = torch.tensor(past)
                torch.testing.assert_close(ours, model(given)[-1], **ROUNDING.get(kind, {}))
        decoding.keep(torch.tensor(kept))
        parents = torch.randint(old, (len(kept), width), generator=random)
        decoding.reorder(parents)
        sources = [sources[row] for row in kept]
        pasts = [[pasts[row][int(parent)] for parent in line] for row, line in zip(kept, parents, strict=True)]
        # The memory is kept once for all hypotheses
        assert decoding.layers[0].memory[0].shape[:2] == (len(kept), SIZES["num_heads"])


@DECODERS
def test_reordering_matters(kind: str) -> None:
    # Control of the test above: the wrong past gives other logits
    model = in_its_precision(transformer(), kind)
    results = []
    for parents in ([[0, 1]], [[1, 0]]):
        decoding = decoder(model, kind).start(*pack(SOURCES[:1]))
        decoding.reorder(torch.tensor([[0, 0]]))
        decoding.step(torch.tensor([[5, 6]]))
        decoding.reorder(torch.tensor(parents))
        results.append(decoding.step(torch.tensor([[7, 7]])))
    assert not torch.allclose(results[0], results[1])
    torch.testing.assert_close(results[0], results[1].flip(1))


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
