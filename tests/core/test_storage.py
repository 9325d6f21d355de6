"""Files that are complete or not there at all."""

from pathlib import Path

import pytest

from tokenv.core.atomic import write_atomically


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
