"""The GGUF reader: what it accepts, and that no number in a file is trusted."""

import os
import struct
import time

import gguf
import numpy as np
import pytest

from tests.support.gguf_writer import Tensor, edit_gguf, read_gguf, split_gguf, string, value, write_gguf
from tokenmill.errors import ModelFileError, UnsupportedModel
from tokenmill.weights.gguf import GGUFFile, open_gguf

METADATA = {
    "general.architecture": "llama",
    "a.small": np.uint8(7),
    "a.signed": np.int8(-3),
    "a.big": np.uint64(1 << 60),
    "a.float": 0.5,
    "a.double": np.float64(0.1),
    "a.flag": True,
    "a.words": ["one", "two", "", "düë"],
    "a.numbers": np.array([1, -2, 3], np.int32),
    "a.flags": np.array([True, False]),
    "a.empty": [],
    "a.nested": [["x", "y"], ["z"]],
}


def tensors():
    rng = np.random.default_rng(0)
    return {
        "a.weight": Tensor.f32(rng.standard_normal((3, 5))),
        "b.weight": Tensor.quantised("Q4_0", rng.standard_normal((2, 64))),
        "c.bias": Tensor.f32(rng.standard_normal(7)),
    }


@pytest.fixture
def path(tmp_path):
    return write_gguf(tmp_path / "small.gguf", METADATA, tensors())


def refused(path, *words, error=ModelFileError):
    """Opening fails, within a second, with a message that has all the words."""
    started = time.monotonic()
    with pytest.raises(error) as raised:
        GGUFFile(path)
    assert time.monotonic() - started < 1
    for word in (path.name, *words):
        assert str(word) in str(raised.value)


class TestAccepts:
    @pytest.mark.parametrize("version", [2, 3])
    @pytest.mark.parametrize("alignment", [8, 32, 4096])
    def test_values_and_tensors(self, tmp_path, version, alignment):
        keys = METADATA | {"general.alignment": alignment}
        path = write_gguf(tmp_path / "m.gguf", keys, tensors(), version=version, alignment=alignment)
        file = GGUFFile(path)
        assert list(file.metadata) == list(keys)
        for key, expected in keys.items():
            got = file.metadata[key]
            assert np.array_equal(got, expected) if isinstance(expected, np.ndarray) else got == expected, key
        for name, tensor in tensors().items():
            info = file.tensors[name]
            assert (info.shape, info.format) == (tensor.shape, tensor.format)
            assert bytes(info.data) == bytes(tensor.data)

    def test_agrees_with_the_gguf_package(self, path):
        theirs = gguf.GGUFReader(path)
        mine = GGUFFile(path)
        assert [t.name for t in theirs.tensors] == list(mine.tensors)
        for t in theirs.tensors:
            info = mine.tensors[t.name]
            assert (info.offset, info.nbytes, info.format) == (t.data_offset, t.n_bytes, t.tensor_type.name)

    def test_reads_what_the_gguf_package_writes(self, tmp_path):
        writer = gguf.GGUFWriter(tmp_path / "w.gguf", "llama")
        writer.add_array("words", ["a", "bc"])
        writer.add_tensor("x", np.arange(6, dtype=np.float32).reshape(2, 3))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        file = GGUFFile(tmp_path / "w.gguf")
        assert file.metadata["words"] == ["a", "bc"]
        assert file.tensors["x"].shape == (2, 3)
        assert file.tensors["x"].data.view(np.float32).tolist() == [0, 1, 2, 3, 4, 5]

    def test_an_array_is_decoded_when_asked_for_and_once(self, path):
        file = GGUFFile(path)
        assert type(file.metadata._values["a.words"]).__name__ == "_LazyArray"
        assert file.metadata["a.words"] is file.metadata["a.words"]

    def test_the_default_model_opens_in_a_blink(self, smollm2_path):
        times = []
        for _ in range(3):
            started = time.perf_counter()
            file = GGUFFile(smollm2_path)
            times.append(time.perf_counter() - started)
        assert min(times) < 0.3
        assert (len(file.tensors), len(file.metadata["tokenizer.ggml.tokens"])) == (272, 49152)

    def test_every_stored_format(self, tmp_path):
        """The name of a file is a recipe, not a type: formats mix, and general.file_type is not trusted."""
        from tokenmill.quant.formats import BLOCKS

        made = {
            f"{name}.weight": Tensor.quantised(name, np.random.default_rng(1).standard_normal((2, 256)))
            for name in BLOCKS
        }
        file = GGUFFile(write_gguf(tmp_path / "mixed-Q4_K_M.gguf", {"general.file_type": 15}, made))
        assert {name: info.format for name, info in file.tensors.items()} == {n: t.format for n, t in made.items()}


# ---- headers that lie (BC-083)


def raw(kv=(), infos=(), *, magic=b"GGUF", version=3, num_tensors=None, num_values=None, data=256):
    """A file from header pieces, its counts as they should be unless given."""
    counts = struct.pack(
        "<IQQ",
        version & 0xFFFFFFFF,
        len(infos) if num_tensors is None else num_tensors,
        len(kv) if num_values is None else num_values,
    )
    header = magic + counts + b"".join(kv) + b"".join(infos)
    return header + b"\0" * (-len(header) % 32) + b"\0" * data


def pair(key, item):
    return string(key) + (item if isinstance(item, bytes) else value(item))


def info(name="t", dims=(8,), kind=0, offset=0, num_dims=None):
    return (
        string(name)
        + struct.pack("<I", len(dims) if num_dims is None else num_dims)
        + struct.pack(f"<{len(dims)}Q", *dims)
        + struct.pack("<IQ", kind, offset)
    )


HUGE = [1 << 63, (1 << 64) - 1, 1 << 32, 1 << 60]


def nested(depth):
    body = struct.pack("<IQ", 0, 0)
    for _ in range(depth):
        body = struct.pack("<IQ", 9, 1) + body
    return struct.pack("<I", 9) + body


LIES = {
    "no magic": (raw(magic=b"GGML"), "not a GGUF file"),
    **{f"version {v}": (raw(version=v), "version") for v in (0, 1, 4, 1 << 31)},
    **{f"{n} tensors": (raw(num_tensors=n), "header of") for n in HUGE},
    **{f"{n} keys": (raw(num_values=n), "header of") for n in HUGE},
    **{f"key of {n}": (raw([struct.pack("<Q", n)], num_values=1), "key 0") for n in HUGE},
    **{f"string of {n}": (raw([string("k") + struct.pack("<IQ", 8, n)]), "'k'") for n in HUGE},
    **{
        f"array of {n} type {t}": (raw([string("k") + struct.pack("<IIQ", 9, t, n)]), "'k'")
        for n in HUGE
        for t in (0, 6, 8, 9, 12)
    },
    "array string past the end": (raw([string("k") + struct.pack("<IIQ", 9, 8, 2) + string("a") + b"\xff" * 8]), "'k'"),
    "value type 13": (raw([string("k") + struct.pack("<IQ", 13, 0)]), "type 13"),
    "array of type 99": (raw([string("k") + struct.pack("<IIQ", 9, 99, 1)]), "type 99"),
    "boolean of 2": (raw([string("k") + struct.pack("<IB", 7, 2)]), "boolean"),
    "arrays 5 deep": (raw([string("k") + nested(5)]), "deep"),
    "arrays 1000 deep": (raw([string("k") + nested(1000)]), "deep"),
    "key twice": (raw([pair("k", 1), pair("k", 2)]), "'k'", "twice"),
    "key without name": (raw([pair("", 1)]), "no name"),
    "key not UTF-8": (raw([pair(b"\xff\xfe", 1)]), "UTF-8"),
    "string not UTF-8": (raw([pair("k", b"\xff\xfe" and struct.pack("<I", 8) + string(b"\xff\xfe"))]), "UTF-8"),
    **{f"alignment {a}": (raw([pair("general.alignment", a)]), "alignment", a) for a in (0, 3, 24, 1 << 31)},
    "alignment of another type": (raw([pair("general.alignment", "32")]), "alignment"),
    **{f"{n} dimensions": (raw(infos=[info(num_dims=n)]), "'t'", n) for n in (0, 5, 9, 1 << 31)},
    "product 2^64": (raw(infos=[info(dims=(1 << 32, 1 << 32))]), "'t'"),
    "product 2^64 + 8": (raw(infos=[info(dims=(8, (1 << 61) + 1))]), "'t'"),
    "dimension -1": (raw(infos=[info(dims=((1 << 64) - 1,))]), "'t'"),
    "empty dimension": (raw(infos=[info(dims=(8, 0))]), "'t'", "empty"),
    "row not whole blocks": (raw(infos=[info(dims=(48,), kind=2)]), "'t'", "Q4_0"),
    "offset past the end": (raw(infos=[info(offset=1 << 40)]), "'t'"),
    "offset -32": (raw(infos=[info(offset=(1 << 64) - 32)]), "'t'"),
    "offset unaligned": (raw(infos=[info(offset=4)]), "'t'", "multiple of 32"),
    "overlap": (raw(infos=[info(dims=(16,)), info("u", offset=32)]), "'t'", "'u'", "overlap"),
    "the same place": (raw(infos=[info(), info("u")]), "'t'", "'u'", "overlap"),
    "tensor twice": (raw(infos=[info(), info(offset=32)]), "'t'"),
    "tensor without name": (raw(infos=[info("")]), "no name"),
    "name of a megabyte": (raw(infos=[info("n" * (1 << 20))]), "at most"),
}


@pytest.mark.parametrize("case", LIES)
def test_lies_are_refused(tmp_path, case):
    content, *words = LIES[case]
    (tmp_path / "m.gguf").write_bytes(content)
    refused(tmp_path / "m.gguf", *words)


def test_big_endian_is_named(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    refused(tmp_path / "m.gguf", "big-endian", error=UnsupportedModel)


@pytest.mark.parametrize(("kind", "name"), [(39, "MXFP4"), (250, "250"), (4, "Q4_2"), (28, "F64"), (16, "IQ2_XXS")])
def test_unsupported_type_names_the_tensor_and_the_type(tmp_path, kind, name):
    """Before its size is looked at: the tensor need not even be there."""
    (tmp_path / "m.gguf").write_bytes(raw(infos=[info("blk.0.x.weight", dims=(1 << 40,), kind=kind)]))
    refused(tmp_path / "m.gguf", "'blk.0.x.weight'", name, error=UnsupportedModel)


def test_strings_of_an_array_must_be_utf8_once_asked_for(tmp_path):
    body = struct.pack("<IIQ", 9, 8, 2) + string("ok") + string(b"\xff")
    (tmp_path / "m.gguf").write_bytes(raw([string("k") + body]))
    file = GGUFFile(tmp_path / "m.gguf")
    with pytest.raises(ModelFileError, match="string 1 of 'k'"):
        file.metadata["k"]


# ---- files cut short, and things that are not files (BC-084)


def test_every_cut_is_refused(path, tmp_path):
    whole = path.read_bytes()
    last = max(info.offset + info.nbytes for info in GGUFFile(path).tensors.values())
    for length in range(last):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(ModelFileError):
            GGUFFile(tmp_path / "cut.gguf")
    (tmp_path / "cut.gguf").write_bytes(whole[:last])  # the padding of the last tensor may be missing
    GGUFFile(tmp_path / "cut.gguf")


def test_a_cut_names_the_tensor_and_the_size_expected(smollm2_path, tmp_path):
    size = smollm2_path.stat().st_size
    header_end = 1785664
    cut = tmp_path / "cut.gguf"
    with open(smollm2_path, "rb") as source:
        cut.write_bytes(source.read(size // 2))
    for length in (size // 2, header_end + 1, header_end, 900_000, 24, 3, 0):
        os.truncate(cut, length)
        words = ["the file must have", length] if length >= header_end else []
        refused(cut, *words)
    os.truncate(cut, size - 1)  # sparse, but of the right header? no: the header is gone
    refused(cut)


def test_one_byte_missing(smollm2_path, tmp_path):
    file = GGUFFile(smollm2_path)
    last = max(file.tensors.values(), key=lambda t: t.offset)
    with open(smollm2_path, "rb") as source:
        head = source.read(file.data_start)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(head)
    os.truncate(cut, last.offset + last.nbytes - 1)  # sparse: only the length matters
    refused(cut, repr(last.name), last.offset + last.nbytes)
    os.truncate(cut, last.offset + last.nbytes)
    GGUFFile(cut)


def test_not_files(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    refused(tmp_path / "pipe.gguf", "a pipe")
    (tmp_path / "folder.gguf").mkdir()
    refused(tmp_path / "folder.gguf", "a folder")
    (tmp_path / "zero.gguf").symlink_to("/dev/zero")
    refused(tmp_path / "zero.gguf", "a device")
    refused(tmp_path / "absent.gguf", "No such file")
    (tmp_path / "loop.gguf").symlink_to(tmp_path / "loop.gguf")
    refused(tmp_path / "loop.gguf")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"<!DOCTYPE html>\n<html><body>Sign in", "web page"),
        (b"\n  <html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 98362432\n", "LFS"),
        (b"PK\x03\x04" + b"\0" * 100, "zip"),
        (b"\0" * 4096, "not a GGUF"),
        (b"{}", "not a GGUF"),
    ],
)
def test_other_content_is_named(tmp_path, content, word):
    (tmp_path / "m.gguf").write_bytes(content)
    refused(tmp_path / "m.gguf", word)


def test_unreadable(path):
    path.chmod(0)
    me = os.geteuid()
    if me == 0:
        os.seteuid(65534)  # root may read every file
    try:
        refused(path, "Permission denied")
    finally:
        os.seteuid(me)


def test_a_change_in_place_is_noticed(path):
    file = GGUFFile(path)
    file.file.check_unchanged()
    os.utime(path, ns=(1, 1))
    with pytest.raises(ModelFileError, match="changed while"):
        file.file.check_unchanged()
    path.unlink()
    with pytest.raises(ModelFileError, match="changed while"):
        file.file.check_unchanged()


# ---- split files (BC-053)


class TestSplit:
    @pytest.fixture
    def parts(self, path, tmp_path):
        (tmp_path / "split").mkdir()
        return split_gguf(path, tmp_path / "split", 3)

    def test_first_part_or_folder(self, path, parts):
        whole = GGUFFile(path)
        for given in (parts[0], parts[0].parent):
            metadata, stored, files = open_gguf(given)
            assert list(stored) == list(whole.tensors) and len(files) == 3
            assert all(bytes(stored[n].data) == bytes(whole.tensors[n].data) for n in stored)
            assert metadata["general.architecture"] == "llama"

    def fails(self, given, *words):
        started = time.monotonic()
        with pytest.raises(ModelFileError) as raised:
            open_gguf(given)
        assert time.monotonic() - started < 1
        for word in words:
            assert word in str(raised.value)

    def test_another_part(self, parts):
        self.fails(parts[1], "part 2 of 3", parts[0].name)

    def test_missing_part(self, parts):
        parts[2].unlink()
        self.fails(parts[0], parts[2].name, "missing")
        self.fails(parts[0].parent, parts[2].name)

    def test_missing_first_part(self, parts):
        parts[0].unlink()
        self.fails(parts[0].parent, "not its first")

    def test_swapped_parts(self, parts):
        a, b = parts[1].read_bytes(), parts[2].read_bytes()
        parts[1].write_bytes(b)
        parts[2].write_bytes(a)
        self.fails(parts[0], parts[1].name)

    def test_part_of_another_model(self, parts, tmp_path):
        other = write_gguf(tmp_path / "o.gguf", {}, {n: Tensor.f32(np.zeros(3)) for n in "uvwxyz"})
        (tmp_path / "o").mkdir()
        parts[1].write_bytes(split_gguf(other, tmp_path / "o", 3)[1].read_bytes())
        self.fails(parts[0], parts[1].name, "split.")

    def test_duplicate_tensor(self, parts):
        keys, stored = read_gguf(parts[1])
        _, first = read_gguf(parts[0])
        write_gguf(parts[1], keys, stored | first)
        self.fails(parts[0], parts[1].name, "'a.weight'", parts[0].name)

    def test_renamed_parts(self, parts):
        renamed = parts[0].rename(parts[0].with_name("mine.gguf"))
        self.fails(renamed, "mine.gguf", "00001-of-00003")

    def test_wrong_count(self, parts):
        for part in parts:
            edit_gguf(part, part, change={"split.tensors.count": np.int32(9)})
        self.fails(parts[0], "split.tensors.count")

    @pytest.mark.parametrize("change", [{"split.no": np.uint16(3)}, {"split.count": "three"}, {"split.no": -1}])
    def test_nonsense_in_the_keys(self, parts, change):
        edit_gguf(parts[0], parts[0], change=change)
        self.fails(parts[0], "split.")

    def test_one_of_one(self, path, tmp_path):
        (tmp_path / "one").mkdir()
        (only,) = split_gguf(path, tmp_path / "one", 1)
        assert len(open_gguf(only)[1]) == 3

    def test_a_plain_file_whose_name_looks_like_a_part(self, path, tmp_path):
        plain = tmp_path / "x-00002-of-00003.gguf"
        plain.write_bytes(path.read_bytes())
        assert len(open_gguf(plain)[1]) == 3

    def test_parts_glued_together_are_their_first(self, parts):
        """cat of parts opens as part 1 alone, which then misses the others."""
        glued = parts[0].with_name("glued.gguf")
        glued.write_bytes(b"".join(p.read_bytes() for p in parts))
        self.fails(glued, "part 1 of 3")

    def test_folder_of_several_models(self, path, tmp_path):
        (tmp_path / "other.gguf").write_bytes(path.read_bytes())
        self.fails(tmp_path, "several models", "other.gguf", "small.gguf")

    def test_folder_of_nothing(self, tmp_path):
        (tmp_path / "empty").mkdir()
        self.fails(tmp_path / "empty", "nor a .gguf file")
