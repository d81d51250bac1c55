"""The configuration: every row at every scale, the paper's values, refusals in one line."""

import dataclasses
from fractions import Fraction

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob
from omegaconf import OmegaConf

from aiayn.config import compose, folders, schema
from aiayn.config.compose import compose_row
from aiayn.config.schema import ConfigError

SCALES = ("paper", "small", "mini", "lengths", "smoke")


def test_the_base_row_has_the_papers_values():
    base = compose.rows()["base"]
    sizes = (6, 512, 2048, 8, 64, 64, 0.1)  # N, d_model, d_ff, h, d_k, d_v, P_drop
    assert tuple(vars(base.model).values()) == (*sizes, "transformer", "sinusoids", "scaled", "connections")
    training = base.training
    assert (training.max_steps, training.warmup_steps, training.tokens_per_update) == (100_000, 4_000, 25_000)
    assert (training.adam_beta1, training.adam_beta2, training.adam_epsilon) == (0.9, 0.98, 1e-9)
    assert (training.label_smoothing, training.learning_rate_factor) == (0.1, 1.0)
    assert (base.decoding.beam_size, base.decoding.length_penalty, base.decoding.max_extra) == (4, 0.6, 50)
    assert (base.paper.ppl, base.paper.bleu, base.paper.params_millions) == (4.92, 25.8, 65)


# Table 3 as printed: what differs from base, PPL, BLEU, parameters.
TABLE_3 = {
    "base": ({}, 4.92, 25.8, 65),
    "a_h1": ({"num_heads": 1, "d_k": 512, "d_v": 512}, 5.29, 24.9, None),
    "a_h4": ({"num_heads": 4, "d_k": 128, "d_v": 128}, 5.00, 25.5, None),
    "a_h16": ({"num_heads": 16, "d_k": 32, "d_v": 32}, 4.91, 25.8, None),
    "a_h32": ({"num_heads": 32, "d_k": 16, "d_v": 16}, 5.01, 25.4, None),
    "b_dk16": ({"d_k": 16}, 5.16, 25.1, 58),
    "b_dk32": ({"d_k": 32}, 5.01, 25.4, 60),
    "c_n2": ({"num_layers": 2}, 6.11, 23.7, 36),
    "c_n4": ({"num_layers": 4}, 5.19, 25.3, 50),
    "c_n8": ({"num_layers": 8}, 4.88, 25.5, 80),
    "c_dmodel256": ({"d_model": 256, "d_k": 32, "d_v": 32}, 5.75, 24.5, 28),
    "c_dmodel1024": ({"d_model": 1024, "d_k": 128, "d_v": 128}, 4.66, 26.0, 168),
    "c_dff1024": ({"d_ff": 1024}, 5.12, 25.4, 53),
    "c_dff4096": ({"d_ff": 4096}, 4.75, 26.2, 90),
    "d_dropout00": ({"dropout": 0.0}, 5.77, 24.6, None),
    "d_dropout02": ({"dropout": 0.2}, 4.95, 25.5, None),
    "d_smoothing00": ({"label_smoothing": 0.0}, 4.67, 25.3, None),
    "d_smoothing02": ({"label_smoothing": 0.2}, 5.47, 25.7, None),
    "e_learned_positions": ({"positions": "learned"}, 4.92, 25.7, None),
    "big": (
        # The checkpoints are section 6.1's, for Table 2; dev is measured as often as in other rows
        {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "dropout": 0.3}
        | {"max_steps": 300_000, "dev_every": 45_000, "keep_checkpoints": 20},
        *(4.33, 26.4, 213),
    ),
}


# Base as it is trained at each scale, reckoned by hand from Table 3 and the factors of conf/scale: N, d_model, d_ff,
# d_k, updates, warm-up, tokens of an update, updates between checkpoints, factor of Eq. 3
BASE = {
    "paper": (6, 512, 2048, 64, 100_000, 4_000, 25_000, 5_000, 1.0),
    "small": (3, 128, 512, 64, 10_000, 1200, 800, 500, 0.5),
    "mini": (3, 128, 512, 16, 2_240, 600, 400, 112, 0.4),
    "lengths": (3, 128, 512, 16, 4_000, 800, 800, 200, 0.5),
    "smoke": (3, 32, 128, 4, 4, 4, 275, 1, 1.0),
}
SCALED_BY = {
    "layers": ("num_layers",),
    "width": ("d_model", "d_ff"),
    "head_width": ("d_k", "d_v"),
    "steps": ("max_steps", "dev_every", "checkpoint_every"),
    "warmup": ("warmup_steps",),
    "batch": ("tokens_per_update",),
    "learning_rate": (),
}


@pytest.mark.parametrize("scale", [pytest.param(name, marks=[pytest.mark.slow][name == "mini" :]) for name in SCALES])
def test_every_row_is_the_papers_times_the_scales_factors(scale):
    base = dataclasses.asdict(compose_row("scale=paper"))
    factors = {key: Fraction(str(getattr(compose_row(f"scale={scale}").scale, key))) for key in SCALED_BY}
    assert list(compose.rows()) == list(TABLE_3) == list(schema.ROWS)
    for name, (changes, *papers) in TABLE_3.items():
        run = compose_row(f"experiment={name}", f"scale={scale}")
        expected = {**base["model"], **base["training"], **changes}
        for factor, keys in SCALED_BY.items():
            for key in keys:  # of exact fractions, ties to the even one
                expected[key] = max(1, round(expected[key] * factors[factor]))
        expected["learning_rate_factor"] = float(factors["learning_rate"])
        assert {**dataclasses.asdict(run.model), **dataclasses.asdict(run.training)} == expected, name
        assert [run.paper.ppl, run.paper.bleu, run.paper.params_millions] == papers, name
        assert folders.variation(run) == "", name
        # What reads a row without composing it, for a table or a plan, has the same
        assert compose.row(name, compose_row(f"scale={scale}")) == run


@pytest.mark.parametrize("scale", SCALES)
def test_base_has_the_sizes_that_are_written_here(scale):
    run = compose_row(f"scale={scale}")
    model, training = run.model, run.training
    sizes = (model.num_layers, model.d_model, model.d_ff, model.d_k, training.max_steps, training.warmup_steps)
    times = (training.tokens_per_update, training.checkpoint_every, training.learning_rate_factor)
    assert (*sizes, *times) == BASE[scale]
    assert (model.d_v, model.num_heads, model.dropout, training.adam_beta2) == (model.d_k, 8, 0.1, 0.98)


def rows_of(glob: str) -> list[str]:
    """The rows that Hydra itself finds by a pattern of a sweep."""
    (override,) = OverridesParser.create().parse_overrides([f"experiment={glob}"])
    found = override.value()
    assert isinstance(found, Glob)
    return found.filter([*schema.ROWS, *schema.BEYOND])


def test_experiments_has_the_rows_of_every_sweep_and_table():
    """The one test of row names: the files of `experiments/` own them, the schema has the paper's order."""
    assert set(compose.read_folder("experiments")) == {*schema.ROWS, *schema.BEYOND}
    sweeps = compose.read_folder("sweeps")
    assert set(sweeps) == {"table3", "beyond", "seeds", "lengths"}
    asked = {name: sweep["hydra"]["sweeper"]["params"]["experiment"] for name, sweep in sweeps.items()}
    assert rows_of(asked["table3"]) == [*schema.ROWS]
    assert rows_of(asked["beyond"]) == [*schema.BEYOND]
    assert {*asked["lengths"].split(","), asked["seeds"]} <= {*schema.ROWS, *schema.BEYOND}
    assert rows_of("glob(*)") == [*schema.ROWS, *schema.BEYOND]  # control


def test_a_vocabulary_asked_for_comes_before_the_scales_own():
    own = compose_row("scale=small").data.vocab_size
    assert own != compose_row("scale=paper").data.vocab_size
    assert compose_row("scale=small", "data=wmt14_en_de").data.vocab_size == own
    assert compose_row("scale=small", "data=wmt14_en_de", "data.vocab_size=8009").data.vocab_size == 8009


def test_a_config_file_gives_the_run_back_or_is_damaged(tmp_path):
    run = compose_row("experiment=big", "seed=7")
    path = tmp_path / "config.yaml"
    path.write_text(compose.to_yaml(run))
    assert compose.read(path) == run
    path.write_text(compose.to_yaml(run).replace("  gpus: ", "  cards: "))  # of another version's `plan`
    assert compose.read(path) == run
    path.write_text(compose.to_yaml(run).replace("  d_k: ", "  d_q: "))
    with pytest.raises(ConfigError, match=r"config\.yaml is damaged: .*d_q"):
        compose.read(path)


# What is beyond Table 3, what each row of it differs in from base, and its published BLEU.
ONE_HEAD = {"num_heads": 1, "d_k": 512, "d_v": 512}
RECURRENT = {"positions": "none", "scores": "dot", "residual": "none", "num_layers": 4, "dropout": 0.2}
RECURRENT |= dict.fromkeys(("d_ff", "num_heads", "d_k", "d_v"), 0)
BEYOND = {
    "f_no_positions": ({"positions": "none"}, 12.5),
    "f_relative_positions": ({"positions": "relative"}, 25.8),
    "f_no_residual": ({"residual": "none"}, None),
    "f_no_residual_positions": ({"residual": "positions"}, None),
    "f_unscaled": ({"scores": "dot", **ONE_HEAD}, 18.22),
    "f_additive": ({"scores": "additive", **ONE_HEAD}, 22.1),
    "s_rnn": ({"kind": "rnn", **RECURRENT}, 9.98),
    "s_rnn_attention": ({"kind": "rnn_attention", **RECURRENT}, 22.03),
}


def test_each_row_beyond_table_3_differs_from_base_in_its_part():
    base, *rows = compose.rows("paper", ("base", *schema.BEYOND)).values()
    assert base == compose.rows()["base"]
    assert [row.experiment for row in rows] == list(BEYOND) == list(schema.BEYOND)
    for row in rows:
        changes, bleu = BEYOND[row.experiment]
        assert dataclasses.asdict(row.model) == {**dataclasses.asdict(base.model), **changes}
        assert (row.training, row.decoding, row.fidelity) == (base.training, base.decoding, base.fidelity)
        assert (row.paper, row.published.bleu) == (schema.Paper(), bleu)
        assert row.published.where
        assert not row.model.in_table3
    assert all(row.model.in_table3 and row.published == schema.Published() for row in compose.rows().values())


def test_no_value_stands_twice_in_conf_and_experiments():
    base = OmegaConf.create(compose.read_folder("conf")["config"])
    for name, row in compose.read_folder("experiments").items():
        for section in ("model", "training"):
            for key, value in row.get(section, {}).items():
                assert base[section][key] != value, f"{name} repeats {section}.{key}"


OWN_FILES = ["data.target_language=de", *(f"{key}=mine.{key}" for key in schema.PATHS)]


@pytest.mark.parametrize("hardware", ["cpu", "gpu"])
@pytest.mark.parametrize("data", ["tiny", "bible", "files", "wmt14_en_de", "wmt14_en_fr"])
@pytest.mark.parametrize("scale", SCALES)
def test_every_scale_composes_with_every_corpus_and_hardware(scale, data, hardware):
    words = (f"scale={scale}", f"data={data}", f"hardware={hardware}", *(OWN_FILES if data == "files" else ()))
    for fidelity, lstms in (("paper", True), ("released_code", False)):
        like = compose_row(*words, f"fidelity={fidelity}")
        names = tuple(name for name in (*schema.ROWS, *schema.BEYOND) if lstms or not name.startswith("s_"))
        assert tuple(compose.row(name, like).experiment for name in names) == names
    # Control: a sentence that no update can hold is refused
    with pytest.raises(ConfigError, match="tokens_per_update"):
        compose_row(*words, "data.max_length=90000", "hardware.tokens_per_micro_batch=90000")
