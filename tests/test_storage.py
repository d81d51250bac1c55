"""Files appear whole or not at all."""

import errno
import hashlib
import json
import os
import subprocess
import sys

import pytest

from aiayn import storage


def test_a_block_that_fails_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path):
    path = tmp_path / "deep" / "file"
    storage.write_text(path, "first")

    def tear() -> None:
        with storage.atomic(path) as file:
            file.write(b"half of the sec")
            raise RuntimeError("crash")

    with pytest.raises(RuntimeError, match="crash"):
        tear()
    assert path.read_text() == "first"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_a_plain_write_would_have_torn_the_file(tmp_path):  # control of the test above
    path = tmp_path / "file"
    path.write_text("first")

    def tear() -> None:
        with path.open("wb") as file:
            file.write(b"half of the sec")
            raise RuntimeError("crash")

    with pytest.raises(RuntimeError, match="crash"):
        tear()
    assert path.read_text() != "first"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_a_disk_that_refuses_is_named_and_leaves_the_old_file(tmp_path, monkeypatch, code):
    path = tmp_path / "file"
    storage.write_text(path, "first")

    def refuse(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(storage.StorageError, match=rf"{path}.*{os.strerror(code)}"):
        storage.write_text(path, "second")
    assert path.read_text() == "first"
    assert len(list(tmp_path.iterdir())) == 1


def test_json_refuses_what_no_other_reader_accepts(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        storage.write_json(tmp_path / "x.json", {"ppl": float("nan")})
    storage.write_json(tmp_path / "x.json", {"text": "ä\u2028"})
    assert json.loads((tmp_path / "x.json").read_text()) == {"text": "ä\u2028"}


def test_a_torn_last_line_is_dropped(tmp_path):
    path = tmp_path / "lines"
    assert storage.read_lines(path) == []
    for line in ("a", "b\u2028c"):
        storage.append_line(path, line)
    with path.open("ab") as file:
        file.write(b'{"step": 3, "tr')
    assert storage.read_lines(path) == ["a", "b\u2028c"]


def test_sha256_is_that_of_the_bytes(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"\x00\r\n" * 99991)
    assert storage.sha256(path) == hashlib.sha256(b"\x00\r\n" * 99991).hexdigest()


def test_a_held_lock_is_refused_with_its_owner_and_a_dead_owners_is_taken_over(tmp_path):
    path = tmp_path / "lock"
    program = (
        "import sys, pathlib, time; from aiayn import storage\n"
        f"with storage.lock(pathlib.Path({str(path)!r}), wait=False):\n    print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"held\n"
        with pytest.raises(storage.StorageError, match=f"process {owner.pid} on"), storage.lock(path, wait=False):
            pass
        owner.kill()
        owner.wait()
    with storage.lock(path, wait=False):
        pass
