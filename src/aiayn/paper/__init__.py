"""Sections 3 to 6.1 of the paper in plain torch: the Transformer, its loss, its learning rate, its beam search.

Nothing here knows Hydra, Lightning, files or tokenizers.
"""
