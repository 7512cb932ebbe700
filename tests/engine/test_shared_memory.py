"""Memory that several processes have, and that no crash leaves behind."""

from __future__ import annotations

import copy
import fcntl
import gc
import multiprocessing
import os
import pickle
import socket
import stat

import pytest
import torch
from shared_segments import inodes_of

from rlstore.engine.memory.shared_memory import SharedMemory
from rlstore.errors import DoesNotFitError, InvalidInputError, PeerLostError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
FORK = multiprocessing.get_context("fork")
DEADLINE = 60.0
PIECES = [((3,), torch.int64), ((2, 5), torch.uint8), ((), torch.float64), ((0, 4), torch.int32), ((17,), torch.bool)]


def left_behind():
    """What lies in /dev/shm of ours; other programs may put there what they like."""
    return [name for name in os.listdir("/dev/shm") if "rlstore" in name or str(os.getpid()) in name]


def in_child(target, *args):
    process = FORK.Process(target=target, args=args)
    process.start()
    process.join(DEADLINE)
    assert process.exitcode == 0
    return process


def test_pieces_are_zeros_of_their_own_in_lines_of_the_cache():
    segment = SharedMemory.create(SharedMemory.bytes_of(PIECES))
    pieces = [segment.carve(*piece) for piece in PIECES]
    for number, (piece, (shape, dtype)) in enumerate(zip(pieces, PIECES, strict=True), start=1):
        assert (tuple(piece.shape), piece.dtype, piece.is_shared()) == (shape, dtype, True)
        assert piece.data_ptr() % 64 == pieces[0].data_ptr() % 64
        assert not piece.any()
        piece.fill_(number)
    for number, piece in enumerate(pieces, start=1):
        assert (piece == torch.full_like(piece, number)).all()
    assert segment.left == 0


def test_without_the_private_function_of_torch_the_memory_is_the_same(monkeypatch):
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_fd_cpu", None)
    segment = SharedMemory.create(128)
    numbers = segment.carve((8,), torch.int64)
    assert numbers.is_shared()
    assert not numbers.any()
    in_child(numbers.copy_, torch.arange(8))
    other = pickle.loads(pickle.dumps(segment)).carve((8,), torch.int64)
    assert numbers.tolist() == other.tolist() == list(range(8))
    with pytest.raises(DoesNotFitError, match="are not available"):
        SharedMemory.create(1 << 62)


def test_more_than_there_is_cannot_be_carved():
    segment = SharedMemory.create(128)
    segment.carve((64,), torch.uint8)
    with pytest.raises(InvalidInputError, match="65 bytes more than the 128"):
        segment.carve((65,), torch.uint8)
    assert segment.left == 64
    assert segment.carve((64,), torch.uint8).numel() == 64


def test_memory_that_no_machine_has_is_refused():
    with pytest.raises(DoesNotFitError, match="bytes of shared memory are not available") as refused:
        SharedMemory.create(1 << 62)
    assert isinstance(refused.value, MemoryError)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickled_segment_is_the_same_memory_carved_in_the_same_order(protocol):
    segment = SharedMemory.create(SharedMemory.bytes_of(PIECES))
    pieces = [segment.carve(*piece) for piece in PIECES]
    other = pickle.loads(pickle.dumps(segment, protocol))
    for piece, again in zip(pieces, [other.carve(*piece) for piece in PIECES], strict=True):
        again.fill_(1)
        assert (piece == 1).all()


def test_a_forked_process_writes_what_this_one_reads_and_its_end_changes_nothing():
    segment = SharedMemory.create(800)
    numbers = segment.carve((100,), torch.int64)
    in_child(numbers.copy_, torch.arange(100))
    assert torch.equal(numbers, torch.arange(100))


def test_a_segment_can_be_sent_by_another_than_its_maker():
    """A process that was forked has the memory too, and says so in its own name."""
    segment = SharedMemory.create(64)
    numbers = segment.carve((8,), torch.int64)
    ours, theirs = FORK.Pipe()
    done = FORK.Event()

    def send():
        theirs.send_bytes(pickle.dumps(segment))
        done.wait(DEADLINE)

    process = FORK.Process(target=send)
    process.start()
    assert ours.poll(DEADLINE)
    other = pickle.loads(ours.recv_bytes()).carve((8,), torch.int64)
    done.set()
    process.join(DEADLINE)
    other.fill_(7)
    assert (numbers == 7).all()


def test_memory_stays_as_long_as_anybody_has_it_and_not_longer():
    ours, theirs = FORK.Pipe()
    done = FORK.Event()

    def make():
        segment = SharedMemory.create(64)
        segment.carve((8,), torch.int64).fill_(5)
        theirs.send_bytes(pickle.dumps(segment))
        done.wait(DEADLINE)

    process = FORK.Process(target=make)
    process.start()
    assert ours.poll(DEADLINE)
    sent = ours.recv_bytes()
    here = pickle.loads(sent).carve((8,), torch.int64)
    done.set()
    process.join(DEADLINE)
    assert (here == 5).all()
    with pytest.raises(PeerLostError, match=f"process {process.pid}, which shared this memory, is gone") as lost:
        pickle.loads(sent)
    assert isinstance(lost.value, ConnectionError)


@pytest.mark.parametrize("instead", ["nothing", "another segment", "a socket", "a folder"])
def test_what_was_let_go_is_not_taken_for_something_else(instead, tmp_path):
    """Whatever has the descriptor's number by now."""
    segment = SharedMemory.create(64)
    sent, number = pickle.dumps(segment), segment._descriptor
    segment._descriptor = None
    if instead == "nothing":
        os.close(number)
    else:
        kept = {
            "another segment": lambda: SharedMemory.create(64),
            "a socket": socket.socket,
            "a folder": lambda: os.open(tmp_path, os.O_RDONLY),
        }[instead]()
        source = kept if isinstance(kept, int) else kept.fileno() if instead == "a socket" else kept._descriptor
        os.dup2(source, number)
    with pytest.raises(PeerLostError, match=f"process {os.getpid()}"):
        pickle.loads(sent)
    if instead != "nothing":
        os.close(number)
        if isinstance(kept, int):
            os.close(kept)
        elif instead == "a socket":
            kept.close()


def test_another_process_of_the_user_can_neither_shorten_nor_lengthen_it_and_other_users_cannot_open_it():
    """A shorter file would end every process that has it mapped, by a SIGBUS."""
    segment = SharedMemory.create(1 << 16)
    numbers = segment.carve((1 << 13,), torch.int64).fill_(3)
    path = f"/proc/{os.getpid()}/fd/{segment._descriptor}"

    def resize():
        opened = os.open(path, os.O_RDWR)
        for nbytes in (0, 1 << 15, 1 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(opened, nbytes)
            with pytest.raises(PermissionError):
                os.truncate(path, nbytes)
        with pytest.raises(PermissionError):
            fcntl.fcntl(opened, fcntl.F_ADD_SEALS, 0)

    in_child(resize)
    assert os.fstat(segment._descriptor).st_size == 1 << 16
    assert (numbers == 3).all()
    assert stat.S_IMODE(os.fstat(segment._descriptor).st_mode) == 0o600


def test_a_segment_cannot_be_copied():
    with pytest.raises(TypeError, match="shared memory cannot be copied"):
        copy.deepcopy(SharedMemory.create(64))


def test_nothing_is_in_dev_shm_and_descriptors_and_mappings_are_released():
    segments = [SharedMemory.create(1 << 20) for _ in range(20)]
    own = {os.fstat(segment._descriptor).st_ino for segment in segments}
    pieces = [segment.carve((1 << 20,), torch.uint8) for segment in segments]
    copies = [pickle.loads(pickle.dumps(segment)) for segment in segments]
    assert left_behind() == []
    del segments, copies
    assert not any(piece.any() for piece in pieces)  # a piece keeps the memory
    assert own <= inodes_of("self")
    del pieces
    gc.collect()
    assert not own & inodes_of("self")


def test_a_killed_process_leaves_nothing_behind():
    ready = FORK.Event()

    def make():
        kept = SharedMemory.create(1 << 20).carve((1 << 20,), torch.uint8).fill_(1)
        ready.set()
        FORK.Event().wait(DEADLINE)
        del kept

    process = FORK.Process(target=make)
    process.start()
    assert ready.wait(DEADLINE)
    process.kill()
    process.join(DEADLINE)
    assert left_behind() == []
