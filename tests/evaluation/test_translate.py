"""`aiayn translate`: n lines in, n lines out, in order, for any bytes."""

import io
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiayn.config import compose
from aiayn.evaluation import translate
from aiayn.evaluation.search import decoder_of, search
from aiayn.runs.models import trained


@pytest.fixture(scope="module")
def model(finished):
    """The trained run: (model, corpus, decoding, hardware)."""
    run = compose.compose_row(*finished)
    transformer, dataset, *_ = trained(run)
    return transformer, dataset, run.decoding, run.hardware


def translations(model, text: bytes) -> list[str]:
    return list(translate.translate(*model, io.BytesIO(text), pytest.fail))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=9) | st.text("0123456789 ", max_size=9).map(str.encode)).map(b"\n".join))
def test_any_bytes_keep_their_number_of_translated_lines(model, text):
    lines = text.removesuffix(b"\n").split(b"\n") if text else []
    for line, translation in zip(lines, translations(model, text), strict=True):
        assert line.decode("utf-8", "replace").strip() or translation == ""


def test_empty_lines_stay_where_they_are(model):
    found = translations(model, b"\n1 2 3\n   \n\r\n4 5\n\n")
    assert [bool(line) for line in found] == [False, True, False, False, True, False]
    # Neither the line ends of another system nor a byte order mark is text
    assert translations(model, b"\xef\xbb\xbf1 2 3\r\n4 5\r\n") == [found[1], found[4]]


def test_a_line_is_translated_alike_alone_and_among_others(model, monkeypatch):
    lines = [b"1 2 3", b"", b"7", b"9 8 7 6 5", b"4 4", b"1 2 3", b"0 1 0"]
    together = translations(model, b"\n".join(lines))
    assert [line for text in lines for line in translations(model, text + b"\n")] == together
    monkeypatch.setattr(translate, "LINES_AT_ONCE", 2)
    assert translations(model, b"\n".join(lines)) == together
    assert len(set(together)) > 2  # control: not always the same


def test_a_translation_is_what_the_search_finds_for_the_tokens(model):
    transformer, dataset, decoding, hardware = model
    (hypothesis,) = search(decoder_of(transformer), dataset.tokenizer.encode(["3 1 4 1 5"]), decoding, hardware)
    assert translations(model, b"3 1 4 1 5") == dataset.tokenizer.decode([hypothesis.ids])


def test_lines_come_out_while_more_are_to_come(model, monkeypatch):
    """A pipe that never ends is translated in chunks."""
    monkeypatch.setattr(translate, "LINES_AT_ONCE", 3)
    for typed, taken in ((False, 3), (True, 1)):  # who types a line waits for its answer
        lines = itertools.count()
        assert next(translate.translate(*model, (b"1 2\n" for _ in lines), pytest.fail, typed=typed))
        assert next(lines) == taken


def test_a_very_long_line_is_cut_and_named(model, monkeypatch):
    monkeypatch.setattr(translate, "LONGEST", 13)
    dataset, encoded, searched, warnings = model[1], [], [], []
    encode = dataset.tokenizer.encode

    def search_beginnings(model, ids, *rest):
        searched.extend(map(len, ids))
        return search(model, [part[:2] for part in ids], *rest)

    monkeypatch.setattr(dataset.tokenizer, "encode", lambda lines: encoded.extend(map(len, lines)) or encode(lines))
    monkeypatch.setattr(translate, "search", search_beginnings)
    text = b"1 2\n" + b"3 4 " * 10**6 + b"\n" + b"5" * 14 + b"\n" + b" " * 10**6 + b"1\n6 7\n" + b"8" * 13
    found = list(translate.translate(*model, io.BytesIO(text), warnings.append))
    assert (len(found), max(encoded), max(searched)) == (6, 13 * 16, 13)
    assert warnings == [f"line {n} has more than 13 tokens: only its beginning is translated" for n in (2, 3, 4)]
    assert found[0] == translations(model, b"1 2")[0]


def test_standard_output_has_translations_alone_in_any_locale(finished, monkeypatch, capsys):
    printed = []
    for encoding in ("utf-8", "ascii"):
        written = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\r\n")
        monkeypatch.setattr("sys.stdout", written)
        typed = io.BytesIO("1 2 ж 3\n\n4 \x85 \u2028 x\n".encode())
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(typed))
        translate.main(compose.compose_row(*finished))
        printed.append(written.buffer.getvalue())
    assert printed[0] == printed[1]
    assert [bool(line) for line in printed[0].split(b"\n")] == [True, False, True, False]
    assert b"\r" not in printed[0]
    assert capsys.readouterr().err == ""
