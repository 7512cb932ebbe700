"""Where blocks lie: what they hold, what is refused, and what is left when something fails."""

from __future__ import annotations

import copy
import errno
import os
import pickle

import pytest
import torch
import torch.multiprocessing

from rlstore import DiskFullError, DoesNotFitError, InvalidInputError
from rlstore.engine.memory import backing, capacity
from rlstore.engine.memory.backing import Backing

# Newer Pythons warn of forks beside threads, which other tests may have started.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

CPU = torch.device("cpu")
SCHEMA = {"fields": {"obs": {"shape": [3], "dtype": "float32"}}, "steps": 10}


def make(kind, tmp_path, name="blocks"):
    made = Backing("ReplayStorage", kind, CPU, tmp_path / name if kind == "mapped" else None)
    made.open(SCHEMA)
    return made


@pytest.fixture(params=["ram", "shared", "mapped"])
def kind(request):
    return request.param


# ---------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((5, 2, 3), torch.float32),
        ((700_000, 2), torch.uint8),
        ((300, 1000), torch.int64),
        ((4,), torch.bool),
        ((600_000, 2), torch.bfloat16),
        ((0, 3), torch.float32),
        ((3, 0), torch.float32),
    ],
)
def test_a_block_is_zero_and_holds_what_is_written(kind, shape, dtype, tmp_path):
    block = make(kind, tmp_path).zeros("obs", shape, dtype)
    assert (tuple(block.shape), block.dtype, block.device.type) == (shape, dtype, "cpu")
    assert block.is_contiguous()
    assert not block.any()
    ids = (torch.arange(block.numel()) % 2).to(dtype).reshape(shape)
    block.copy_(ids)
    assert torch.equal(block, ids)


def test_a_block_made_in_inference_mode_can_be_written_and_learnt_from_outside(kind, tmp_path):
    with torch.inference_mode():
        made = make(kind, tmp_path)
        block = made.zeros("obs", (300_000,), torch.float32)
        longer = made.extend("obs", block, 300_001)
    for tensor in (block, longer):
        assert not tensor.is_inference()
        tensor[0] = 3.0
        weight = torch.ones(1, requires_grad=True)
        (weight * tensor[:1]).sum().backward()
        assert weight.grad.item() == 3.0


def test_an_extended_block_has_the_old_rows_and_new_zeros(kind, tmp_path):
    made = make(kind, tmp_path)
    block = made.zeros("obs", (3, 2), torch.int64)
    other = made.zeros("other", (3, 2), torch.int64)
    block.copy_(torch.arange(6).reshape(3, 2) + 10)
    longer = made.extend("obs", block, 5)
    assert longer.tolist() == [[10, 11], [12, 13], [14, 15], [0, 0], [0, 0]]
    longer[4] = 7
    assert made.extend("obs", longer, 6)[4].tolist() == [7, 7]
    assert not other.any()


def test_an_empty_block_can_be_extended(kind, tmp_path):
    made = make(kind, tmp_path)
    longer = made.extend("table", made.zeros("table", (0, 2), torch.uint8), 2)
    assert longer.tolist() == [[0, 0], [0, 0]]


def test_a_block_cannot_be_extended_to_fewer_rows(kind, tmp_path):
    made = make(kind, tmp_path)
    block = made.zeros("obs", (3, 2), torch.int64)
    with pytest.raises(InvalidInputError, match="obs has 3 rows and cannot be extended to 2"):
        made.extend("obs", block, 2)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
@pytest.mark.parametrize("kind", ["ram", "shared"])
def test_memory_is_taken_when_it_is_touched(kind, tmp_path):
    before = resident()
    block = make(kind, tmp_path).zeros("obs", (1 << 30,), torch.uint8)
    block[12345] = 1
    assert resident() - before < 64 << 20
    assert block[12345] == 1


# ---------------------------------------------------------------------------------------------------- copies


def test_a_copy_is_in_ram_and_apart(kind, tmp_path):
    made = make(kind, tmp_path)
    held = {"backing": made, "block": made.zeros("obs", (3,), torch.int64)}
    for copied in (copy.deepcopy(held), pickle.loads(pickle.dumps(held))):
        assert copied["backing"].kind == "ram"
        copied["block"][0] = 5
        assert copied["backing"].extend("obs", copied["block"], 4).tolist() == [5, 0, 0, 0]
    assert held["block"].tolist() == [0, 0, 0]


def _write_into(queue, answers):
    block = queue.get()
    block[1] = 42
    answers.put("written")


def test_another_process_writes_into_a_shared_block(tmp_path):
    made = make("shared", tmp_path)
    block = made.extend("obs", made.zeros("obs", (3,), torch.int64), 4)
    assert block.is_shared()
    context = torch.multiprocessing.get_context("fork")
    queue, answers = context.Queue(), context.Queue()
    process = context.Process(target=_write_into, args=(queue, answers))
    process.start()
    queue.put(block)
    assert answers.get(timeout=120) == "written"
    process.join()
    assert block.tolist() == [0, 42, 0, 0]


# ---------------------------------------------------------------------------------------------------- mapped


def test_a_mapped_folder_is_found_again(tmp_path):
    made = make("mapped", tmp_path)
    assert made.zeros('obs["a/b"]', (2, 2), torch.int64).fill_(3).sum() == 12
    made.zeros("actions", (2,), torch.float32)[1] = 0.5
    made.close()
    again = Backing("ReplayStorage", "mapped", CPU, tmp_path / "blocks")
    assert again.open(SCHEMA)
    assert again.zeros('obs["a/b"]', (2, 2), torch.int64).tolist() == [[3, 3], [3, 3]]
    assert again.zeros("actions", (2,), torch.float32).tolist() == [0, 0.5]
    assert again.zeros("new", (2,), torch.float32).tolist() == [0, 0]


def test_rows_that_a_block_was_extended_by_are_found_again(tmp_path):
    made = make("mapped", tmp_path)
    table = made.extend("table", made.zeros("table", (2, 2), torch.int64), 4)
    table[3] = 9
    made.close()
    again = make("mapped", tmp_path)
    assert again.zeros("table", (2, 2), torch.int64, most=4).tolist() == [[0, 0], [0, 0], [0, 0], [9, 9]]


def test_a_new_folder_is_said_to_be_new(tmp_path):
    assert Backing("S", "mapped", CPU, tmp_path / "deep" / "er").open(SCHEMA) is False
    assert Backing("S", "ram", CPU).open(SCHEMA) is False
    assert Backing("S", "shared", CPU).open(SCHEMA) is False


def test_a_closed_folder_can_be_opened_again_and_its_blocks_stay_mapped(tmp_path):
    made = make("mapped", tmp_path)
    block = made.zeros("obs", (2,), torch.int64)
    with pytest.raises(InvalidInputError, match="in use by another storage"):
        make("mapped", tmp_path)
    made.close()
    made.close()
    again = make("mapped", tmp_path)
    block[0] = 4
    assert again.zeros("obs", (2,), torch.int64).tolist() == [4, 0]


def test_a_folder_of_another_schema_is_refused_and_stays_as_it_was(tmp_path):
    made = make("mapped", tmp_path)
    made.zeros("obs", (10, 3), torch.float32)[:] = 1
    made.close()
    with pytest.raises(InvalidInputError, match="steps is 10 there and 11 here"):
        Backing("ReplayStorage", "mapped", CPU, tmp_path / "blocks").open({**SCHEMA, "steps": 11})
    assert make("mapped", tmp_path).zeros("obs", (10, 3), torch.float32).eq(1).all()


def test_a_block_is_mapped_only_from_an_open_folder(tmp_path):
    with pytest.raises(RuntimeError, match="must open"):
        Backing("S", "mapped", CPU, tmp_path).zeros("obs", (2,), torch.float32)
    assert list(tmp_path.iterdir()) == []


def test_the_space_of_a_mapped_block_is_really_reserved(tmp_path):
    block = make("mapped", tmp_path).zeros("obs", (1 << 22,), torch.uint8)
    (file,) = (tmp_path / "blocks").glob("*.bin")
    assert file.stat().st_size == block.nbytes
    assert file.stat().st_blocks * 512 >= block.nbytes


def test_long_names_have_files_too(tmp_path):
    made = make("mapped", tmp_path)
    names = ["obs" + "".join(f'["{key * 60}"]' for key in keys) for keys in ("abcd", "abce")]
    blocks = [made.zeros(name, (2,), torch.int64).fill_(index) for index, name in enumerate(names)]
    assert [block.tolist() for block in blocks] == [[0, 0], [1, 1]]


# ---------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("kind", "device", "path", "words"),
    [
        ("disk", "cpu", None, r"memory is 'disk'; S needs one of \['ram', 'shared', 'mapped'\]"),
        ("mapped", "cpu", None, "give S the folder as path"),
        ("ram", "cpu", "folder", "path is 'folder', which needs memory=\"mapped\"; memory is 'ram'"),
        ("shared", "cpu", "folder", "memory is 'shared'"),
        ("shared", "cuda", None, "memory='shared' is memory of the CPU, and the device is 'cuda'"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(kind, device, path, words):
    with pytest.raises(InvalidInputError, match=words):
        Backing("S", kind, torch.device(device), path)


@pytest.mark.parametrize("kind", ["ram", "shared"])
def test_more_than_the_free_ram_is_refused(kind, monkeypatch):
    monkeypatch.setattr(capacity, "free_ram", lambda: (1000, "the system's available memory"))
    monkeypatch.setattr(capacity, "MUCH", 1)
    made = Backing("ReplayStorage", kind, CPU)
    made.require(1000, "5 transitions")
    with pytest.raises(DoesNotFitError) as refused:
        made.require(1001, "5 transitions")
    assert isinstance(refused.value, MemoryError)
    message = str(refused.value)
    assert message.startswith("ReplayStorage needs 0.00 GB (1,001 bytes) for 5 transitions, and 0.00 GB (1,000 bytes)")
    for advice in ("storage_size", "frame_stack", "uint8", 'memory="mapped"', "Nothing was allocated"):
        assert advice in message


def test_nothing_is_refused_where_nothing_tells_what_is_free(monkeypatch):
    monkeypatch.setattr(capacity, "free_ram", lambda: None)
    Backing("S", "ram", CPU).require(1 << 60, "everything")


def test_more_than_the_free_disk_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(backing, "free_disk", lambda path: 1000)
    made = Backing("S", "mapped", CPU, tmp_path / "blocks")
    made.require(1000, "5 transitions")
    with pytest.raises(DoesNotFitError, match=r"1,001 bytes.*1,000 bytes\) are free on the disk of .*larger disk"):
        made.require(1001, "5 transitions")
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_taken_up_again_need_no_space(monkeypatch, tmp_path):
    made = make("mapped", tmp_path)
    made.zeros("obs", (600,), torch.uint8)
    made.close()
    monkeypatch.setattr(backing, "free_disk", lambda path: 500)
    again = make("mapped", tmp_path)
    again.require(1100, "all")
    with pytest.raises(DoesNotFitError):
        again.require(1101, "all")
    again.zeros("obs", (600,), torch.uint8)
    again.require(500, "an extension")  # on top of what there is
    with pytest.raises(DoesNotFitError):
        again.require(501, "an extension")


def test_memory_that_the_system_does_not_give_is_refused():
    with pytest.raises(DoesNotFitError, match=r"needs .* for obs, which the system does not provide"):
        Backing("S", "ram", CPU).zeros("obs", (1 << 60,), torch.uint8)
    with pytest.raises(DoesNotFitError, match=r"needs .* for obs, which the system does not provide"):
        Backing("S", "shared", CPU).zeros("obs", (1 << 60,), torch.uint8)


# ---------------------------------------------------------------------------------------------------- a full disk


@pytest.fixture(params=["posix_fallocate", "pwrite"])
def fill_disk(request, monkeypatch):
    """A function that makes the disk full from now on, however space is reserved."""

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    def fill():
        if request.param == "pwrite":
            monkeypatch.delattr(os, "posix_fallocate")
        monkeypatch.setattr(os, request.param, full)

    return fill


def test_a_full_disk_is_said_and_leaves_no_file(fill_disk, tmp_path):
    made = make("mapped", tmp_path)
    fill_disk()
    with pytest.raises(DiskFullError, match=r"the disk is full: .* bytes are free .*needs .*4,096 bytes.*storage_size"):
        made.zeros("obs", (4096,), torch.uint8)
    assert sorted(path.name for path in (tmp_path / "blocks").iterdir()) == ["lock", "manifest.json"]


def test_a_full_disk_leaves_the_rows_that_were_there(fill_disk, tmp_path):
    made = make("mapped", tmp_path)
    block = made.zeros("obs", (4,), torch.uint8).fill_(1)
    fill_disk()
    with pytest.raises(DiskFullError) as refused:
        made.extend("obs", block, 8)
    assert refused.value.errno == errno.ENOSPC
    assert refused.value.filename.endswith("obs.bin")
    assert block.tolist() == [1, 1, 1, 1]
    assert made.zeros("obs", (4,), torch.uint8).tolist() == [1, 1, 1, 1]


def test_a_disk_that_fills_half_way_leaves_the_rows_that_were_there(monkeypatch, tmp_path):
    made = make("mapped", tmp_path)
    block = made.zeros("obs", (4,), torch.uint8).fill_(1)
    write = os.pwrite

    def half(descriptor, data, offset):
        if offset > 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:1], offset)

    monkeypatch.delattr(os, "posix_fallocate")
    monkeypatch.setattr(os, "pwrite", half)
    with pytest.raises(DiskFullError):
        made.extend("obs", block, 8)
    assert (tmp_path / "blocks" / "obs.bin").read_bytes() == bytes([1, 1, 1, 1])


def test_a_file_system_without_reservation_is_written_to(monkeypatch, tmp_path):
    def not_offered(*args):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", not_offered)
    block = make("mapped", tmp_path).zeros("obs", (3 << 20,), torch.uint8)
    assert not block.any()
    assert (tmp_path / "blocks" / "obs.bin").stat().st_size == 3 << 20


def test_another_error_of_the_disk_stays_what_it_is(monkeypatch, tmp_path):
    def broken(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "posix_fallocate", broken)
    with pytest.raises(OSError, match="Input/output error") as refused:
        make("mapped", tmp_path).zeros("obs", (3,), torch.uint8)
    assert not isinstance(refused.value, DiskFullError)
