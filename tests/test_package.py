"""What is installed is whole: a wheel works from any folder, configurations and page templates included."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent

USE = """
import sys
sys.path.insert(0, sys.argv[1])
import tokenv, tokenv.agents, tokenv.estimators
assert all(sys.argv[1] in module.__file__ for module in (tokenv, tokenv.agents, tokenv.estimators))
from tokenv.config.files import named_configs, resolve
assert "quick" in named_configs() and sys.argv[1] in str(named_configs()["quick"])
assert resolve(["configs/quick.yaml"], {}) == resolve(["quick"], {})
import tokenv.cli.experiment, tokenv.testing
from tokenv.report.html import segment_page
from tokenv.report.characters import characters
assert "<html" in segment_page({"t": characters(b"ab", [0.1, 0.9], [True, False])}, title="t", facts={})
"""


def test_wheel_holds_everything(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("tokenv", "agents", "estimators", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    away = tmp_path / "away"
    away.mkdir()
    subprocess.run([sys.executable, "-c", USE, str(tmp_path / "site")], check=True, cwd=away)
