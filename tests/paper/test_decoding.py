"""One token at a time against all at once, whatever hypotheses go on from whatever past; of the LSTMs, too."""

import torch
from models import BOS, EOS, MODELS, SOURCES, VOCAB, Made, batch, pack
from torch import Tensor, nn

from aiayn.alternatives.recurrent import RecurrentDecoding, RecurrentModel
from aiayn.paper.decoding import TransformerDecoding


def decoding_of(model: nn.Module) -> RecurrentDecoding | TransformerDecoding:
    return (RecurrentDecoding if isinstance(model, RecurrentModel) else TransformerDecoding)(model, *pack(SOURCES))


@MODELS
def test_one_token_at_a_time_equals_all_at_once(made: Made) -> None:
    """Beyond `max_length`, too."""
    model, target = made(), [[8, 4, 6, 10, 9, 5, 7, 11, EOS]] * len(SOURCES)
    expected = model(batch(SOURCES, target)).unflatten(0, (len(SOURCES), -1))
    decoding = decoding_of(model)
    for t, token in enumerate([BOS, *target[0][:-1]]):
        logits = decoding.step(torch.full((len(SOURCES), 1), token))
        torch.testing.assert_close(logits[:, 0], expected[:, t])


@MODELS
def test_reordered_hypotheses_go_on_from_their_own_past(made: Made) -> None:
    """Whatever sentences are kept and however hypotheses are reordered."""
    model = made()

    def logits_after(source: list[int], past: list[int]) -> Tensor:
        """The last, without a decoder."""
        given = batch([source], [past])
        given.target_input[:] = torch.tensor(past)
        return model(given)[-1]

    decoding = decoding_of(model)
    sources, pasts = SOURCES, [[[]] for _ in SOURCES]
    random, differing = torch.Generator().manual_seed(3), 0
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
            expected = torch.stack([logits_after(source, past) for past in hypotheses])
            torch.testing.assert_close(row, expected)
            differing += not torch.allclose(expected[0], expected[-1], 1e-7, 1e-7)
        decoding.keep(torch.tensor(kept))
        parents = torch.randint(old, (len(kept), width), generator=random)
        decoding.reorder(parents)
        sources = [sources[row] for row in kept]
        pasts = [[pasts[row][int(parent)] for parent in line] for row, line in zip(kept, parents, strict=True)]
        memory = decoding.memory if isinstance(model, RecurrentModel) else decoding.layers[0].memory[0]
        assert len(memory) == len(kept)  # once for all hypotheses
    assert differing  # control: another past gives other logits
