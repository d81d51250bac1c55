"""The list of mutants fits the source, and every mutant dies (slow)."""

import subprocess
import sys
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


def in_a_fresh_interpreter(code: str) -> subprocess.CompletedProcess[str]:
    """What Python says of `code`, beside `mutants` and in a process whose fork server nobody else has started."""
    command = [sys.executable, "-c", f"import sys, mutants\nfrom mutants import Mutant\n{code}"]
    return subprocess.run(command, cwd=Path(mutants.__file__).parent, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("first", [1, 2, 3])  # in three parts, for two test processes to share
def test_every_mutant_is_killed(first: int) -> None:
    numbers = [str(number) for number in range(first, len(MUTANTS) + 1, 3)]
    ended = in_a_fresh_interpreter(f"sys.exit(mutants.main({numbers!r}))")
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.slow
def test_a_mutant_that_changes_nothing_survives_and_one_without_a_test_is_an_error() -> None:  # control
    one = MUTANTS[0]
    same = Mutant("nothing changes", one.file, one.old, one.old, one.test)
    ended = in_a_fresh_interpreter(f"mutants.MUTANTS = [{same!r}]; sys.exit(mutants.main([]))")
    assert ended.returncode == 1
    assert "survived" in ended.stdout
    nowhere = Mutant("no test", one.file, one.old, one.new, f"{one.test}_of_another_name")
    ended = in_a_fresh_interpreter(f"mutants.MUTANTS = [{nowhere!r}]; sys.exit(mutants.main([]))")
    assert "RuntimeError: without any mutant" in ended.stderr


@pytest.mark.slow
def test_a_fork_server_that_imported_the_original_is_an_error_and_no_surviving_mutant() -> None:
    ended = in_a_fresh_interpreter(
        "from multiprocessing import forkserver\n"
        "mutants.LIBRARIES.append('aiayn')\n"
        "forkserver.set_forkserver_preload(mutants.LIBRARIES); forkserver.ensure_running()\n"
        "sys.exit(mutants.main(['1']))"
    )
    assert "RuntimeError: without any mutant" in ended.stderr
    assert "imported already" in ended.stderr


@pytest.mark.slow
def test_the_copy_holds_the_whole_package_and_not_the_originals_configuration(tmp_path: Path) -> None:
    mutants.copy_checkout(tmp_path)
    (tmp_path / "conf/config.yaml").unlink()
    (tmp_path / "tests/test_it.py").write_text(
        "from importlib import resources\n\n"
        "def test_it():\n    assert not resources.files('aiayn.conf').joinpath('config.yaml').is_file()\n"
    )
    code = f"sys.exit(mutants.run_tests(mutants.Path({str(tmp_path)!r}), ['tests/test_it.py'])[0])"
    assert in_a_fresh_interpreter(code).returncode == mutants.PASSED
