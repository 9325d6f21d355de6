"""What is installed is whole: a wheel works from any folder, configurations and page templates included."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

USE = """
import sys
sys.path.insert(0, sys.argv[1])
import tokenv, tokenv.agents, tokenv.estimators
assert all(sys.argv[1] in module.__file__ for module in (tokenv, tokenv.agents, tokenv.estimators))
from tokenv.config.files import named_configs, resolve
assert "quick" in named_configs() and sys.argv[1] in str(named_configs()["quick"])
assert resolve(["configs/quick.yaml"], {}) == resolve(["quick"], {})
import tokenv.cli.train, tokenv.testing
from tokenv.plotting.html import segment_page
from tokenv.plotting.characters import characters
assert "<html" in segment_page({"t": characters(b"ab", [0.1, 0.9], [True, False])}, title="t", facts={})
"""


def test_wheel_holds_everything(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("tokenv", "agents", "estimators", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    build = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path),
        str(source),
    ]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert "tokenv/py.typed" in archive.namelist()
        # Nothing of a neighbour's is ever overwritten: openai-agents installs a package named agents.
        assert {name.partition("/")[0] for name in archive.namelist()} == {
            "tokenv",
            "tokenv-0.1.0.dist-info",
        }
        archive.extractall(tmp_path / "site")
    away = tmp_path / "away"
    away.mkdir()
    subprocess.run([sys.executable, "-c", USE, str(tmp_path / "site")], check=True, cwd=away)


@pytest.mark.slow
def test_sdist_holds_its_tests(tmp_path: Path) -> None:
    """Every file beside the code that the project has is there, and all tests are found with nothing else at hand."""
    source = tmp_path / "source"
    leave = shutil.ignore_patterns(
        "__pycache__", ".git", ".*_cache", ".hypothesis", ".venv*", "*.egg-info", "runs"
    )
    shutil.copytree(ROOT, source, ignore=leave)
    build = [
        sys.executable,
        "-m",
        "build",
        "--sdist",
        "--no-isolation",
        "--outdir",
        str(tmp_path),
        str(source),
    ]
    subprocess.run(build, check=True, capture_output=True)
    (packed,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path / "away", filter="data")
    (away,) = (tmp_path / "away").iterdir()
    for folder in ("tests", "configs", "docs", "examples"):
        expected = {
            path.relative_to(source) for path in (source / folder).rglob("*") if path.is_file()
        }
        assert expected <= {path.relative_to(away) for path in away.rglob("*")}, folder
    for name in (
        "README.md",
        "CHANGELOG.md",
        "CITATION.cff",
        "CONTRIBUTING.md",
        "LICENSE",
        "constraints.txt",
        "mkdocs.yml",
    ):
        assert (away / name).is_file(), name
    environment = os.environ | {"PYTHONPATH": str(away)}
    collect = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    done = subprocess.run(
        collect, cwd=away, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_unbiased.py" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("extra", EXTRAS)
def test_every_extra_can_be_installed_with_the_constraints(extra: str, tmp_path: Path) -> None:
    """Versions are resolved, and nothing is installed; what is here already is not fetched again."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    pip = [
        str(tmp_path / "venv/bin/python"),
        "-m",
        "pip",
        "--python",
        sys.executable,
        "install",
        "--dry-run",
        "--quiet",
    ]
    words = ["--constraint", str(ROOT / "constraints.txt"), "--editable", f"{ROOT}[{extra}]"]
    done = subprocess.run([*pip, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_test_of_the_slow_list_exists() -> None:
    for line in (ROOT / "tests" / "slow.txt").read_text().splitlines():
        file, name = line.partition("[")[0].split("::")
        assert f"def {name}(" in (ROOT / file).read_text(), line
