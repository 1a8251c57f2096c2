"""Decide whether a tuner would use a record now.

:func:`verdict` compares the record with this environment. :func:`verdicts_by_import` also compares
code and config space. To do this, it imports the function's module in a separate process.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from triton_dist import _files, knobs
from triton_dist._tuning.source.stale import changes, package_path
from triton_dist._tuning.values import (
    Config,
    ConfigSpace,
    Fingerprint,
    Key,
    TuningRecord,
    codec,
    validity,
)
from triton_dist._tuning.values.fingerprint import OlderFingerprint, ShippedFingerprint
from triton_dist._tuning.values.record import differences
from triton_dist.errors import NoSuchFunction

if TYPE_CHECKING:
    from triton_dist.tune import AutoTuner

IMPORT_SECONDS = 120.0
"""Time limit for importing one module and comparing its records."""

OTHER_FUNCTION_REASON = "it is of another function"
OWN_PACKAGES = {"triton_dist"}
"""Packages whose modules are imported in this process, also without ``--import``."""


class Verdict(NamedTuple):
    """Whether a record would be used now, and why."""

    is_used: bool | None
    """``None``: unknown."""
    reasons: tuple[str, ...] = ()
    """Reasons why the record is not used, or why this is unknown."""
    accepted_differences: tuple[str, ...] = ()
    """Differences that do not invalidate the record."""
    is_own_record: bool = True
    """Whether the present function would write its record under the record's key and signature."""
    may_be_dropped: bool = False
    """Whether ``prune_fn`` may drop the winner, in which case the record is not used."""
    needs_import: bool = False
    """Whether a verdict that is unknown may be decided by importing the module."""


def verdict(
    record: TuningRecord, ranks: Mapping[str, str], ignores_settings: bool = False, module: str = ""
) -> Verdict:
    """Compare the hardware, versions, ranks and source files of ``record`` with this environment.
    Runs no user code.

    Args:
        ranks: facts about the group that would call the function, such as ``world_size``. They
            replace the recorded facts.
        ignores_settings: accept the settings of the record. For other hardware, the verdict is then
            "unknown" instead of "not used".
        module: module that contains the function now; default: the recorded module.
    """
    from triton_dist.runtime.device import current_device
    from triton_dist.runtime.triton_compat import software_versions

    recorded, hardware = record.fingerprint, current_device().facts()
    if ignores_settings and recorded.hardware.get("gpu") != hardware.get("gpu"):
        return Verdict(None, (f"it was made on {record.key.hardware}",))
    topology = {**recorded.topology, **ranks}
    now = dataclasses.replace(
        recorded, hardware=hardware, software=software_versions(), topology=topology
    )
    strict = knobs.autotune_version_check.get()
    found = list(
        differences(recorded, _with_settings_of(recorded, now) if ignores_settings else now)
    )
    reasons = tuple(d.sentence for d in found if strict or not d.is_patch_level)
    if reasons:
        return Verdict(False, reasons)
    if not record.key.module:
        return Verdict(None, ("the record does not name the module of the function",))
    reasons, unknown = _changes(record, module)
    if reasons:
        return Verdict(False, reasons)
    is_same = recorded.source and not unknown
    code = "its code is the same" if is_same else "its code may have changed"
    why = f"{code}; its config space is compared with --import, which runs its module"
    return Verdict(None, (why,), needs_import=True)


def _changes(record: TuningRecord, module: str) -> tuple[tuple[str, ...], list[str]]:
    """Return the changed statements that the record depends on, and what could not be compared."""
    if isinstance(record.fingerprint, (OlderFingerprint, ShippedFingerprint)):
        return (), []
    where = module or record.key.module
    found, unknown = changes(record.fingerprint.source, where, record.key.function)
    return tuple(found), unknown


def is_own_package(module: str) -> bool:
    """Return whether importing ``module`` runs no user code."""
    return module.partition(".")[0] in OWN_PACKAGES


def verdicts_by_import(
    module: str,
    named_records: Sequence[tuple[str, TuningRecord]],
    ranks: Mapping[str, str],
    ignores_settings: bool = False,
) -> list[Verdict]:
    """Import ``module`` and return the verdict on each record.

    A user's module is imported in a new process, which is killed after ``IMPORT_SECONDS``. The
    other arguments are described at :func:`verdict`.

    Args:
        named_records: the records, each with the name of its function in the module.
    """
    if is_own_package(module):
        return _verdicts(module, named_records, ranks, ignores_settings)
    with tempfile.TemporaryDirectory(prefix="triton_dist-import-") as folder:
        request = pickle.dumps((sys.path, module, named_records, dict(ranks), ignores_settings))
        Path(folder, "request").write_bytes(request)
        with Path(folder, "output").open("wb") as output:
            paths = os.pathsep.join(map(os.path.abspath, sys.path))
            process = subprocess.Popen(
                [sys.executable, "-c", f"import {__name__} as v; v._answer_request({folder!r})"],
                env=knobs.environment() | {"PYTHONPATH": paths},
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
            try:
                why = f"its process ended with status {process.wait(IMPORT_SECONDS)}"
            except subprocess.TimeoutExpired:
                why = f"its process did not end within {IMPORT_SECONDS:.0f} s"
            finally:
                with suppress(ProcessLookupError):  # kill the children of the process too
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        try:
            answer = json.loads(Path(folder, "answer").read_bytes())
        except (OSError, ValueError):
            last = Path(folder, "output").read_bytes().decode("utf-8", "replace").split("\n")[-2:-1]
            return [Verdict(None, (f"{module}: {': '.join([why, *last])}",))] * len(named_records)
    return [Verdict(used, tuple(why), tuple(accepted), *rest)
            for used, why, accepted, *rest in answer]  # fmt: skip


def _answer_request(folder: str) -> None:
    """Write the verdicts for the request in ``folder``. Runs in a process of its own."""
    path, *request = pickle.loads(Path(folder, "request").read_bytes())
    sys.path[:] = path
    _files.write(Path(folder, "answer"), json.dumps(_verdicts(*request)).encode())
    os._exit(0)  # threads that the module started may never end


def _verdicts(
    module: str,
    named_records: Sequence[tuple[str, TuningRecord]],
    ranks: Mapping[str, str],
    ignores_settings: bool,
) -> list[Verdict]:
    try:
        loaded = load_module(module)
    except NoSuchFunction as error:
        return [Verdict(None, (str(error),))] * len(named_records)

    @functools.cache
    def validator_of(function: str) -> Validator:
        validator = Validator(tuned_function_in(loaded, function), ranks, ignores_settings)
        if module.endswith(".py"):
            validator.identity = validator.identity._replace(module=os.path.abspath(module))
        return validator

    verdicts = []
    for function, record in named_records:
        try:
            verdicts.append(validator_of(function).verdict(record))
        except NoSuchFunction as error:
            verdicts.append(Verdict(None, (str(error),)))
    return verdicts


def _with_settings_of(recorded: Fingerprint, now: Fingerprint) -> Fingerprint:
    software = {name: fact for name, fact in now.software.items() if name != "settings"}
    if "settings" in recorded.software:
        software["settings"] = recorded.software["settings"]
    return dataclasses.replace(now, software=software)


class Validator:
    """Comparison of a tuned function with its records, without a call of the function.

    This process belongs to no group of ranks. Facts about the group are taken from ``ranks``, or,
    if they are missing there, from the record.
    """

    def __init__(
        self, tuned: AutoTuner[..., Any], ranks: Mapping[str, str], ignores_settings: bool
    ) -> None:
        self._tuned, self._ranks, self._ignores_settings = tuned, ranks, ignores_settings
        self._fingerprint, self.identity = tuned.fingerprint(), tuned.identity()

    def verdict(self, record: TuningRecord) -> Verdict:
        names = (self.identity.function, f"{self.identity.module}.{self.identity.function}")
        if record.key.function not in names:  # the second name is used in schema 1
            return Verdict(None, (OTHER_FUNCTION_REASON,))
        space = self._space(record.key)
        is_whole = space is self._tuned.config_space
        current = self._fingerprint if is_whole else self._tuned.fingerprint(space)
        topology = {**current.topology, **record.fingerprint.topology, **self._ranks}
        now = dataclasses.replace(current, topology=topology)
        if self._ignores_settings:
            now = _with_settings_of(record.fingerprint, now)
        found = validity(record, now, space, knobs.autotune_version_check.get())
        text, hardware = record.key.text, record.key.hardware
        own = Key(self.identity.function, text, hardware, *self.identity[1:]).with_signature_of(
            current
        )
        is_own = (own.module, own.signature) == (record.key.module, record.key.signature)
        if found.reasons:
            rest = tuple(each for each in found.reasons if not each.startswith("source: "))
            statements, _ = _changes(record, self.identity.module)
            if statements and rest != found.reasons:  # prefer ``statements``: with line numbers
                return Verdict(False, (*statements, *rest), (), is_own)
            return Verdict(False, found.reasons, (), is_own)
        may_be_dropped = self._tuned.prune_fn is not None and record.is_shipped
        return Verdict(True, (), found.accepted, is_own, may_be_dropped)

    def _space(self, key: Key) -> ConfigSpace:
        """Return the config space without the parameters that the recorded call passed as
        arguments, which were not tuned."""
        space: ConfigSpace = self._tuned.config_space
        if key.passed_values is None:
            return space
        text, digest = key.passed_values
        try:
            given = Config(ast.literal_eval(text.removeprefix("with ")))
        except (ValueError, SyntaxError):  # some values are not literals
            given = Config({})
        return space.without(given) if given.digest == digest else space


def load_module(name: str) -> ModuleType:
    """Import a module by its dotted name, or by the path of its ``.py`` file.

    Tuned functions that are called during the import do not tune.

    Raises:
        NoSuchFunction: the module does not exist, or its import fails.
    """
    if "" not in sys.path:  # modules in the current folder can be imported
        sys.path.insert(0, "")
    try:
        with knobs.with_value(knobs.autotune.variable, "0"):
            if name.endswith(".py"):
                return _from_file(Path(name).resolve())
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a script may call sys.exit
        raise NoSuchFunction(
            name,
            f"the module cannot be imported: {type(error).__name__}: {error}",
            "Pass a dotted name that can be imported from this folder, or the path of the file",
        ) from error


def tuned_function_in(module: ModuleType, function: str) -> AutoTuner[..., Any]:
    """Return the tuned ``function`` (``name`` or ``Class.name``) of ``module``.

    Raises:
        NoSuchFunction: the module has no such function, or the function is not tuned.
    """
    from triton_dist.tune import AutoTuner  # imports torch, which other subcommands do not need

    value: Any = module
    for part in function.split("."):
        try:
            value = getattr(value, part)
        except AttributeError as error:
            raise NoSuchFunction(
                f"{module.__name__}:{function}",
                f"{getattr(value, '__name__', value)!r} has no {part!r}",
                "Pass the name in the module: function, or Class.method",
            ) from error
    if not isinstance(value, AutoTuner):
        raise NoSuchFunction(
            f"{module.__name__}:{function}",
            f"it is an object of {type(value)}, not a tuned function",
            "Pass a function that is decorated with triton_dist.tune.autotune",
        )
    return value


def _from_file(path: Path) -> ModuleType:
    """Import a file: a module of a package by its dotted name, a script by a name with a digest.
    The digest distinguishes scripts with equal names, and a ``profile.py`` from Python's module."""
    parts, root = package_path(path)
    sys.path.insert(0, str(root))
    if len(parts) > 1:
        return importlib.import_module(".".join(parts))
    name = f"{path.stem}_{codec.digest(str(path))[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
