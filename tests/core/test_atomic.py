"""Files that are complete or not there at all."""

import os
from pathlib import Path

import pytest
from tiny import settings

from tokenv.cli.main import run_command
from tokenv.config.files import resolve
from tokenv.core.atomic import check_encoding, write_atomically
from tokenv.core.errors import UserError
from tokenv.training.trainer import train


@pytest.mark.parametrize("content", ["Stück\r\n", b"\x00\xff\n"])
def test_written_files_are_read_back_and_replace_existing_ones(tmp_path, content):
    path = tmp_path / "file"
    for _ in range(2):
        write_atomically(path, content)
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\udce9")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_atomically(tmp_path / "folder", "new")
    assert path.read_text() == "old"
    assert {each.name for each in tmp_path.iterdir()} == {"file", "folder"}


@pytest.mark.parametrize("name", [".", "folder", "folder/."])
def test_a_folder_is_no_file_to_write(name, tmp_path, monkeypatch):
    """As in ``out=.``; nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as raised:
        write_atomically(Path(name), "text")
    assert raised.value.filename == str(Path(name))
    with pytest.raises(FileNotFoundError) as raised:
        write_atomically(Path("missing/file"), "text")
    assert raised.value.filename == "missing/file"
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]


def test_a_path_that_is_not_utf8_is_refused_before_training(tmp_path):
    """Parameters could be written there, but not be read again."""
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/st\xffore"))
    check_encoding(tmp_path / "städte")
    with pytest.raises(UserError, match="expected a path in UTF-8"):
        check_encoding(odd / "checkpoints")
    with pytest.raises(UserError, match="expected a path in UTF-8"):
        train(resolve([], settings()), odd / "1" / "checkpoints", lambda *_: None)
    with pytest.raises(UserError, match="expected a path in UTF-8"):
        run_command("train", ["-F", str(odd), "with", "small"])
    assert not odd.exists()
