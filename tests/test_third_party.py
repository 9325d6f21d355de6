"""A package of somebody else's, with a new baseline in under twenty lines, is installed, named, trained and checked."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

HERE = Path(__file__).parent
ROOT = HERE.parent
CHECK = """
from tokenv.testing import check_estimator
check_estimator("median", gamma=1.0)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return a folder which holds the installed package, metadata included."""
    folder = tmp_path_factory.mktemp("third_party")
    shutil.copytree(HERE / "third_party", folder / "source")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run(
        [*command, "--disable-pip-version-check", "--target", str(folder / "site"), str(folder / "source")], check=True
    )
    return folder / "site"


def run(site, folder, *command):
    path = os.pathsep.join([str(site), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_it_is_short():
    module = (HERE / "third_party" / "median_baseline" / "__init__.py").read_text()
    part = module[module.index("class") :].splitlines()
    assert len([line for line in part if line.strip()]) <= 20


def test_it_trains_by_name(site, tmp_path, tiny_settings):
    config = tiny_settings | {"estimator": {"name": "median", "gamma": 0.9, "num_samples": 4}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    done = run(site, tmp_path, "-m", "tokenv", "train", "with", "c.yaml")
    assert done.returncode == 0, done.stderr
    assert "bits per byte" in done.stdout


def test_its_callback_acts_before_and_after_training(site, tmp_path, tiny_settings):
    config = tiny_settings | {"callbacks": [{"name": "largest_weight", "file": "w.txt"}]}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    done = run(site, tmp_path, "-m", "tokenv", "train", "with", "c.yaml")
    assert done.returncode == 0, done.stderr
    (first, before), (last, after) = (line.split() for line in (tmp_path / "w.txt").read_text().splitlines())
    assert int(first) == 0
    assert int(last) >= config["train"]["symbols"]
    assert before != after
    wrong = run(site, tmp_path, "-m", "tokenv", "train", "with", "c.yaml", "callbacks=[{'name': 'largest'}]")
    assert wrong.returncode == 2
    assert "callbacks.name = 'largest' is unknown: did you mean 'largest_weight'?" in wrong.stderr


@pytest.mark.slow
def test_it_passes_the_check(site, tmp_path):
    done = run(site, tmp_path, "-c", CHECK)
    assert done.returncode == 0, done.stderr
