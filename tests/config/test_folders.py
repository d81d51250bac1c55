"""Folders: equal result-affecting keys, equal folder; what makes figures incomparable makes another table."""

import hashlib
from functools import partial
from pathlib import Path

from aiayn.config import folders
from aiayn.config.compose import compose_row


def folder_of(experiment: str, *words: str) -> str:
    return str(folders.run_folder(compose_row(experiment, *words)))


def test_a_run_with_values_of_its_own_gets_its_own_folder():
    of = partial(folder_of, "experiment=a_h1")
    assert of() == of("model.dropout=0.1") == of("training.checkpoint_every=7") == "runs/tiny-mini/a_h1/seed1"
    assert of("seed=2") == "runs/tiny-mini/a_h1/seed2"
    own = {of(change) for change in ("model.dropout=0.3", "training.warmup_steps=800")}
    assert len(own) == 2
    assert all("/a_h1+" in folder for folder in own)


def test_a_run_is_named_with_what_it_changes_in_its_row():
    plain = compose_row("experiment=a_h1", "seed=3", "training.checkpoint_every=7")
    assert folders.name(plain) == "a_h1 seed 3"
    words = ("scale=paper", "model.num_layers=2", "model.d_ff=2000", "scale.width=0.5", "scale.name=half")
    of_sorted_keys = hashlib.sha256(b'{"model.d_ff": 1000, "model.num_layers": 2}').hexdigest()[:8]
    assert folder_of("experiment=base", *words) == f"runs/tiny-half/base+{of_sorted_keys}/seed1"
    in_the_schema_s_order = f"base+{of_sorted_keys} (model.num_layers=2, model.d_ff=1000) seed 1"
    assert folders.name(compose_row(*words)) == in_the_schema_s_order


def test_runs_in_another_precision_have_a_table_of_their_own():
    words = {"32-true": "tiny", "bf16-mixed": "tiny.bf16", "64-true": "tiny.fp64"}
    for precision, folder in words.items():
        run = compose_row(f"hardware.precision={precision}")
        assert str(folders.run_folder(run)) == f"runs/{folder}-mini/base/seed1"
        assert folders.variation(run) == ""
    gpu = compose_row("hardware=gpu", "data=wmt14_en_de", "scale=paper", "tokenizer=paper")
    assert folders.sweep_folder(gpu).name == "wmt14_en_de.paper.bf16-paper"
    assert folders.corpus_name(gpu) == "wmt14_en_de.paper"  # the text is prepared once


def test_each_selection_of_text_has_a_folder_of_its_own():
    whole = ("scale=paper", "prepared=p")
    assert folders.prepared_folder(compose_row(*whole)) == Path("p/tiny-2000subwords")
    chosen = (*whole, "scale.max_words=15", "scale.max_train_words=5", "scale.pairs=9000", "tokenizer=paper")
    assert folders.prepared_folder(compose_row(*chosen)) == Path("p/tiny.paper-15words-5trainwords-9000pairs")
