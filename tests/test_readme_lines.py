"""Every line of README.md and docs/ that can be typed does run, with what README's first command installs."""

import importlib
import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import shrunk

DOCUMENTS = [
    "README.md",
    *sorted(str(path.relative_to(shrunk.ROOT)) for path in (shrunk.ROOT / "docs").rglob("*.md")),
]
# They take long, and repeat what tests of shipped configurations, of commands and of forecasts say.
NAMES = (
    "bench",
    "commands",
    "ett",
    "results",
    "figures",
    "patches",
    "series",
    "tutorials/patches",
    "variance",
)
LONG = tuple(f"docs/{name}.md" for name in NAMES)
LEFT_OUT = {
    "python3 -m venv": "sets up what these tests run in",
    ".venv/bin/pip install": "the same; continuous integration runs it word for word",
    ".venv/bin/python -m pytest": "these tests",
    "tokenv serve": "stays until it is stopped; test_server does that",
    "torchrun": "several processes; test_torchrun runs the like",
    "tokenv compare with compare-estimators jobs=2": "its protocols, each with some methods, are in "
    "test_shipped_configs",
    "tokenv compare with compare-rates": "test_shipped_configs runs two of its methods",
    "python docs/results/tables.py": "test_results_tables runs its functions",
    "python examples/": "test_examples runs the examples",
    "from stable_baselines3": "an extra; test_sb3 runs it",
    "import lm_eval": "an extra; test_lm_eval_model runs the like",
}
BLOCK = re.compile(r"^```(\S+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r'title="([^"]+)"')
NOT_TYPED = ("math",)
VARIABLE = re.compile(r"[A-Z_]+=\S*")
RUN = re.compile(r"runs/\d+(?:/variance)?|\bRUN\b")


def pieces(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield what a reader of a document would type, in order: language, a line or a whole block, and its file."""
    for language, info, block in BLOCK.findall(text):
        if language in NOT_TYPED or "--8<--" in block:  # a file that the site shows
            continue
        if language != "sh":
            titled = TITLE.search(info)
            yield language, block, titled[1] if titled else ""
            continue
        for line in block.replace("\\\n", " ").splitlines():
            for part in line.split(" && "):
                if part.strip() and not part.lstrip().startswith("#"):
                    yield language, part.strip(), ""


@contextmanager
def without_extras(*running: str) -> Iterator[None]:
    """Make the packages which only extras name impossible to import, as after an installation without them.

    Args:
        running: modules that stay, for they are at work around the caller.
    """

    def distribution(requirement: str) -> str:
        return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")

    extras = {
        distribution(one)
        for group in shrunk.PROJECT["optional-dependencies"].values()
        for one in group
    }
    extras -= {distribution(one) for one in shrunk.PROJECT["dependencies"]}
    packages = packages_distributions()
    names = [
        name
        for name, owners in packages.items()
        if extras & {owner.lower().replace("_", "-") for owner in owners}
    ]
    hidden = {name: sys.modules.get(name) for name in names if name not in running}
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name, module in hidden.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def trained(**required: Any) -> list[str]:
    """Folders of the completed training runs of this folder that learn their boundaries, newest first."""
    runs = []
    for path in sorted(Path("runs").glob("*/run.json"), key=lambda path: -int(path.parent.name)):
        record, config = (
            json.loads(path.with_name(name).read_text()) for name in ("run.json", "config.json")
        )
        if record["experiment"]["name"] != "tokenv-train" or record["status"] != "COMPLETED":
            continue
        codec = config["codec"]
        has = {
            "kind": config["data"]["kind"],
            "rate": config["rate"],
            "direct": codec.get("direct", False),
        }
        has["horizon"] = codec.get("horizon", 0) > 0
        if config["agent"]["name"] == "learned" and required.items() <= has.items():
            runs.append(str(path.parent))
    return runs


def with_our_runs(line: list[str]) -> list[str]:
    """Replace runs which the document assumes by runs which earlier lines made."""
    kinds = [
        shrunk.content(word).get("data", {}).get("kind", "text")
        for word in line[2:3]
        if word in shrunk.CONFIGS
    ]
    series = line[0] == "forecast" or "series" in kinds
    required: dict[str, Any] = {"kind": "series" if series else "text"}
    if line[0] == "forecast":
        required |= {"horizon": True, "direct": False}
    if any(word.startswith("agent.pretrained=") for word in line):
        # an agent keeps to the rate it was trained for
        required["rate"] = shrunk.content("series-synthetic")["rate"]
    named: list[str] = []

    def ours(match: re.Match[str]) -> str:
        if match[0].endswith("/variance"):
            return str(max(Path("runs").glob("*/variance/checkpoints")).parent)
        chosen = trained(**required)
        assert chosen, f"no earlier line of the document made such a run: {required}"
        named.append(match[0])
        # Two runs that are compared differ, which a run and the one that resumed it do not.
        several = line[0] == "compare" or any(word.startswith("other_runs=") for word in line)
        run = chosen.pop() if match[0] == named[0] and several else chosen[0]
        return str(min(Path(run).glob("checkpoints/step-*"))) if "resume=" in match.string else run

    return [RUN.sub(ours, word) for word in line]


def run_line(text: str) -> None:
    """Run one line of a shell block.

    Raises:
        ValueError: nobody has said how.
    """
    words = shlex.split(text, comments=True)
    while VARIABLE.fullmatch(words[0]):
        words = words[1:]
    program, *arguments = words
    if program.removeprefix(".venv/bin/") == "tokenv":
        only = None
        # test_shipped_configs runs all methods
        of_all = arguments[0] == "compare" and "=" not in arguments[2]
        if of_all and not any(word.startswith("only=") for word in arguments):
            methods = list(shrunk.content(arguments[2])["methods"])
            only = sorted(methods, key=lambda name: not name.startswith("learned"))[:2]
        shrunk.tokenv(
            shrunk.shrink(with_our_runs(arguments), only) + (["jobs=1"] if of_all else [])
        )
    elif program == "python" and arguments[0] == "-c":
        exec(arguments[1], {})
    else:
        raise ValueError(
            f"{text!r}: nobody has said how to run this; teach this test, or name it in LEFT_OUT"
        )


def run_piece(language: str, text: str, file: str, space: dict[str, Any]) -> None:
    """Run a line or a block as its reader would; what has a file's name is put in that file.

    Args:
        language: of the block.
        text: what is typed.
        file: where it is put; empty for nowhere.
        space: names that earlier blocks of the document have defined.
    """
    if file:
        Path(file).write_text(text)
        sys.modules.pop(Path(file).stem, None)  # another test's module of that name
        importlib.invalidate_caches()
    if language == "sh":
        run_line(text)
    elif language == "python":
        series = {"kind": "series", "horizon": True, "direct": False}
        required = series if ".forecast(" in text else {"kind": "text"}
        text = re.sub(r'"runs/\d+"', lambda _: repr(trained(**required)[0]), text)
        text = re.sub(r"\b(horizon|h)=\d+", r"\1=8", text)
        text = re.sub(r"n_windows=\d+", "n_windows=5", text)
        exec(compile(text, file or "README.md", "exec"), space)
    elif language == "yaml":
        Path(file or "mine.yaml").write_text(text)
    else:
        raise ValueError(
            f"a block of {language}: expected sh, python or yaml, or none for what is not typed"
        )


# TorchRL warns of its own classes when its collectors are imported.
@pytest.mark.filterwarnings(
    "ignore:Creating .* which inherits from WeightUpdaterBase:DeprecationWarning"
)
@pytest.mark.parametrize(
    "document", [pytest.param(d, marks=pytest.mark.slow) if d in LONG else d for d in DOCUMENTS]
)
def test_what_can_be_typed_runs(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a document, in order, in one folder that is empty but for the examples and the data its lines read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(shrunk.ROOT / "examples")
    for folder in (tmp_path, tmp_path / "examples"):  # which lines name as PYTHONPATH
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tokenv.compare.job.Job.__call__", shrunk.in_this_process)
    shrunk.stand_ins(tmp_path)
    before = set(sys.modules)
    space = {"__name__": "readme"}
    for language, text, file in pieces((shrunk.ROOT / document).read_text()):
        if text.startswith(tuple(LEFT_OUT)):
            continue
        output = io.StringIO()
        try:
            with without_extras("pytest", "_pytest"), redirect_stdout(output):
                run_piece(language, text, file, space)
        except BaseException as error:
            error.add_note(f"{document}: {text}\n{output.getvalue()}")
            raise
    for name in set(sys.modules) - before:  # another document may call its own module the same
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def test_what_is_left_out_is_there() -> None:
    everything = [
        text
        for document in DOCUMENTS
        for _, text, _ in pieces((shrunk.ROOT / document).read_text())
    ]
    assert len(everything) > 35
    for beginning in LEFT_OUT:
        assert any(text.startswith(beginning) for text in everything), beginning


def test_a_line_that_nobody_knows_fails() -> None:
    with pytest.raises(ValueError, match="nobody has said how to run this"):
        run_line("curl https://example.org")
    with pytest.raises(ValueError, match="nobody has said how to make it small"):
        run_line("tokenv fly with quick")


def test_no_module_needs_an_extra() -> None:
    """In a process that has imported nothing yet, all of tokenv's modules are imported; two are an extra's own."""
    code = """
import importlib, sys
sys.path[:0] = sys.argv[1:]
import test_imports, test_readme_lines
with test_readme_lines.without_extras():
    assert sys.modules["stable_baselines3"] is None
    for name in list(sys.modules):  # the tests' own support has imported some
        if name.partition(".")[0] == "tokenv":
            del sys.modules[name]
    extras = {"tokenv.env.sb3": "tokenv[sb3]", "tokenv.library.lm_eval_model": "tokenv[lm-eval]",
              "tokenv.library.hf_tokenizer": "transformers"}
    for name in test_imports.MODULES:
        if name in extras:
            try:
                importlib.import_module(name)
                raise AssertionError(name)
            except ImportError as error:
                assert extras[name] in str(error), error
        elif not name.endswith("__main__"):
            importlib.import_module(name)
"""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        code,
        str(shrunk.ROOT),
        str(shrunk.ROOT / "tests"),
        str(shrunk.ROOT / "tests" / "support"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_each_block_about_the_environment_runs_alone() -> None:
    for language, block, _ in pieces((shrunk.ROOT / "docs/environment.md").read_text()):
        assert language == "python"
        exec(block, {})
