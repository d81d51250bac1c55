"""The list of mutants fits the source, and every mutant dies (slow)."""

import mutants
import pytest
from mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_fits_and_names_a_test_that_exists(mutant: Mutant) -> None:
    mutants.mutated(mutant, (ROOT / mutant.file).read_text())
    path, _, name = mutant.test.partition("::")
    assert f"def {name}(" in (ROOT / path).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("first", [1, 2, 3])  # in three parts, for two test processes to share
def test_every_mutant_is_killed(first: int) -> None:
    assert mutants.main([str(number) for number in range(first, len(MUTANTS) + 1, 3)]) == 0


@pytest.mark.slow
def test_a_mutant_that_changes_nothing_survives(monkeypatch: pytest.MonkeyPatch) -> None:  # control
    one = MUTANTS[0]
    monkeypatch.setattr(mutants, "MUTANTS", [Mutant("nothing changes", one.file, one.old, one.old, one.test)])
    assert mutants.main([]) == 1
