"""Models from the Hugging Face hub: the only file that knows huggingface_hub.

The library is imported at the first download: it costs a good part of a second, and a start from a
local folder does not need it. HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE are honoured by it,
and TRANSFORMERS_OFFLINE, too.
"""

from __future__ import annotations

import os
from pathlib import Path

from tokenspeed.text.errors import ModelError

_TEXT_FILES = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_WEIGHT_FILES = ["*.safetensors"]
# Folders hold other formats of the same weights; "consolidated" files are a second copy of them.
_IGNORED = ["*/*", "consolidated*"]
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
"""What keeps the library from asking the hub; it reads them in this order."""


def download(repo: str, *, revision: str | None, download_dir: str | None, weights: bool) -> Path:
    """The local snapshot folder of a hub repository. Only safetensors, JSON, templates and
    tokenizer files are fetched, never pickles or code.
    """
    from huggingface_hub import constants, errors, snapshot_download

    at = f"{repo} (revision {revision})" if revision else repo
    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=_TEXT_FILES + _WEIGHT_FILES * weights,
            ignore_patterns=_IGNORED,
        )
    except errors.GatedRepoError:
        raise ModelError(
            f"{at}: access to this model has to be granted; accept its terms on its hub page and "
            "set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"{at}: no such folder and no such model on the hub; check the name, or set HF_TOKEN "
            "if it is private"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{at}: the hub has no such revision of this model") from None
    except errors.LocalEntryNotFoundError as error:
        why = _why_unasked(is_offline=constants.HF_HUB_OFFLINE, error=error)
        raise ModelError(
            f"{at}: not in the local cache, and {why} or give a local folder"
        ) from None
    except (errors.HfHubHTTPError, OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{at}: the download failed: {_short(error)}") from None
    return Path(folder)


def _why_unasked(*, is_offline: bool, error: Exception) -> str:
    """Why the hub does not answer, and what helps, by what is set here."""
    if is_offline:
        name = next((name for name in _OFFLINE if os.environ.get(name)), _OFFLINE[0])
        return f"{name} forbids to ask the hub; unset it,"
    checked = "HF_ENDPOINT and the network" if os.environ.get("HF_ENDPOINT") else "the network"
    return f"the hub cannot be reached ({_short(error)}); check {checked},"


def _short(error: Exception) -> str:
    """The error's cause, or itself, in one short line."""
    text = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:200] + "..."
