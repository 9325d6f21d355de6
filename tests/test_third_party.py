"""A package of somebody else's, with a baseline in under twenty lines and a command, is installed, used and checked."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from fresh_process import command

import tokenv

HERE = Path(__file__).parent
ROOT = HERE.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return a folder which holds the installed package, metadata included."""
    folder = tmp_path_factory.mktemp("third_party")
    shutil.copytree(HERE / "third_party", folder / "source")
    page = (ROOT / "docs" / "howto" / "plugin.md").read_text()
    _, _, density = page.partition('title="laplace.py"\n')
    path = folder / "source" / "median_baseline" / "laplace.py"
    path.write_text(density.partition("```")[0])
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    subprocess.run(
        [
            *pip,
            "--disable-pip-version-check",
            "--target",
            str(folder / "site"),
            str(folder / "source"),
        ],
        check=True,
    )
    return folder / "site"


def test_the_package_is_short():
    module = (HERE / "third_party" / "median_baseline" / "__init__.py").read_text()
    part = module[module.index("class") :].splitlines()
    assert len([line for line in part if line.strip()]) <= 20


def test_it_trains_by_name(site, tmp_path, tiny_settings):
    config = tiny_settings | {"estimator": {"name": "median", "gamma": 0.9, "num_samples": 4}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    done = command(["train", "with", "c.yaml"], tmp_path, [site])
    assert done.returncode == 0, done.stderr
    assert "bits per byte" in done.stdout


def test_its_callback_acts_before_and_after_training(site, tmp_path, tiny_settings):
    config = tiny_settings | {"callbacks": [{"name": "largest_weight", "file": "w.txt"}]}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    done = command(["train", "with", "c.yaml"], tmp_path, [site])
    assert done.returncode == 0, done.stderr
    (first, before), (last, after) = (
        line.split() for line in (tmp_path / "w.txt").read_text().splitlines()
    )
    assert int(first) == 0
    assert int(last) >= config["train"]["symbols"]
    assert before != after
    loaded = tokenv.load(tmp_path / "runs" / "1")  # only training needs the package
    assert loaded.config.callbacks[0]["name"] == "largest_weight"
    wrong = command(
        ["train", "with", "c.yaml", "callbacks=[{'name': 'largest'}]"], tmp_path, [site]
    )
    assert wrong.returncode == 2
    assert "callbacks.name = 'largest' is unknown: did you mean 'largest_weight'?" in wrong.stderr


def test_its_density_predicts_series(site, tmp_path, tiny_settings):
    data = tiny_settings["data"] | {
        "kind": "series",
        "source": "regimes",
        "options": {"context": 8, "count": 40, "length": 256},
    }
    codec = {"name": "series", "density": "laplace"}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tiny_settings | {"data": data, "codec": codec}))
    done = command(["train", "with", "c.yaml"], tmp_path, [site])
    assert done.returncode == 0, done.stderr
    assert "nats per value" in done.stdout
    own = command(["list", "codecs", "series"], tmp_path, [site])
    assert "tokenv.densities" in own.stdout


def test_its_kind_of_data_trains_beside_text(site, tmp_path, tiny_settings):
    generator = random.Random(0)
    with (tmp_path / "genes.fasta").open("w") as file:
        for name in range(40):
            bases = "".join(generator.choices("ACGT", k=100))
            file.write(f">{name}\n{bases}\n")
    data = tiny_settings["data"] | {"kind": "fasta", "source": "genes.fasta"}
    (tmp_path / "text.yaml").write_text(yaml.safe_dump(tiny_settings))
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tiny_settings | {"data": data}))
    for words in (["c.yaml"], ["c.yaml", "data.options.lower=true"], ["text.yaml"]):
        done = command(["train", "with", *words], tmp_path, [site])
        assert done.returncode == 0, done.stderr
    wrong = command(["train", "with", "c.yaml", "data.source=words"], tmp_path, [site])
    assert wrong.returncode == 2
    assert wrong.stderr == "tokenv: data.source = 'words': expected a .fasta file\n"


def test_its_command_stands_beside_ours(site, tmp_path):
    shown = command(["--help"], tmp_path, [site]).stdout
    assert (
        "tokenv count      Count the letters of a word: with word=…. (from median_baseline.count:Count)"
        in shown
    )
    assert "tokenv broken     cannot be used: there is no module median_baseline.nowhere" in shown
    options = command(["count", "--help"], tmp_path, [site]).stdout.splitlines()
    assert any(
        line.startswith("  times = 1") and "number by which they are multiplied" in line
        for line in options
    )
    assert any(line.startswith("  word ") for line in options)


def test_its_command_runs_as_ours_do(site, tmp_path):
    done = command(["count", "with", "word=1e3", "times=2", "-F", "here"], tmp_path, [site])
    assert done.returncode == 0, done.stderr
    assert "1e3 has 3 letters" in done.stdout
    assert json.loads((tmp_path / "here" / "1" / "run.json").read_text())["result"] == 6
    assert json.loads((tmp_path / "here" / "1" / "config.json").read_text())["word"] == "1e3"
    assert (tmp_path / "here" / "1" / "word.txt").read_text() == "1e3"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("count with word=a tims=2", "command line: unknown key tims: did you mean 'times'?"),
        ("count with word=a times=0", "times = 0: expected a whole number of at least 1"),
        ("count", "word is missing: expected text"),
        ("coun", "unknown command 'coun': did you mean 'count'?"),
        (
            "broken",
            "command = 'broken' cannot be imported from median_baseline.nowhere: No module named",
        ),
        (
            "broken --help",
            "command = 'broken' cannot be imported from median_baseline.nowhere: No module named",
        ),
    ],
)
def test_mistakes_are_one_message(words, message, site, tmp_path):
    done = command(words.split(), tmp_path, [site])
    assert done.returncode == 2
    assert done.stderr.startswith(f"tokenv: {message}")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_it_passes_the_check(site, tmp_path):
    done = command(["check", "median", "gamma=1.0"], tmp_path, [site])
    assert done.returncode == 0, done.stderr
