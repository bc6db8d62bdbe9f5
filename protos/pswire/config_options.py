"""Gives every option of a command a variable and a key of the job's file.

One rule for all: `--min-workers` is `PS_MIN_WORKERS` and `min_workers`. The parser
itself takes the option first, then the variable, then the file, and says which it was.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

import typer
from typer.core import TyperGroup, TyperOption

from pswire.config_file import (
    CONFIG_VARIABLE,
    ConfigFileError,
    KnownKeys,
    Setting,
    key_of,
    read_settings,
    variable_of,
)

_CONFIG: Final[dict[str, Any]] = {
    "metavar": "FILE",
    "envvar": CONFIG_VARIABLE,
    "help": "TOML file with settings of the job, see docs/configuration.md.",
    "show_default": False,
}
ConfigOption = Annotated[Path | None, typer.Option("--config", **_CONFIG)]
"""For a command that looks at the file; all others have one that takes settings."""

_OF_ONE_CALL: Final = frozenset({"config", "help", "json", "version", "yes"})
"""No setting: what one call prints, and that a person has agreed to it."""


@dataclass(frozen=True, slots=True)
class Value:
    """What an option has come to.

    Attributes:
        key: Its key in the file.
        value: As the command receives it.
        source: Flag, variable, place in the file, or `default`.
    """

    key: str
    value: object
    source: str


class ConfiguredGroup(TyperGroup):
    """The commands of a program, whose options may all be in variables and a file.

    Attributes:
        sections: Of the file, for each command by its first word; `""` for all others.
            What a later section says wins.
        more_keys: What else may be in a section, though no option is called so.
    """

    sections: ClassVar[Mapping[str, tuple[str, ...]]]
    more_keys: ClassVar[Mapping[str, Collection[str]]] = {}

    def __init__(self, **attributes: Any) -> None:  # noqa: ANN401, as typer passes them
        super().__init__(**attributes)
        option = _config_option(self._load)
        for _, command in self.leaves():
            for each in options_of(command):
                each.envvar = each.envvar or variable_of(_key(each))
                each.show_envvar = True
                if each.is_bool_flag and not each.secondary_opts:
                    # Else an option could not undo what a file has switched on.
                    each.secondary_opts = [switch_argument(_key(each), False)]
                    each.show_default = False  # off, as the second name says
            if not any("--config" in each.opts for each in command.params):
                command.params.append(option)

    def leaves(self) -> Iterator[tuple[tuple[str, ...], Any]]:
        """All commands, with the words that call them."""
        return _leaves(self)

    def sections_of(self, words: Sequence[str]) -> tuple[str, ...]:
        """The sections of the command that these words call."""
        return self.sections.get(words[0], self.sections.get("", ()))

    def known_keys(self) -> KnownKeys:
        """What may be in each section that is this program's."""
        known = {name: set(keys) for name, keys in self.more_keys.items()}
        for words, command in self.leaves():
            section = self.sections_of(words)[-1]
            known.setdefault(section, set()).update(map(_key, options_of(command)))
        return known

    def _load(self, context: Any, path: Path) -> None:  # noqa: ANN401, of typer's own
        words = next(w for w, each in self.leaves() if each is context.command)
        try:
            settings = read_settings(path, self.sections_of(words), self.known_keys())
            context.default_map = defaults_of(context, settings)
        except ConfigFileError as error:
            raise typer.BadParameter(str(error), param_hint="--config") from error
        # For the processes that it starts; read again when they may be elsewhere.
        os.environ[CONFIG_VARIABLE] = str(path.absolute())


def options_of(command: Any) -> list[TyperOption]:  # noqa: ANN401, of typer's own
    """The options of a command that are settings."""
    return [
        each
        for each in command.params
        if isinstance(each, TyperOption) and _key(each) not in _OF_ONE_CALL
    ]


def defaults_of(
    context: Any,  # noqa: ANN401, of typer's own
    settings: Mapping[str, Setting],
) -> dict[str, object]:
    """The settings that a command has an option for, by its parameter.

    Raises:
        ConfigFileError: One is none that the option takes.
    """
    defaults: dict[str, object] = {}
    for option in options_of(context.command):
        setting = settings.get(_key(option))
        if setting is None:
            continue
        value: object
        if option.is_flag:
            value = setting.switch()
        elif option.multiple:
            value = setting.texts()
        else:
            value = setting.text()
        try:
            option.process_value(context, value)
        except typer.BadParameter as error:
            raise ConfigFileError(f"{setting.place}: {error.message}") from error
        defaults[option.name] = value
    return defaults


def values_of(
    command: Any,  # noqa: ANN401, of typer's own
    arguments: Sequence[str],
    settings: Mapping[str, Setting],
) -> list[Value]:
    """What the options of a command come to, and from where.

    Raises:
        ConfigFileError: The file has what an option does not take.
        typer.BadParameter: A flag or variable does.
    """
    context = command.context_class(
        command, info_name=command.name, **command.context_settings
    )
    context.default_map = defaults_of(context, settings)
    given, _, _ = command.make_parser(context).parse_args(args=list(arguments))
    found = []
    for option in options_of(command):
        value, origin = option.consume_value(context, given)
        key = _key(option)
        source = {
            "COMMANDLINE": option.opts[0],
            "ENVIRONMENT": str(option.envvar),
            "DEFAULT_MAP": settings[key].place if key in settings else "",
        }.get(origin.name, "default")
        if value is not None:
            value = option.process_value(context, value)
        found.append(Value(key, value, source))
    return found


def switch_argument(key: str, is_on: bool) -> str:
    """An option that is on or off, for the command line of another process."""
    return f"--{'' if is_on else 'no-'}{key.replace('_', '-')}"


def _key(option: TyperOption) -> str:
    return key_of(max(option.opts, key=len))


def _leaves(group: Any) -> Iterator[tuple[tuple[str, ...], Any]]:  # noqa: ANN401
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            for words, leaf in _leaves(command):
                yield (name, *words), leaf
        else:
            yield (name,), command


def _config_option(load: Callable[[Any, Path], None]) -> Any:  # noqa: ANN401
    """`--config` as typer makes options: it has no other public way to one."""
    maker = typer.Typer(add_completion=False)

    def loaded(context: typer.Context, path: Path | None) -> None:
        if path is not None and not context.resilient_parsing:
            load(context, path)

    @maker.command()
    def command(
        config: Annotated[
            Path | None,
            typer.Option(
                "--config",
                is_eager=True,
                expose_value=False,
                callback=loaded,
                **_CONFIG,
            ),
        ] = None,
    ) -> None: ...

    return typer.main.get_command(maker).params[0]
