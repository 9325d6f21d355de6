"""``tokenv evaluate`` and ``tokenv generate`` of a stored run."""

import json
from pathlib import Path

import pytest

from tokenv.cli.main import run_command


def test_a_run_is_evaluated_on_other_data_and_generates_text(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = run_command("evaluate", ["with", f"run={trained}", "sequences=6", "batch_size=4"])
    assert results["sampled"]["bits_per_byte"] > 0
    assert results["thresholded"]["boundary_rate"] <= results["sampled"]["boundary_rate"]
    Path("other.txt").write_bytes(b"abc" * 100)
    elsewhere = [
        "with",
        f"run={trained}",
        "data.validation_source=other.txt",
        "sequences=6",
        "json=evaluation.json",
    ]
    other = run_command("evaluate", elsewhere)["sampled"]
    printed = capsys.readouterr().out
    assert "No standard error: all sequences are of one document" in printed
    assert "nan" not in printed
    stored = json.loads(Path("evaluation.json").read_text())["sampled"]
    assert stored["standard_error"] is None
    assert stored["bits_per_byte"] == other["bits_per_byte"]
    assert other["bits_per_byte"] != results["sampled"]["bits_per_byte"]
    assert other["boundary_f1"] is None
    with pytest.raises(ValueError, match=r"unknown key data\.sorce: did you mean 'source'"):
        run_command("evaluate", ["with", f"run={trained}", "data.sorce=other.txt"])
    monkeypatch.setattr("tokenv.data.corpus.load_corpus", None)  # the corpus is not read for it
    with pytest.raises(ValueError, match="a corpus of text has no test side"):
        run_command("evaluate", ["with", f"run={trained}", "split=test"])
    request = [
        "with",
        f"run={trained}",
        "text=ab",
        "max_new_tokens=5",
        "temperature=0",
        "json=written.json",
    ]
    written = run_command("generate", request)
    assert "".join(
        token["text"] for token in json.loads(Path("written.json").read_text())["tokens"]
    ).startswith("ab")
    assert written.startswith("ab")
    assert len(written.encode()) >= 7
    with pytest.raises(
        ValueError, match=r"writing 1,000,000,000,002 symbols would need at least .* GiB of memory"
    ):
        run_command("generate", ["with", f"run={trained}", "text=ab", "max_new_tokens=1e12"])


def test_evaluate_at_the_exact_rate(trained: Path) -> None:
    results = run_command(
        "evaluate", ["with", f"run={trained}", "sequences=6", "batch_size=4", "calibrate=True"]
    )
    plain = run_command("evaluate", ["with", f"run={trained}", "sequences=6", "batch_size=4"])
    assert results["sampled"] == plain["sampled"]
    assert results["calibrated"]["logit_bias"] != 0
    assert results["calibrated"]["bits_per_byte"] != plain["sampled"]["bits_per_byte"]
    with pytest.raises(ValueError, match="calibrate = True with split = 'test'"):
        run_command("evaluate", ["with", f"run={trained}", "split=test", "calibrate=True"])
