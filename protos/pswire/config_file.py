"""One TOML file with the settings of a whole job, for all its processes.

Whatever a process can be told by an option it can be told by a variable, and by this
file; the option wins over the variable, and the variable over the file. Here is how the
file is read and what may be in it; `config_options` gives it to commands, and
`psworker.config` to a script.
"""

import difflib
import json
import os
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pswire.names import printable

CONFIG_VARIABLE: Final = "PS_CONFIG"
"""Names the file, where no `--config` does."""

SHARED_SECTION: Final = "job"
SECTIONS: Final = (
    SHARED_SECTION,
    "coordinator",
    "shard",
    "local",
    "worker",
    "psctl",
)

SHARED_KEYS: Final = frozenset(
    {
        "admin_listen",
        "coordinator",
        "history",
        "insecure",
        "limit",
        "log_dir",
        "log_format",
        "tls_ca",
        "tls_cert",
        "tls_key",
        "token_file",
        "tokens",
        "verbose",
    }
)
"""What means the same to several roles: each takes what it has an option for."""

KnownKeys = Mapping[str, Collection[str]]
"""Sections that a program knows, and what may be in each."""


class ConfigFileError(ValueError):
    """The file is wrong; the text says where, what was read and what to do."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A value of the file.

    Attributes:
        value: As TOML has it.
        place: File, section and key, for people.
    """

    value: object
    place: str

    def switch(self) -> bool:
        """The value of an option that is on or off.

        Raises:
            ConfigFileError: It is none.
        """
        if not isinstance(self.value, bool):
            raise self._other_than("true or false")
        return self.value

    def texts(self) -> list[str]:
        """The values of an option that may be given several times.

        Raises:
            ConfigFileError: It is no list of texts.
        """
        values = self.value if isinstance(self.value, list) else [self.value]
        texts = [each for each in values if isinstance(each, str)]
        if len(texts) < len(values):
            raise self._other_than("a list of texts")
        return texts

    def text(self) -> str:
        """The value of any other option, as it would stand on a command line.

        Raises:
            ConfigFileError: It is neither a text nor a number.
        """
        if isinstance(self.value, bool) or not isinstance(
            self.value, str | int | float
        ):
            raise self._other_than("a text or a number")
        return str(self.value)

    def _other_than(self, wanted: str) -> ConfigFileError:
        return ConfigFileError(
            f"{self.place} is {printable(json.dumps(self.value, default=str))[:80]}, "
            f"and {wanted} is expected"
        )


def variable_of(key: str) -> str:
    """The variable that stands for an option, as in `PS_MIN_WORKERS`."""
    return f"PS_{key.upper()}"


def key_of(option: str) -> str:
    """The key that stands for an option, as in `min_workers` of `--min-workers`."""
    return option.lstrip("-").replace("-", "_")


def read_settings(
    path: str | os.PathLike[str], sections: Sequence[str], known: KnownKeys
) -> dict[str, Setting]:
    """What a file says to a process, by key.

    Args:
        path: The file.
        sections: Of the process; what a later one says wins.
        known: What is checked. Other sections are other programs'.

    Raises:
        ConfigFileError: It can't be read, or has what nobody knows.
    """
    found: dict[str, Setting] = {}
    content = _content(path)
    _check(path, content, known)
    for section in sections:
        for name, value in content.get(section, {}).items():
            found[key_of(name)] = Setting(value, f"{path}: [{section}] {name}")
    return found


def _content(path: str | os.PathLike[str]) -> dict[str, dict[str, object]]:
    try:
        with open(path, "rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise ConfigFileError(
            f"can't read {path}: {error.strerror}; see whether the name is right"
        ) from error
    except (ValueError, RecursionError) as error:  # or bytes that are no UTF-8
        raise ConfigFileError(
            f"{path} is no TOML: {error}; see docs/configuration.md for an example"
        ) from error
    for name, value in content.items():
        if not isinstance(value, dict):
            raise ConfigFileError(
                f"{path}: {printable(name)!r} stands outside of any section: put it "
                f"below one of {_listed(SECTIONS)}"
            )
        if name not in SECTIONS:
            raise ConfigFileError(
                f"{path}: there is no section [{printable(name)}]"
                f"{_nearest(name, SECTIONS)}; sections are {_listed(SECTIONS)}"
            )
    return content


def _check(
    path: str | os.PathLike[str],
    content: Mapping[str, Mapping[str, object]],
    known: KnownKeys,
) -> None:
    for section, keys in ({SHARED_SECTION: SHARED_KEYS} | dict(known)).items():
        seen: dict[str, str] = {}
        for name in content.get(section, {}):
            key = key_of(name)
            if key not in keys:
                homes = [each for each in known if key in known[each]]
                hint = (
                    f": it belongs to {_listed(homes)}"
                    if homes
                    else _nearest(key, keys)
                )
                raise ConfigFileError(
                    f"{path}: [{section}] has no setting {printable(name)!r}{hint}; "
                    "docs/configuration.md says which there are"
                )
            if key in seen:
                raise ConfigFileError(
                    f"{path}: [{section}] has {seen[key]!r} and {name!r}, which are "
                    "the same: leave one of them out"
                )
            seen[key] = name


def _nearest(name: str, among: Collection[str]) -> str:
    near = difflib.get_close_matches(key_of(name), sorted(among), n=1)
    return f": did you mean {near[0]!r}?" if near else ""


def _listed(sections: Collection[str]) -> str:
    return ", ".join(f"[{each}]" for each in sections)
