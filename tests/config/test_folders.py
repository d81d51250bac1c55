"""Folders: equal result-affecting keys, equal folder; what makes figures incomparable makes another table."""

import hashlib
from pathlib import Path

from aiayn.config import folders
from aiayn.config.compose import compose_row


def folder_of(*words: str) -> str:
    return str(folders.run_folder(compose_row("experiment=a_h1", *words)))


def test_a_run_with_values_of_its_own_gets_its_own_folder():
    assert folder_of() == "runs/tiny-mini/a_h1/seed1"
    assert folder_of("model.dropout=0.1") == folder_of("training.checkpoint_every=7") == folder_of()
    assert folder_of("seed=2") == "runs/tiny-mini/a_h1/seed2"
    own = {folder_of(change) for change in ("model.dropout=0.3", "training.warmup_steps=800")}
    assert len(own) == 2
    assert all("/a_h1+" in folder for folder in own)


def test_a_run_is_named_with_what_it_changes_in_its_row():
    plain = compose_row("experiment=a_h1", "seed=3", "training.checkpoint_every=7")
    assert folders.name(plain) == "a_h1 seed 3"
    varied = compose_row(
        "experiment=c_n2", "model.num_heads=2", "model.d_ff=1024", "scale.width=0.5", "scale.name=half"
    )
    hashed = folders.run_folder(varied).parent.name
    assert folders.name(varied) == f"{hashed} (model.d_ff=512, model.num_heads=2) seed 1"


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
    assert folders.prepared_folder(compose_row(*whole)) == Path("p/tiny")
    chosen = (*whole, "scale.max_words=15", "scale.max_train_words=5", "scale.pairs=9000", "tokenizer=paper")
    assert folders.prepared_folder(compose_row(*chosen)) == Path("p/tiny.paper-15words-5trainwords-9000pairs")


def test_a_variation_s_hash_is_of_its_differences_by_key():
    varied = compose_row("scale=paper", "model.num_layers=2", "model.d_ff=1024")
    sorted_keys = b'{"model.d_ff": 1024, "model.num_layers": 2}'
    assert folders.variation(varied) == f"+{hashlib.sha256(sorted_keys).hexdigest()[:8]}"
    assert list(folders.differences(varied)) == ["model.num_layers", "model.d_ff"]  # control: the schema's order
