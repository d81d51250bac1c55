"""The list of mutants fits the source, and every mutant dies (slow)."""

from pathlib import Path

import mutants
import pytest
from mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_fits_the_source_and_names_a_test_that_exists(mutant: Mutant) -> None:
    mutants.mutated(mutant, (ROOT / mutant.file).read_text())
    path, _, name = mutant.test.partition("::")
    assert f"def {name}(" in (ROOT / path).read_text()


def test_an_edit_that_does_not_fit_is_refused() -> None:
    mutant = Mutant("name", "file.py", "a", "b", "test")
    assert mutants.mutated(mutant, "x = a\n") == "x = b\n"
    for text in ("x = c\n", "a = a\n", "a b\n"):
        with pytest.raises((ValueError, SyntaxError)):
            mutants.mutated(mutant, text)


def test_an_unknown_mutant_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutants.main(["no such mutant"]) == 2
    assert "no such mutant" in capsys.readouterr().out


def test_a_number_or_a_part_of_a_name_chooses_mutants() -> None:
    mutant = MUTANTS[10]
    assert mutants.is_meant("11", 11, mutant)
    assert mutants.is_meant(mutant.name[3:9].upper(), 11, mutant)
    assert not mutants.is_meant("1", 11, mutant)


@pytest.mark.slow
@pytest.mark.parametrize("first", [1, 2, 3])  # in three parts, for two test processes to share
def test_every_mutant_is_killed(first: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert mutants.main([str(number) for number in range(first, len(MUTANTS) + 1, 3)]) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_a_mutant_that_changes_nothing_survives_and_one_without_a_test_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # control
    one = MUTANTS[0]
    same = Mutant("nothing changes", one.file, one.old, one.old, one.test)
    monkeypatch.setattr(mutants, "MUTANTS", (same,))
    assert mutants.main([]) == 1
    assert "survived" in capsys.readouterr().out
    nowhere = Mutant("no test", one.file, one.old, one.new, f"{one.test}_of_another_name")
    monkeypatch.setattr(mutants, "MUTANTS", (nowhere,))
    with pytest.raises(RuntimeError, match="without any mutant"):
        mutants.main([])


@pytest.mark.slow
def test_the_copy_holds_the_whole_package_and_not_the_originals_configuration(tmp_path: Path) -> None:
    mutants.copy_checkout(tmp_path)
    (tmp_path / "conf/config.yaml").unlink()
    (tmp_path / "tests/test_it.py").write_text(
        "from importlib import resources\n\n"
        "def test_it():\n    assert not resources.files('aiayn.conf').joinpath('config.yaml').is_file()\n"
    )
    assert mutants.run_tests(tmp_path, ["tests/test_it.py"])[0] == mutants.PASSED
