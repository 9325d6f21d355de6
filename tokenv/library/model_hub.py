"""Save models in folders and on the Hugging Face Hub: parameters, the run's state, and a model card."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from tokenv.core import run_folders
from tokenv.core.atomic import check_encoding, write_atomically
from tokenv.core.checkpoints import MODEL, STATE, save_tensors
from tokenv.core.errors import MissingFileError, UserError
from tokenv.evaluation.loaded_run import LoadedRun

SAVED = (MODEL, STATE)  # files of a model without its optimiser
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
CARD = """\
---
library_name: tokenv
tags:
- tokenization
- byte-level
---
# A model that draws its own token boundaries

A byte-level language model trained with tokenv, which learns token boundaries end to end with reinforcement learning
([arXiv 2602.13940](https://arxiv.org/abs/2602.13940)).

| | |
|---|---|
{rows}

```python
import tokenv

model = tokenv.load("{name}")
model.tokens("some text")
```
"""


def locate(name: str | Path, *, revision: str | None = None, token: str | None = None) -> Path:
    """Return the folder of a model: a local one, or, if there is none, a downloaded one from the Hub.

    Raises:
        MissingFileError: if there is neither, or the Hub cannot be reached and its cache does not hold the model.
        UserError: if the model on the Hub was not saved by tokenv.
    """
    local = Path(name).expanduser()
    if local.exists() or not HUB_NAME.fullmatch(str(name)) or local.parent.is_dir():
        return local  # a missing run in an existing folder: loading it lists the runs which exist
    try:
        folder = Path(
            snapshot_download(
                str(name),
                revision=revision,
                token=token,
                allow_patterns=[*SAVED, run_folders.DIGESTS],
            )
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:  # OSError without a network
        reason = str(error).strip().splitlines()[0]
        raise MissingFileError(
            f"{str(name)!r}: there is no such folder, nor, as far as can be seen, such a model on the Hugging Face "
            f"Hub ({reason}): expected a run folder such as runs/1, or owner/name"
        ) from error
    if not (folder / STATE).is_file():
        raise UserError(
            f"{str(name)!r} on the Hugging Face Hub has no {STATE}: expected what push_to_hub() uploads"
        )
    return folder


def save(
    trained: LoadedRun, folder: Path, *, facts: Mapping[str, str], name: str | None = None
) -> Path:
    """Save a model so that ``load_run`` can read it.

    Args:
        trained: model of a run.
        folder: destination; it is created if it is missing.
        facts: rows of the model card.
        name: name under which the model card loads the model; None for the folder.

    Raises:
        UserError: if the folder is a file or a run folder, or its path is not UTF-8.
    """
    check_encoding(folder)
    if folder.is_file():
        raise UserError(f"{folder} is a file: expected a folder, or a new one")
    if run_folders.list_complete(folder / "checkpoints"):
        raise UserError(f"{folder} is a run folder: expected another, or a new one")
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(trained.components.state_dict(), folder / MODEL)
    write_atomically(folder / STATE, json.dumps(trained.state.as_dict()))
    run_folders.write_digests(folder, SAVED)
    rows = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    write_atomically(folder / "README.md", CARD.format(rows=rows, name=name or folder))
    return folder
