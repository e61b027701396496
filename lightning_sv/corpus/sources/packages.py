"""Optional packages that read some sources."""

import importlib
from typing import Any

from lightning_sv.errors import ConfigError


def needs(module: str, where: str) -> Any:
    """Import an optional package, or raise an error with its installation command."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        hint = f"make install-text, or pip install {module}"
        raise ConfigError(f"{where}: {module} is not installed ({error}); run {hint}.") from None
