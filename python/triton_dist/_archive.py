"""Read and write packs: zip files of tuning records and, optionally, compiled kernels.

``manifest.json``                    list of the other files, with their SHA-256
``records/<function>.<digest>.json`` winners of one function on one GPU model
``kernels/<digest>/<file>``          the files that Triton's cache has under this digest: metadata
                                     and cubin of a kernel, or a native launcher of Triton

Files in a pack are sorted and have no dates, so packs with equal contents have equal bytes. Nothing
is pickled, and the hash of each file is verified before use. Hashes detect damage but not forgery.
Like a wheel, a pack can run code on the hosts that use it.

The records shipped with this package are in the folder ``records``. It has the layout of
``records/`` in a pack and is not zipped, so that git shows differences.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from triton_dist import _files, knobs
from triton_dist._warn import warn
from triton_dist.errors import CacheWarning, InvalidArgument, NewerSchema, PackRefused

SUFFIX = ".tdpack"
RECORDS_SUFFIX = ".json"
"""Suffix of a single file of records, which can be used in place of a pack without kernels."""
MANIFEST_FORMAT = 2

_MANIFEST = "manifest.json"
_RECORD = re.compile(r"records/[^/\\\0]{1,200}\.json")
_KERNEL = re.compile(r"kernels/([0-9a-f]{64})/([^/\\\0]{1,200}\.(?:json|cubin|so))")
_MAX_BYTES = 1 << 28
"""Maximum size of a file in a pack, in bytes. A larger file is a zip bomb and not a kernel."""
_MAX_JSON_BYTES = 1 << 24
"""Maximum size of the manifest, or of the metadata of a kernel, in bytes. Parsing JSON takes up to
30 times as much memory."""
MAX_RECORDS_BYTES = 1 << 26  # of a file of records
_DAMAGE_ERRORS = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, RuntimeError, ValueError,
    OverflowError, MemoryError,
)  # fmt: skip
"""Exceptions that ``zipfile`` raises for a file that is damaged or not a zip."""
_ZIP_DATE = (1980, 1, 1, 0, 0, 0)  # fixed, so that equal contents give equal files
_ELF, _EM_CUDA = b"\x7fELF", 190  # first bytes of an ELF file, and the ELF machine number of cubins
_ARCHITECTURE = {51: 0, 65: 8}
"""First bit of the GPU architecture in a cubin's ELF flags, for each ELF OS ABI. The ABI is 51 for
cubins of CUDA 12, and 65 for cubins of CUDA 13."""

PACKAGE_RECORDS = Path(__file__).parent / "records"
"""Folder of the records shipped with the package."""

_explicit_packs: list[Path] = []  # packs that the program opened, the latest first
_packs_by_path: dict[Path, Pack | None] = {}  # ``None``: the file is damaged


@dataclass(frozen=True)
class ManifestEntry:
    """One kernel or native module of a pack, as listed in the manifest."""

    name: str
    facts: Mapping[str, str]
    """Inputs of the compilation (source, target, argument types), as text by name."""
    files: Mapping[str, str]
    """SHA-256 by file name."""

    @property
    def is_module(self) -> bool:
        """True for a native module (host code), false for a GPU kernel."""
        return any(name.endswith(".so") for name in self.files)


@dataclass(frozen=True)
class PackedKernel:
    """One kernel or native module with its files."""

    name: str
    facts: Mapping[str, str]
    files: Mapping[str, bytes]
    """Content by file name."""

    @functools.cached_property
    def entry(self) -> ManifestEntry:
        return ManifestEntry(
            self.name, self.facts, {name: sha256(data) for name, data in self.files.items()}
        )


@dataclass(frozen=True)
class PackContents:
    """Contents of a pack, in memory."""

    records: Mapping[str, bytes]
    """File contents by file name, without the folder."""
    kernels: Mapping[str, PackedKernel]
    """Kernels by Triton's digest."""

    def to_bytes(self) -> bytes:
        """Return the bytes of the pack file. They are equal for equal contents."""
        members = {f"records/{name}": data for name, data in self.records.items()}
        for digest, kernel in self.kernels.items():
            members |= {f"kernels/{digest}/{name}": data for name, data in kernel.files.items()}
        manifest = {
            "pack": MANIFEST_FORMAT,
            "records": {name: sha256(data) for name, data in self.records.items()},
            "kernels": {digest: vars(kernel.entry) for digest, kernel in self.kernels.items()},
        }
        members[_MANIFEST] = json.dumps(manifest, indent=1, sort_keys=True).encode() + b"\n"
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as out:
            for name in sorted(members):
                member = zipfile.ZipInfo(name, _ZIP_DATE)
                member.create_system, member.external_attr = 3, (stat.S_IFREG | 0o644) << 16
                out.writestr(member, members[name], zipfile.ZIP_DEFLATED, 9)
        return file.getvalue()


def write(path: Path, contents: PackContents) -> bytes:
    """Write a pack atomically and return its bytes."""
    data = contents.to_bytes()
    if path.suffix == RECORDS_SUFFIX:
        if contents.kernels or len(contents.records) != 1:
            reason = "contains records of one function and GPU model, and no kernels"
            raise InvalidArgument("pack", "--out", str(path), f"*{SUFFIX}: a .json file {reason}")
        (data,) = contents.records.values()
    _files.write(path, data)
    return data


def contents_of_folder(folder: Path) -> list[PackContents]:
    """Return the contents of all packs in ``folder``. Raise ``PackRefused`` if one is not valid."""
    return [Pack(path).contents() for path in sorted(folder.glob(f"*{SUFFIX}"))]


class Pack:
    """An open pack whose manifest matches the zip. Files are read and verified on access.

    Args:
        path: path of a pack, or of a single file of records.
        data: content of the file at ``path``; by default it is read.

    Raises:
        PackRefused: the file is damaged, is not a pack, or has a later format.
        OSError: the file cannot be read.
    """

    def __init__(self, path: Path, data: bytes | None = None) -> None:
        self.path = path
        if data is None and not path.is_file():
            path.stat()  # raises FileNotFoundError
            self._refuse("it is not a regular file")
        data = path.read_bytes() if data is None else data
        if path.suffix == RECORDS_SUFFIX:
            data = PackContents({path.name: data}, {}).to_bytes()
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(data))
        except _DAMAGE_ERRORS as error:
            self._refuse(f"it is not a zip file, or is damaged: {error}")
        self._members = self._checked_members()
        manifest = self._manifest()
        self.records: dict[str, str] = manifest["records"]
        self.kernels = {
            digest: ManifestEntry(**each) for digest, each in manifest["kernels"].items()
        }
        listed = {_MANIFEST, *(f"records/{name}" for name in self.records)}
        for digest, entry in self.kernels.items():
            listed |= {f"kernels/{digest}/{name}" for name in entry.files}
        for name in sorted(listed ^ self._members.keys()):
            where = "zip" if name in listed else "manifest"
            self._refuse(f"it is not in the {where}", name)

    def read_records(self, name: str) -> bytes:
        """Return the text of a file of records. Raise ``PackRefused`` if it is damaged."""
        return self._read(f"records/{name}", self.records[name])

    def kernel(self, digest: str) -> PackedKernel:
        """Return the verified files of a kernel. Raise ``PackRefused`` if a file is not valid."""
        entry = self.kernels[digest]
        files = {
            name: self._read(f"kernels/{digest}/{name}", expected_sha256)
            for name, expected_sha256 in entry.files.items()
        }
        for name, data in files.items():
            flaw = _file_flaw(name, data, digest, entry)
            if flaw:
                self._refuse(flaw, f"kernels/{digest}/{name}")
        return PackedKernel(entry.name, entry.facts, files)

    def contents(self) -> PackContents:
        """Return all verified files. Raise ``PackRefused`` if a file is not valid."""
        return PackContents(
            {name: self.read_records(name) for name in self.records},
            {digest: self.kernel(digest) for digest in self.kernels},
        )

    def _checked_members(self) -> dict[str, zipfile.ZipInfo]:
        members: dict[str, zipfile.ZipInfo] = {}
        for member in self._zip.infolist():
            name = member.orig_filename  # the complete name; zipfile cuts names at a null byte
            if name in members:
                self._refuse("it occurs twice", name)
            if name != _MANIFEST and not (_RECORD.fullmatch(name) or _KERNEL.fullmatch(name)):
                self._refuse("no file of a pack has this name", name)
            max_bytes = _MAX_JSON_BYTES if name.endswith(".json") else _MAX_BYTES
            max_bytes = MAX_RECORDS_BYTES if _RECORD.fullmatch(name) else max_bytes
            if member.file_size > max_bytes:
                self._refuse(f"it has {member.file_size} bytes, the limit is {max_bytes}", name)
            members[name] = member
        return members

    def _manifest(self) -> Any:
        if _MANIFEST not in self._members:
            self._refuse("it has no manifest.json, so it is a different kind of zip")
        try:
            tree = json.loads(self._read(_MANIFEST))
            version = tree["pack"]
            if type(version) is int and version > MANIFEST_FORMAT:
                self._refuse(str(NewerSchema(version, MANIFEST_FORMAT)))
            flaw = next(_manifest_flaws(tree), None)
        except PackRefused:
            raise
        except (
            ValueError, TypeError, KeyError, AttributeError, RecursionError, MemoryError,
        ) as error:  # fmt: skip
            flaw = f"{type(error).__name__}: {error}"
        if flaw:
            self._refuse(flaw, _MANIFEST)
        return tree

    def _read(self, name: str, expected_sha256: str | None = None) -> bytes:
        try:
            data = self._zip.read(self._members[name])
        except _DAMAGE_ERRORS as error:
            self._refuse(f"it is damaged: {error}", name)
        if expected_sha256 is not None and sha256(data) != expected_sha256:
            self._refuse("its SHA-256 is not the one in the manifest", name)
        return data

    def _refuse(self, reason: str, member: str = "") -> NoReturn:
        raise PackRefused(str(self.path), member, reason)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _manifest_flaws(tree: Any) -> Iterator[str]:
    """Yield a sentence for each flaw of a manifest. A malformed manifest may raise exceptions."""
    if tree["pack"] != MANIFEST_FORMAT or type(tree["pack"]) is not int:
        yield f"its format is {tree['pack']!r}, expected {MANIFEST_FORMAT}"
    texts = [*tree["records"].items()]
    for digest, entry in tree["kernels"].items():
        if entry.keys() != {"name", "facts", "files"} or type(entry["name"]) is not str:
            yield f"the entry of kernel {digest} must have name, facts and files, and nothing else"
        kinds = sorted(name.rpartition(".")[2] for name in entry["files"])
        if kinds not in (["cubin", "json"], ["so"]):
            yield f"kernel {digest} has files {kinds}, expected a json and a cubin, or a so"
        texts += [*entry["facts"].items(), *entry["files"].items()]
    if not all(type(text) is str for pair in texts for text in pair):
        yield "it has a value that is not a string where a string is required"


def _file_flaw(name: str, data: bytes, digest: str, entry: ManifestEntry) -> str:
    """Return why a file is not a file of the kernel ``entry``; empty if it is."""
    if name.endswith(".so"):
        return "" if data.startswith(_ELF) else "it is not a native module"
    manifest_target = entry.facts.get("target")
    if name.endswith(".cubin"):
        if not data.startswith(_ELF) or int.from_bytes(data[18:20], "little") != _EM_CUDA:
            return "it is not a cubin"
        flags, shift = int.from_bytes(data[48:52], "little"), _ARCHITECTURE.get(data[7])
        target = manifest_target if shift is None else f"cuda {flags >> shift & 0xFF}"
        return _target_flaw(target, manifest_target)
    try:
        metadata = json.loads(data)
        target = f"{metadata['target']['backend']} {metadata['target']['arch']}"
        kernel_hash = str(metadata["hash"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return "it is not the metadata of a kernel"
    if kernel_hash != digest:
        return f"it belongs to kernel {kernel_hash}"
    return _target_flaw(target, manifest_target)


def _target_flaw(target: str | None, listed: str | None) -> str:
    return "" if listed == target else f"it is for {target}, the manifest says {listed}"


def use(path: Path) -> None:
    """Search this pack before all other packs in this process. Raises like :class:`Pack`."""
    path = path.expanduser().resolve()
    _packs_by_path[path] = Pack(path)
    if path not in _explicit_packs:
        _explicit_packs.insert(0, path)


def pack_locations() -> list[Path]:
    """Return the packs that were passed to :func:`use`, then the folders to search for packs, in
    the order of the search."""
    roots = [knobs.cache_dir.get(), *knobs.autotune_readonly_dirs.get()]
    return [*_explicit_packs, *(root / "packs" for root in roots), PACKAGE_RECORDS]


def packs_in(locations: Iterable[Path]) -> Iterator[Pack]:
    """Yield the packs in ``locations``. Warn once about each pack that cannot be read."""
    for location in locations:
        yield from filter(None, map(open_pack, files_in(location)))


def files_in(location: Path, suffixes: Collection[str] = (SUFFIX,)) -> list[Path]:
    """Return the files with one of ``suffixes`` in the folder ``location``.

    Return ``[location]`` if ``location`` itself has one of the suffixes.
    """
    if location.suffix in suffixes:
        return [location]
    try:
        return sorted(path for path in location.expanduser().iterdir() if path.suffix in suffixes)
    except (OSError, RuntimeError, ValueError):  # the store of the parent folder warns about it
        return []


def open_pack(path: Path) -> Pack | None:
    """Return the pack at ``path``, read once per process.

    Warn once and return ``None`` if it cannot be read.
    """
    if path not in _packs_by_path:
        pack = None
        try:
            pack = Pack(path)
        except PackRefused as error:
            warn(str(error), CacheWarning)
        except OSError as error:
            warn(f"pack {path}: {error}", CacheWarning)
        _packs_by_path[path] = pack
    return _packs_by_path[path]
