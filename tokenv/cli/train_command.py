"""``tokenv train``, alone or as one of the processes which torchrun started: its options, and how it begins."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast

from tokenv.config.commands import Command, Record, stored_config
from tokenv.config.files import COMMAND_LINE, flatten, resolve
from tokenv.config.schema import MAY_CHANGE_ON_RESUME, Config
from tokenv.core.conversion import check_keys
from tokenv.core.errors import UserError

if TYPE_CHECKING:
    from tokenv.training.process_group import Ranks


@dataclass(frozen=True)
class Train(Command):
    """Train a model: ``with quick seed=3``; a configuration by name or path, then key=value overrides.

    Args:
        config: configuration of the run.
        resume: run folder or checkpoint to resume from; None for a new run.
        title: title of the run's pictures; empty for none, null for its number.
    """

    config: Config
    resume: str | None = None
    title: str | None = None
    stored = True
    # all processes, of which the first one stores and shows the results; without annotation, or it would be an option
    ranks = cast("Ranks | None", None)

    @classmethod
    def resolve(cls, names: list[str], updates: dict[str, Any]) -> Self:
        """Return the command for configurations, or for a run to resume, and the command line; the same on all ranks.

        Raises:
            UserError: an unknown key or value, or one which may not change when a run is resumed.
            FileNotFoundError: there is no such run.
        """
        if cls.ranks is None or cls.ranks.size == 1:
            return cls._resolve(names, updates, 1)
        from tokenv.cli.train import shared_facts

        ranks = cls.ranks
        command = ranks.run_on_all_ranks(lambda: cls._resolve(names, updates, ranks.size))
        ranks.assert_consistent(shared_facts(command.config, command.resume))
        return command

    @classmethod
    def _resolve(cls, names: list[str], updates: dict[str, Any], world: int) -> Self:
        import torch

        from tokenv.config.components import build_components, check_components
        from tokenv.core import checkpoints
        from tokenv.training.checkpointing import check_checkpoint

        own = cls.take_own(updates)
        resume = own.get("resume")
        title = own.get("title")
        if title is not None:
            title = str(title)  # such as 2024
        if resume is None:
            config = resolve(names, updates)
            check_components(config, world)
            return cls(config, title=title)
        path, base = stored_config("resume", str(resume), names)
        check_keys(updates, COMMAND_LINE, Config)
        for key, value in flatten(updates).items():
            if key.partition(".")[0] not in MAY_CHANGE_ON_RESUME:
                raise UserError(
                    f"{key} = {value!r} cannot change when a run is resumed, or it would not be the same run: only "
                    f"{', '.join(MAY_CHANGE_ON_RESUME)} can; leave it out, or start anew with init_from={resume}"
                )
        config = resolve([], updates, base=base)
        components = build_components(config, torch.device("meta"), read_files=False, world=world)
        check_checkpoint(checkpoints.load(path), config.train, components)
        return cls(config, str(path), title)

    @classmethod
    def launch(cls, start: Callable[[type[Command]], Any]) -> Any:
        """Run the command line; of several ranks only the first one stores the run and returns its result."""
        from tokenv.cli.train import report_errors_once
        from tokenv.training.process_group import init_from_torchrun

        with init_from_torchrun() as ranks, report_errors_once(ranks):
            cls.ranks = ranks
            try:
                return start(cls)
            finally:
                cls.ranks = None

    def shortcut(self) -> Callable[[], Any] | None:
        """Return a function which shows the results of a finished run again, or trains as a rank but the first one."""
        from tokenv.cli.train import show_again, train_only

        show = show_again(self.config, self.resume)
        if self.ranks is None or self.ranks.is_first:
            return show
        if show is None:
            return partial(train_only, self.config, self.resume, self.ranks)
        return lambda: None

    def work(self, record: Record) -> dict[str, Any]:
        """Train, then store and show the results."""
        from tokenv.cli.train import train_and_show

        return train_and_show(self.config, self.resume, self.title, record, self.ranks)
