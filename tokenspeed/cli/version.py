"""`tokenspeed version`."""

from __future__ import annotations

from tokenspeed import __version__
from tokenspeed.options import ConfigError

_HELP = """usage: tokenspeed version      (tokenspeed --version is the same)

Print the version of TokenSpeed. tokenspeed env prints those of torch and the rest as well."""


def main(argv: list[str]) -> int:
    """Print the version. It takes no words."""
    if argv and argv[0] in ("-h", "--help"):
        print(_HELP)
        return 0
    if argv:
        raise ConfigError(f"takes no options, got {argv[0][:100]}")
    print(f"TokenSpeed v{__version__}")
    return 0
