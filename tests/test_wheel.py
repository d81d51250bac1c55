"""The installed wheel works from any directory: configurations, rows, sweeps, plugins and the corpus travel in it."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("src", "conf", "experiments", "sweeps", "pyproject.toml", "README.md", "LICENSE")


@pytest.mark.slow
def test_the_wheel_works_from_any_directory(tmp_path):
    source, installed, elsewhere = (tmp_path / name for name in ("source", "installed", "elsewhere"))
    elsewhere.mkdir()
    for part in PARTS:  # a copy, because building leaves files beside the source
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        source.mkdir(exist_ok=True)
        copy(ROOT / part, source / part)
    build = [sys.executable, "-m", "pip", "wheel", source, "--no-deps", "--no-build-isolation", "-w", tmp_path]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("aiayn-*.whl")
    zipfile.ZipFile(wheel).extractall(installed)

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(installed)}
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, check=False)

    def aiayn(*arguments: str) -> subprocess.CompletedProcess[str]:
        return python("-m", "aiayn", *arguments)

    where = python("-c", "import aiayn, aiayn.conf; print(aiayn.__file__, *aiayn.conf.__path__)").stdout.split()
    assert where == [str(installed / "aiayn/__init__.py"), str(installed / "aiayn/conf")]
    prepared = aiayn("prepare")
    assert prepared.returncode == 0, prepared.stderr
    assert len(list((elsewhere / "prepared").glob("tiny-*/manifest.json"))) == 1
    # A sweep file, the rows and the sweeper and launcher are found; the wrong value stops it before anything starts
    refused = aiayn("train", "-cn", "table3", "model.dropout=1.5")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "model.dropout" in refused.stderr
    begun = elsewhere / "runs/tiny-mini/base/seed1"
    begun.mkdir(parents=True)
    (begun / "metrics.jsonl").write_text('{"step": 3}\n')
    reported = aiayn("report")
    assert reported.returncode == 0, reported.stderr
    assert (elsewhere / "runs/tiny-mini/report/report.html").exists()
    # Control: without the packaged configuration nothing composes
    shutil.rmtree(installed / "aiayn/conf/scale")
    assert aiayn("train", "--cfg", "job").returncode != 0
