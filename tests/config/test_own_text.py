"""Text of one's own: what the names of its files say, and the commands that make two files of one."""

import gzip
import json
import subprocess

import pytest

from aiayn.config import checks, compose, schema


def own(*words: str, source: str = "a", target: str = "b") -> schema.Data:
    files = (f"{key}={source if 'source' in key else target}" for key in schema.PATHS)
    return compose.compose_row("data=files", *files, *words).data


@pytest.mark.parametrize(
    ("source", "target", "languages"),
    [
        *(("text/train.en", "text/train.de", ("en", "de")), ("a.fr.xz", "a.zh-CN.gz", ("fr", "zh-CN"))),
        *(("lines", "a.pt_BR.bz2", ("und", "pt_BR")), ("a.src", "a.cs.tok.txt.GZ", ("und", "cs"))),
        *(("en", target, None) for target in ("train", "train.txt", "train.gz", "train.tgt.xz", "a.de/train")),
    ],
)
def test_files_are_of_the_languages_that_their_names_end_with(source, target, languages):
    given = own("data.source_language=is", "data.target_language=fi", source=source, target=target)
    assert (given.source_language, given.target_language) == ("is", "fi")
    if languages is None:
        with pytest.raises(schema.ConfigError, match=r"data\.target_language has no value: give"):
            own(source=source, target=target)
    else:
        found = own(source=source, target=target)
        assert (found.source_language, found.target_language) == languages


def test_a_prefix_stands_for_both_files_of_its_split():
    words = ["data=files", "data.train=a/t", "data.dev=d", "data.test=e.1", "data.target_language=fi"]
    data = compose.compose_row(*words, "data.source_language=is", "data.dev_source=d.is").data
    files = {"a/t.is", "a/t.fi", "d.is", "d.fi", "e.1.is", "e.1.fi"}
    assert {getattr(data, key.removeprefix("data.")) for key in schema.PATHS} == files
    assert (data.train_target, data.dev_source, data.test_source) == ("a/t.fi", "d.is", "e.1.is")
    with pytest.raises(schema.ConfigError, match=r"data\.dev_source=other: data\.dev=d means d\.is; give only one"):
        compose.compose_row(*words, "data.source_language=is", "data.dev_source=other")
    with pytest.raises(schema.ConfigError, match=r"data\.dev_source=d\.fi: ends in the other side's language; swap"):
        compose.compose_row(*words, "data.source_language=is", "data.dev_source=d.fi")
    with pytest.raises(schema.ConfigError, match=r"data\.source_language=und: is needed by tokenizer=paper"):
        own("tokenizer=paper", target="b.de")
    for train in ([], ["data.train=", "data.train_source=a", "data.train_target=b"]):
        with pytest.raises(schema.ConfigError, match=r"data\.source_language has no value"):
            compose.compose_row(*words, *train)


def test_a_prefix_has_the_language_of_another_split_s_files():
    dev = ["data.dev_source=dev.en", "data.dev_target=dev.de"]
    data = compose.compose_row("data=files", "data.train=text/train", *dev, "data.test=test").data
    assert (data.train_source, data.train_target, data.test_target) == ("text/train.en", "text/train.de", "test.de")


def test_own_text_without_data_files_is_no_embedded_corpus():
    with pytest.raises(schema.ConfigError, match=r"data\.train_source=a\.en: text of your own needs data=files"):
        compose.compose_row("data.train_source=a.en", *(f"{key}=b" for key in schema.PATHS - {"data.train_source"}))


PAIRS = [("one two", "eins, zwei"), ('say "no"', "sag „nein“")]
ONE_FILE = {
    "a b.tsv": "".join("{}\t{}\n".format(*pair) for pair in PAIRS),
    "z.tsv.gz": 'one two\teins, zwei\nsay "no"\tsag „nein“\tthird\n',
    "x.CSV": 'one two,"eins, zwei"\n"say ""no""","sag\n„nein“"\n',
    "y.jsonl": "".join(json.dumps({"translation": {"en": one, "de": other}}) + "\n" for one, other in PAIRS),
    "t.tmx": "<tmx>{}{}</tmx>".format(*("<tu><seg>{}</seg><seg><b>{}</b></seg></tu>".format(*pair) for pair in PAIRS)),
}


@pytest.mark.parametrize("key", ["data.dev", "data.dev_source", "data.dev_target"])
@pytest.mark.parametrize("name", ONE_FILE)
def test_a_file_of_both_sides_is_refused_with_what_parts_it(tmp_path, name, key):
    (tmp_path / name).write_bytes((gzip.compress if name.endswith(".gz") else bytes)(ONE_FILE[name].encode()))
    with pytest.raises(schema.ConfigError, match=r"both sides; this makes dev\.source and dev\.target: ") as refused:
        compose.compose_row("data=files", "data.target_language=de", f"{key}='{name}'")
    subprocess.run(str(refused.value).split("dev.target: ")[1], shell=True, check=True, cwd=tmp_path)
    sides = [(tmp_path / f"dev.{side}").read_text("utf-8").splitlines() for side in ("source", "target")]
    assert list(zip(*sides, strict=True)) == PAIRS


@pytest.mark.parametrize(("language", "extra"), [("ja", "ja"), ("ko-KR", "ko"), ("jpn_Jpan", "ja")])
def test_words_of_a_language_need_their_packages(monkeypatch, language, extra):
    run = schema.vary(compose.compose_row(), data={"target_language": language})
    monkeypatch.setattr(checks, "find_spec", lambda package: None)
    with pytest.raises(schema.ConfigError, match=rf"={language}: its BLEU needs `pip install 'sacrebleu\[{extra}\]'`"):
        checks.checked(run)
    monkeypatch.setattr(checks, "find_spec", lambda package: package)
    assert checks.checked(run) == run
