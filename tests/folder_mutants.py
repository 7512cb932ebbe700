"""Damaged and hostile versions of saved folders, each determined by its number."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from saved_folders import Saved

DEEP = 100_000
HOSTILE: list[Any] = [
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**15, 10**30, 0.5, 1e308, -1e-9),
    *(
        "",
        "x",
        "..",
        ".",
        "../x",
        "../witness/notes.txt",
        "/etc/passwd",
        "a" * 10_000,
        "\ud800",
        "\x00",
        "nan",
        "mapped",
    ),
    *([], {}, [1], [[1, 2], [3]], [None] * 3, [2**40, 2**40], [-1], {"x": 1}, {"shape": [10**12], "dtype": "float32"}),
    *({"$float": "inf"}, {"$float": "x"}, {"$dtype": "int65"}, {"$dtype": "nn"}, {"$dtype": "uint8"}, {"$tuple": 3}),
    *({"$tuple": [1, 2]}, {"$space": "Sphere"}, {"$space": "Discrete", "n": 10**30, "start": 0, "dtype": "int64"}),
    {"$space": "Box", "shape": [10**6, 10**6], "dtype": "float32", "low": 0, "high": 1},
    {"$space": "Box", "shape": [2], "dtype": "object", "low": 0, "high": 1},
    {"$space": "MultiBinary", "n": 10**12},
    {"$space": "MultiDiscrete", "shape": [3], "dtype": "int64", "nvec": [-1, 2, 3], "start": 0},
]
NUMBERS = (-1, 0, 1, 2, 3, 59, 60, 61, 255, 2**15, 2**31 - 1, -(2**31), 2**40, 2**62, -(2**63), 2**63 - 1)


class Mutant:
    """A folder made from a saved one.

    Attributes:
        how: What was done to it.
        saved: What it was made from.
        path: The folder.
        may_differ: Whether other content is right: values were forged along with their checksums, or there were none.
    """

    def __init__(self, saved: list[Saved], number: int, scratch: Path, witness: Path) -> None:
        self._random, self._witness, self._all = random.Random(number), witness, saved
        self.saved = self._random.choice(saved)
        self.path, self.may_differ = scratch / f"mutant-{number}", False
        shutil.copytree(self.saved.path, self.path)
        self.how = ""
        while not self.how:  # one that does not apply to this folder is drawn again
            change = self._random.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
            self.how = change(self) or ""

    # ---------------------------------------------------------------------------------------------- bytes

    def _file(self, *, data: bool = False) -> Path:
        """A file, or one that is no JSON; lock files are left alone but for now and then."""
        files = sorted(path for path in self.path.iterdir() if path.is_file())
        kept = [path for path in files if path.name != "lock" and not (data and path.suffix == ".json")]
        return self._random.choice(kept)

    def _untold(self) -> None:
        """Of a mapped folder that is not sealed nothing tells what it was."""
        if self.saved.kind == "mapped" and self.saved.state != "closed":
            self.may_differ = True

    def flip(self) -> str:
        file = self._file()
        content = bytearray(file.read_bytes())
        if not content:
            return ""
        for _ in range(self._random.choice((1, 1, 1, 2, 3))):
            place = self._random.randrange(len(content))
            content[place] ^= 1 << self._random.randrange(8)
        file.write_bytes(content)
        self._untold()
        return f"flip {file.name}"

    def cut(self) -> str:
        file = self._file()
        size = file.stat().st_size
        length = self._random.choice((0, 1, max(size - 1, 0), self._random.randrange(size + 1)))
        os.truncate(file, length)
        return f"cut {file.name} to {length} of {size}"

    def lengthen(self) -> str:
        file = self._file()
        with open(file, "ab") as opened:
            opened.write(self._random.choice((b"\0", b"\0" * 4096, b" ", self._random.randbytes(100))))
        return f"lengthen {file.name}"

    def claim(self) -> str:
        """A file that says it is a terabyte, without one byte more."""
        file = self._file()
        os.truncate(file, 1 << 40)
        return f"claim {file.name}"

    def scramble(self) -> str:
        file = self._file()
        content = file.read_bytes()
        first, length = self._random.randrange(len(content) + 1), self._random.randrange(1, 64)
        file.write_bytes(content[:first] + self._random.randbytes(length) + content[first + length :])
        self._untold()
        return f"scramble {file.name}"

    def swap(self) -> str:
        one, other = self._file(), self._file()
        if one == other:
            return ""
        content = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(content)
        self._untold()
        return f"swap {one.name} and {other.name}"

    def exchange(self) -> str:
        """A file of another folder in the place of one of this."""
        file = self._file()
        others = sorted(path for path in self._random.choice(self._all).path.iterdir() if path.suffix == file.suffix)
        if not others:
            return ""
        other = self._random.choice(others)
        file.write_bytes(other.read_bytes())
        self.may_differ = True  # a whole folder may have come about, or one without a seal
        return f"exchange {file.name} for {other}"

    def remove(self) -> str:
        file = self._random.choice(sorted(path for path in self.path.iterdir() if path.is_file()))
        file.unlink()
        # An episode that is not there was evicted; and a folder without a seal is one that was never closed.
        self.may_differ = self.saved.kind == "episodes" or file.name == "seal.json"
        return f"remove {file.name}"

    # ---------------------------------------------------------------------------------------------- JSON

    def _changed(self, tree: Any) -> str:
        """Change something in a JSON value."""
        places: list[tuple[Any, Any]] = []

        def collect(part: Any) -> None:
            for key in part.keys() if isinstance(part, dict) else range(len(part)):
                places.append((part, key))
                if isinstance(part[key], (dict, list)):
                    collect(part[key])

        collect(tree)
        if not places:
            return ""
        holder, key = self._random.choice(places)
        way = self._random.randrange(8)
        if way == 0:
            del holder[key]
        elif way == 1 and isinstance(holder, dict):
            holder[f"{key}_"] = holder.pop(key)
        elif way == 2:
            other, place = self._random.choice(places)
            with contextlib.suppress(KeyError, IndexError):
                value = json.loads(json.dumps(other[place]))
                holder[key] = value
        elif way == 3 and isinstance(holder[key], (int, float)):
            holder[key] = holder[key] + self._random.choice((-1, 1, 2, 1000))
        else:
            holder[key] = self._random.choice(HOSTILE)
        return f"{way} at {key!r}"

    def hostile_json(self) -> str:
        """Any value of a JSON file is another one; the checksum fits, is left out, or (seldom) does not fit."""
        file = self._random.choice(sorted(self.path.glob("*.json")))
        tree = json.loads(file.read_text())
        what = self._changed(tree)
        fit = self._random.choice(("fit", "fit", "without", "unfit"))
        write_json(file, tree, fit)
        self.may_differ = fit != "unfit"
        return f"{file.name}: {what}, checksum {fit}"

    def hostile_text(self) -> str:
        """What is hardly JSON."""
        file = self._random.choice(sorted(self.path.glob("*.json")))
        text = file.read_text()
        rest = text.partition("{")[2]
        texts = {
            "deep list": f'{{"a": {"[" * DEEP}{"]" * DEEP}, {rest}',
            "deep objects": '{"a":' * DEEP + "1" + "}" * DEEP,
            "long number": f'{{"a": {"9" * 100_000}, {rest}',
            "twice": f'{{"format": "x", "format": "y", {rest}',
            "NaN": f'{{"a": NaN, {rest}',
            "infinite": f'{{"a": 1e999, {rest}',
            "other format": text.replace("rlstore ", "rlstore  "),
            "nothing": "",
            "null": "null",
            "list": f"[{text}]",
            "many names": f'{{"a": {{{", ".join(f"{chr(34)}{i}{chr(34)}: 0" for i in range(50_000))}}}, {rest}',
        }
        way = self._random.choice(sorted(texts))
        file.write_text(texts[way])
        self.may_differ = way == "infinite"
        return f"{file.name}: {way}"

    # ---------------------------------------------------------------------------------------------- headers

    def lying_header(self) -> str:
        """The header of a safetensors file tells something else; what tells of the file fits."""
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            return ""
        file = self._random.choice(files)
        header, data = split(file)
        length, what = None, ""
        if self._random.random() < 0.25:
            length = self._random.choice((0, 1, 2**63, 2**64 - 1, 2**32, len(data), 10**9))
            what = f"length {length}"
        else:
            what = self._changed(header)
        join(file, header, data, length)
        self._refit(file)
        self.may_differ = True
        return f"header of {file.name}: {what}"

    # ---------------------------------------------------------------------------------------------- forged values

    def forge(self) -> str:
        """Numbers in tensors or tables are others, and every checksum fits."""
        files = [
            path for path in self.path.iterdir() if path.suffix in (".safetensors", ".bin") and path.stat().st_size
        ]
        file = self._random.choice(sorted(files))
        self.may_differ = True
        if file.suffix == ".bin" and self.saved.kind == "snapshot":
            return self._forge_record(file)
        if file.suffix == ".bin":
            content = bytearray(file.read_bytes())
            what = self._put(content, self._random.choice((4, 8)))
            file.write_bytes(content)
            self._reseal()
            return f"forge {file.name}: {what}"
        header, data = split(file)
        name = self._random.choice(sorted(name for name in header if name != "__metadata__"))
        begin, end = header[name]["data_offsets"]
        if begin == end:
            return ""
        content = bytearray(data[begin:end])
        wide = {"I64": 8, "F64": 8, "I32": 4, "F32": 4}.get(header[name]["dtype"], 1)
        what = self._put(content, wide)
        join(file, header, data[:begin] + bytes(content) + data[end:])
        self._refit(file)
        return f"forge {name}: {what}"

    def _forge_record(self, file: Path) -> str:
        """Something in the records of a segment is another one, and every checksum fits."""
        records = split_records(file)
        if not records:
            return ""
        number, way = self._random.randrange(len(records)), self._random.randrange(8)
        header, parts = records[number]
        if way == 0:
            records.pop(number)
            what = "left out"
        elif way == 1:
            records.insert(self._random.randrange(len(records) + 1), records[self._random.randrange(len(records))])
            what = "there twice"
        elif way == 2:
            what = self._changed(header)
        else:
            name = self._random.choice([name for name, part in parts.items() if part] or [""])
            if not name:
                return ""
            content = bytearray(parts[name])
            what = f"{name} {self._put(content, {'I64': 8, 'I32': 4}.get(header[name]['dtype'], 1))}"
            parts[name] = bytes(content)
            header[name]["crc32"] = zlib.crc32(content)
        join_records(file, records)
        manifest = self.path / "manifest.json"
        tree = json.loads(manifest.read_text())
        for segment in tree["segments"]:
            segment["bytes"] = (self.path / segment["name"]).stat().st_size
        write_json(manifest, tree)
        return f"forge record {number} of {file.name}: {what}"

    def _put(self, content: bytearray, wide: int) -> str:
        """Put numbers into some places."""
        if len(content) < wide:
            content[0] ^= 0xFF
            return "the first byte"
        if self._random.randrange(8) == 0:
            number = self._random.choice(NUMBERS)
            content[:] = (number % (1 << 8 * wide)).to_bytes(wide, "little") * (len(content) // wide) + bytes(
                len(content) % wide
            )
            return f"all {number}"
        done = []
        for _ in range(self._random.choice((1, 1, 2, 5))):
            place, number = wide * self._random.randrange(len(content) // wide), self._random.choice(NUMBERS)
            content[place : place + wide] = (number % (1 << 8 * wide)).to_bytes(wide, "little")
            done.append(f"{number} at {place}")
        return f"{wide}: " + ", ".join(done)

    def _refit(self, file: Path) -> None:
        """Make what tells of a safetensors file fit it."""
        if self.saved.kind == "episodes":
            _refit_episode(file)
            return
        manifest = self.path / "manifest.json"
        tree = json.loads(manifest.read_text())
        tree["file"]["bytes"] = file.stat().st_size
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            header, data = split(file)
            for name, entry in header.items():
                tree["tensors"][name]["crc32"] = zlib.crc32(data[slice(*entry["data_offsets"])])
                tree["tensors"][name]["shape"] = entry["shape"]
        write_json(manifest, tree)

    def _reseal(self) -> None:
        """Make the seal fit the files."""
        seal = self.path / "seal.json"
        if not seal.exists():
            return
        tree = json.loads(seal.read_text())
        for name, entry in tree["files"].items():
            content = (self.path / name).read_bytes()
            if len(entry["crc32"]) == 1:
                entry["crc32"] = [zlib.crc32(content)]
            elif entry["crc32"]:  # rows: one segment a lane
                lanes = len(entry["crc32"])
                row = len(content) // lanes
                schema = json.loads((self.path / "manifest.json").read_text())["schema"]
                stacks = max(stack for _, _, stack, _ in schema["fields"].values())
                used = row // (schema["steps"] + stacks) * entry["extent"]
                entry["crc32"] = [zlib.crc32(content[lane * row : lane * row + used]) for lane in range(lanes)]
        write_json(seal, tree)

    # ---------------------------------------------------------------------------------------------- names and links

    def lead_out(self) -> str:
        """Names in a manifest that lead out of the folder; the checksum fits."""
        manifest = self.path / "manifest.json"
        tree = json.loads(manifest.read_text())
        if self.saved.kind != "snapshot":
            return ""
        outside = self._random.choice(
            (
                "../witness/snapshot",
                "../witness/mapped",
                "../witness/episodes",
                str(self._witness / "mapped"),
                ".",
                "..",
            )
        )
        settings = tree["settings"]
        way = self._random.randrange(3)
        if way == 0:
            tree["file"]["name"] = f"{outside}/tensors-000001.safetensors"
        elif way == 1 and "options" in settings:
            settings["options"].update(memory="mapped", path=outside)
        elif way == 2 and "snapshot_dir" in settings:
            settings.update(save_snapshot=True, snapshot_dir=outside)
        else:
            return ""
        write_json(manifest, tree)
        return f"lead out {way} to {outside}"

    def link(self) -> str:
        """Something else in the place of a file."""
        file = self._random.choice(sorted(path for path in self.path.iterdir() if path.is_file()))
        copy = self._witness / "copies" / self.saved.path.relative_to(self.saved.path.parents[1]) / file.name
        ways: dict[str, Callable[[], object]] = {
            "a link outside": lambda: file.symlink_to(self._witness / "notes.txt"),
            "a link to a copy": lambda: file.symlink_to(copy),
            "a link to itself": lambda: file.symlink_to(file.name),
            "a link to zeros": lambda: file.symlink_to("/dev/zero"),
            "a link to nothing": lambda: file.symlink_to(self._witness / "new"),
            "a FIFO": lambda: os.mkfifo(file),
            "a folder": file.mkdir,
            "a link to a folder": lambda: file.symlink_to(self._witness),
        }
        way = self._random.choice(sorted(ways))
        file.unlink()
        ways[way]()
        return f"{way} in the place of {file.name}"

    def plant(self) -> str:
        """Links and folders at names that a save writes to."""
        numbers = [f"tensors-{number:06}.safetensors" for number in (1, 2, 3)]
        names = ["manifest.json.new", "lock", "seal.json", "seal.json.new", "episode-000000000099.safetensors.new"]
        bins = [f"{path.name}.new" for path in self.path.glob("*.bin")]
        name = self._random.choice([*numbers, *names, *bins])
        if (self.path / name).exists() and name != "lock":
            return ""
        (self.path / name).unlink(missing_ok=True)
        target = self._random.choice(("notes.txt", "new", "a folder"))
        if target == "a folder":
            (self.path / name).mkdir()
        else:
            (self.path / name).symlink_to(self._witness / target)
        return f"plant {target} at {name}"


_WEIGHTS: dict[Callable[[Mutant], str], int] = {
    Mutant.flip: 24,
    Mutant.cut: 8,
    Mutant.lengthen: 3,
    Mutant.claim: 1,
    Mutant.scramble: 5,
    Mutant.swap: 4,
    Mutant.exchange: 5,
    Mutant.remove: 3,
    Mutant.hostile_json: 20,
    Mutant.hostile_text: 4,
    Mutant.lying_header: 8,
    Mutant.forge: 14,
    Mutant.lead_out: 6,
    Mutant.link: 7,
    Mutant.plant: 3,
}


def mutants(saved: list[Saved]) -> Callable[[int, Path, Path], Mutant]:
    """Makes the mutant of a number: in which folder, beside which witness."""
    return lambda number, scratch, witness: Mutant(saved, number, scratch, witness)


def write_json(file: Path, tree: Any, fit: str = "fit") -> None:
    """Write a manifest whose checksum fits; it is left out ("without"), or of something else ("unfit")."""
    before = tree.pop("crc32", 1) if isinstance(tree, dict) else 1
    text = json.dumps(tree, indent=1)
    if fit != "without" and isinstance(tree, dict) and tree:
        checksum = zlib.crc32(text.encode()) if fit == "fit" else before
        text = text.removesuffix("\n}") + f',\n "crc32": {json.dumps(checksum)}\n}}'
    file.write_text(text)


def split(file: Path) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a safetensors file."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join(file: Path, header: Any, data: bytes, length: int | None = None) -> None:
    """Write a safetensors file."""
    text = json.dumps(header).encode()
    file.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


_FRAME = struct.Struct("<8sIIQ")  # of a record: a mark, the bytes of its header, its checksum, the bytes of the data


def split_records(file: Path) -> list[tuple[dict[str, Any], dict[str, bytes]]]:
    """The header and the tensors of each record of a segment."""
    content, offset, records = file.read_bytes(), 0, []
    wide = {"I64": 8, "F64": 8, "I32": 4, "F32": 4}
    while offset < len(content):
        _, header_bytes, _, data_bytes = _FRAME.unpack_from(content, offset)
        begin = offset + _FRAME.size + header_bytes
        header, parts, at = json.loads(content[offset + _FRAME.size : begin]), {}, begin
        for name, entry in header.items():
            end = at + math.prod(entry["shape"]) * wide.get(entry["dtype"], 1)
            parts[name], at = content[at:end], end
        assert at == begin + data_bytes
        records.append((header, parts))
        offset = at
    return records


def join_records(file: Path, records: list[tuple[dict[str, Any], dict[str, bytes]]]) -> None:
    """Write a segment."""
    pieces = []
    for header, parts in records:
        text, data = json.dumps(header, separators=(",", ":")).encode(), b"".join(parts.values())
        pieces.append(_FRAME.pack(b"rlstrow1", len(text), zlib.crc32(text), len(data)) + text + data)
    file.write_bytes(b"".join(pieces))


def _refit_episode(file: Path) -> None:
    names = {"I64": "int64", "F32": "float32", "BOOL": "bool", "I32": "int32", "U8": "uint8", "F64": "float64"}
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        header, data = split(file)
        metadata = header["__metadata__"]
        metadata.pop("crc32", None)
        forms = {
            name: [f"torch.{names[entry['dtype']]}", entry["shape"], zlib.crc32(data[slice(*entry["data_offsets"])])]
            for name, entry in header.items()
            if name != "__metadata__"
        }
        metadata["crc32"] = str(zlib.crc32(json.dumps([metadata, forms], sort_keys=True).encode()))
        join(file, header, data)
