"""Errors of artefacts as ``triton.autotune`` knows failed configs.

It goes on after what ptxas refuses; and among the cubins of a folder some may be for other
arguments, or half a file.
"""

from __future__ import annotations

from triton.runtime.errors import PTXASError

from triton_dist.errors import ArtefactRefused, InvalidArtefact


class RefusedConfig(ArtefactRefused, PTXASError):
    """An ``ArtefactRefused``."""

    __str__ = Exception.__str__


class InvalidConfig(InvalidArtefact, PTXASError):
    """An ``InvalidArtefact``."""

    __str__ = Exception.__str__


def failed_config(error: ArtefactRefused | InvalidArtefact) -> Exception:
    """The same ``error``, and one after which ``triton.autotune`` goes on."""
    if isinstance(error, ArtefactRefused):
        return RefusedConfig(error.kernel, error.where, error.why)
    return InvalidConfig(error.where, error.why)
