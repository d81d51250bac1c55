"""Scores by their definition, whatever the number of queries."""

import torch

from aiayn.alternatives.scores import AdditiveScores


def test_additive_scores_have_a_vector_for_each_head() -> None:
    torch.manual_seed(3)
    scores = AdditiveScores(3, 5).double()
    queries, keys = torch.randn(2, 3, 7, 5).double(), torch.randn(2, 3, 11, 5).double()
    expected = torch.einsum("bhqmk,hk->bhqm", torch.tanh(queries[:, :, :, None] + keys[:, :, None]), scores.v)
    torch.testing.assert_close(scores(queries, keys), expected)
    torch.testing.assert_close(scores(queries[:, :, -1:], keys), expected[:, :, -1:])
    assert not torch.allclose(scores(queries.flip(1), keys.flip(1)).flip(1), expected)  # control: heads differ
