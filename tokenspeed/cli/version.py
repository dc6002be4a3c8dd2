"""`tokenspeed version`."""

from __future__ import annotations

from tokenspeed import __version__
from tokenspeed.options import ConfigError


def main(argv: list[str]) -> int:
    """Print the version. It takes no words."""
    if argv and argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    if argv:
        raise ConfigError(f"takes no options, got {argv[0][:100]}")
    print(f"TokenSpeed v{__version__}")
    return 0
