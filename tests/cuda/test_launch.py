"""The launcher: what it hands to the driver, and when it leaves the launch to Triton."""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from rlstore.kernels._native import BoundKernel, RowLauncher
from rlstore.kernels.cuda import launch
from rlstore.kernels.cuda.launch import Fixed, Launcher

FUNCTION, WARPS, SHARED = 4711, 2, 640
DLPACK_CPU = 1

SIZE, INT, POINTER = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
CTX_GET_DEVICE = ctypes.CFUNCTYPE(INT, ctypes.POINTER(INT))
PARAM_INFO = ctypes.CFUNCTYPE(INT, POINTER, SIZE, ctypes.POINTER(SIZE), ctypes.POINTER(SIZE))
LAUNCH_KERNEL = ctypes.CFUNCTYPE(INT, POINTER, *[ctypes.c_uint] * 7, POINTER, ctypes.POINTER(POINTER), POINTER)


class Driver:
    """Stands for libcuda: says what it is told to say, and notes the launches."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes  # of the kernel's parameters
        self.device, self.no_context, self.launch_error = 0, 0, 0
        self.launches: list[tuple] = []
        self.cuCtxGetDevice = CTX_GET_DEVICE(self._ctx_get_device)
        self.cuFuncGetParamInfo = PARAM_INFO(self._param_info)
        self.cuLaunchKernel = LAUNCH_KERNEL(self._launch)

    def _ctx_get_device(self, device) -> int:
        device[0] = self.device
        return self.no_context

    def _param_info(self, function, place, offset, size) -> int:
        assert function == FUNCTION
        if place >= len(self.sizes):
            return 1
        offset[0], size[0] = sum(self.sizes[:place]), self.sizes[place]
        return 0

    def _launch(self, function, x, y, z, tx, ty, tz, shared, stream, parameters, extra) -> int:
        words = [ctypes.string_at(parameters[place], 8) for place in range(len(self.sizes))]
        self.launches.append(((function, shared, stream, extra), (x, y, z), (tx, ty, tz), words))
        return self.launch_error


class Kernel:
    """Stands for what ``triton.jit`` gives: it notes the ordinary launches, and says what it was compiled to."""

    def __init__(self, *types, **metadata) -> None:
        self.ordinary: list[tuple] = []
        signature = {str(place): part for place, part in enumerate((*types, "constexpr", ("constexpr", "constexpr")))}
        plain = {"num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False}
        plain |= {"global_scratch_size": 0, "profile_scratch_size": 0, "num_warps": WARPS, "shared": SHARED}
        self.compiled = SimpleNamespace(
            function=FUNCTION, metadata=SimpleNamespace(**plain | metadata), src=SimpleNamespace(signature=signature)
        )

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.ordinary.append((grid, arguments, options))
            return self.compiled

        return run


@pytest.fixture
def cuda(monkeypatch) -> torch.device:
    """A device of which the launcher asks no more than its number; its tensors are those of the CPU."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "BoundKernel", functools.partial(launch.BoundKernel, device_type=DLPACK_CPU))
    return torch.device("cuda", 0)


@pytest.fixture
def driver(monkeypatch) -> Driver:
    """For kernels of one parameter, unless the test says otherwise."""
    driver = Driver([8, 8, 8])
    monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": driver}.__getitem__)
    return driver


def aligned(count: int = 8) -> torch.Tensor:
    tensor = torch.zeros(count)
    assert tensor.data_ptr() % 16 == 0
    return tensor


def address(tensor: torch.Tensor) -> bytes:
    return struct.pack("q", tensor.data_ptr())


def test_the_first_launch_is_ordinary_and_the_next_ones_go_to_the_driver(cuda, driver):
    kernel = Kernel("*fp32", ("*fp32", "*u8"), "i64", "fp64", "fp64", "i64")
    driver.sizes = [8] * 9
    launcher = Launcher(kernel, (4, (1, 2)), num_warps=WARPS)
    first, second, third = aligned(), aligned(), aligned()
    launcher((3, 2, 1), cuda, first, (second, third), 5, 0.5, 1, 7)
    assert kernel.ordinary == [((3, 2, 1), (first, (second, third), 5, 0.5, 1, 7, 4, (1, 2)), {"num_warps": WARPS})]
    assert driver.launches == []
    other = aligned()
    launcher((7, 5, 4), cuda, other, (third, second), -6, 0.25, 3, 1 << 40)
    (told,) = driver.launches
    assert told[:3] == ((FUNCTION, SHARED, None, None), (7, 5, 4), (32 * WARPS, 1, 1))
    numbers = [struct.pack("q", -6), struct.pack("d", 0.25), struct.pack("d", 3.0), struct.pack("q", 1 << 40)]
    assert told[3] == [address(other), address(third), address(second), *numbers, bytes(8), bytes(8)]
    assert len(kernel.ordinary) == 1


def test_that_kernels_are_compiled_is_said_once_if_it_takes_long(cuda, driver, monkeypatch, caplog):
    now = itertools.count(step=0.4)
    monkeypatch.setattr(launch.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(launch, "_COMPILING", launch.Compiling())
    said = []
    for _ in range(5):
        launcher = Launcher(Kernel("*fp32"))
        launcher((1, 1, 1), cuda, aligned())
        launcher((1, 1, 1), cuda, aligned())
        said.append(len(caplog.records))
    assert said == [0, 0, 1, 1, 1]
    assert "kernels for this GPU are being compiled, 1.2 seconds" in caplog.text


@pytest.mark.parametrize("place", [0, 1])
def test_memory_that_begins_at_an_odd_place_is_left_to_triton(cuda, driver, place):
    """What was compiled for one alignment must not meet another, before it is bound and after."""
    kernel, driver.sizes = Kernel("*fp32", ("*fp32",)), [8] * 4
    launcher = Launcher(kernel)
    good = aligned()
    odd = [good, good]
    odd[place] = good[1:]
    for _ in range(2):
        launcher((1, 1, 1), cuda, odd[0], (odd[1],))
    assert len(kernel.ordinary) == 2
    assert driver.launches == []
    for _ in range(2):
        launcher((1, 1, 1), cuda, good, (good,))
    assert (len(kernel.ordinary), len(driver.launches)) == (3, 1)
    launcher((1, 1, 1), cuda, odd[0], (odd[1],))
    assert (len(kernel.ordinary), len(driver.launches)) == (4, 1)


def without(kernel: Kernel, name: str) -> Kernel:
    """As if Triton had another name for a part of what it compiled."""
    delattr(kernel.compiled.metadata if hasattr(kernel.compiled.metadata, name) else kernel.compiled, name)
    return kernel


UNKNOWN = {
    "a number of 4 bytes": lambda: Kernel("i32"),
    "a descriptor": lambda: Kernel("tensordesc<fp32[4]>"),
    "a parameter more": lambda: Kernel("*fp32", "*fp32"),
    "a parameter less": lambda: Kernel(),
    "clusters": lambda: Kernel("*fp32", num_ctas=2),
    "programs that wait for each other": lambda: Kernel("*fp32", launch_cooperative_grid=True),
    "dependent launches": lambda: Kernel("*fp32", launch_pdl=True),
    "scratch memory": lambda: Kernel("*fp32", global_scratch_size=128),
    "scratch memory for profiles": lambda: Kernel("*fp32", profile_scratch_size=128),
    "no function": lambda: without(Kernel("*fp32"), "function"),
    "no signature": lambda: without(Kernel("*fp32"), "src"),
    "no metadata": lambda: without(Kernel("*fp32"), "metadata"),
    "no sizes of scratch memory": lambda: without(Kernel("*fp32"), "profile_scratch_size"),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_where_triton_is_not_as_we_know_it_every_launch_is_ordinary(cuda, driver, kind):
    kernel = UNKNOWN[kind]()
    launcher = Launcher(kernel)
    for _ in range(3):
        launcher((1, 1, 1), cuda, aligned())
    assert (len(kernel.ordinary), driver.launches) == (3, [])


def test_a_kernel_that_keeps_its_function_elsewhere_is_launched_by_triton(cuda, driver):
    kernel = Kernel("*fp32")
    kernel.compiled.function = "4711"
    launcher = Launcher(kernel)
    for _ in range(2):
        launcher((1, 1, 1), cuda, aligned())
    assert (len(kernel.ordinary), driver.launches) == (2, [])


@pytest.mark.parametrize("sizes", [[], [8, 8], [8, 8, 8, 8], [4, 8, 8], [8, 8, 4]])
def test_where_the_driver_knows_of_other_parameters_every_launch_is_ordinary(cuda, driver, sizes):
    kernel, driver.sizes = Kernel("*fp32"), sizes
    launcher = Launcher(kernel)
    for _ in range(2):
        launcher((1, 1, 1), cuda, aligned())
    assert (len(kernel.ordinary), driver.launches) == (2, [])


@pytest.mark.parametrize("name", ["cuCtxGetDevice", "cuFuncGetParamInfo", "cuLaunchKernel"])
def test_where_the_driver_is_older_every_launch_is_ordinary(cuda, driver, name):
    delattr(driver, name)
    kernel = Kernel("*fp32")
    launcher = Launcher(kernel)
    for _ in range(2):
        launcher((1, 1, 1), cuda, aligned())
    assert (len(kernel.ordinary), driver.launches) == (2, [])


def test_where_there_is_no_driver_every_launch_is_ordinary(cuda, monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    kernel = Kernel("*fp32")
    launcher = Launcher(kernel)
    for _ in range(2):
        launcher((1, 1, 1), cuda, aligned())
    assert len(kernel.ordinary) == 2


@pytest.fixture
def bound(cuda, driver) -> tuple[Launcher, Kernel]:
    """A launcher whose next launch of one tensor goes to the driver, and its kernel, which has launched once."""
    kernel = Kernel("*fp32")
    launcher = Launcher(kernel)
    launcher((1, 1, 1), cuda, aligned())
    launcher((1, 1, 1), cuda, aligned())
    assert (len(kernel.ordinary), len(driver.launches)) == (1, 1)
    return launcher, kernel


@pytest.mark.parametrize(("current", "no_context"), [(0, 201), (1, 0)])
def test_a_thread_that_is_at_no_device_or_at_another_is_left_to_triton(bound, cuda, driver, current, no_context):
    launcher, kernel = bound
    driver.device, driver.no_context = current, no_context
    launcher((1, 1, 1), cuda, aligned())
    assert (len(kernel.ordinary), len(driver.launches)) == (2, 1)


@pytest.mark.parametrize("given", [torch.zeros(8, device="meta"), torch.eye(4).to_sparse(), [1.0]])
def test_what_has_no_memory_on_the_device_is_left_to_triton(bound, cuda, driver, given):
    """It says what is wrong with it."""
    launcher, kernel = bound
    launcher((1, 1, 1), cuda, given)
    assert (len(kernel.ordinary), len(driver.launches)) == (2, 1)


def test_a_launch_that_fails_says_so(bound, cuda, driver):
    driver.launch_error = 719
    with pytest.raises(RuntimeError, match="719"):
        bound[0]((1, 1, 1), cuda, aligned())


def test_another_number_of_arguments_is_a_mistake(bound, cuda, driver):
    for arguments in ((), (aligned(), aligned()), (aligned(), (aligned(),))):
        with pytest.raises(ValueError, match=r"too (few|many) arguments"):
            bound[0]((1, 1, 1), cuda, *arguments)
    assert len(driver.launches) == 1


def test_a_number_of_another_kind_is_a_mistake(cuda, driver):
    kernel, driver.sizes = Kernel("i64", "fp64"), [8] * 4
    launcher = Launcher(kernel)
    launcher((1, 1, 1), cuda, 1, 1.0)
    with pytest.raises(TypeError):
        launcher((1, 1, 1), cuda, 1.0, 1.0)
    with pytest.raises(TypeError):
        launcher((1, 1, 1), cuda, 1, None)
    with pytest.raises(OverflowError):
        launcher((1, 1, 1), cuda, 1 << 63, 1.0)
    assert driver.launches == []


def test_each_device_has_what_was_compiled_for_it(cuda, driver, monkeypatch):
    """Tensors of the second are not at hand here, so that it is asked for twice, and left to Triton."""
    kernel = Kernel("*fp32")
    launcher = Launcher(kernel)
    entered: list[int] = []

    class Entered:
        def __init__(self, index):
            self._index = index

        def __enter__(self):
            entered.append(self._index)
            driver.device = self._index
            monkeypatch.setattr(torch.cuda, "current_device", lambda: self._index)

        def __exit__(self, *_):
            driver.device = 0
            monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    monkeypatch.setattr(torch.cuda, "device", Entered)
    for _ in range(2):
        launcher((1, 1, 1), cuda, aligned())
        launcher((1, 1, 1), torch.device("cuda", 1), aligned())
    assert entered == [1, 1]
    assert (len(kernel.ordinary), len(driver.launches)) == (3, 1)
    assert list(launcher._bound) == [cuda, torch.device("cuda", 1)]


@pytest.mark.parametrize("grid", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_no_program_is_no_launch(bound, cuda, driver, grid):
    launcher, kernel = bound
    launcher(grid, cuda, aligned())
    assert (len(kernel.ordinary), len(driver.launches)) == (1, 1)


def test_what_is_fixed_is_handed_on_as_if_it_were_given(cuda, driver):
    kernel, driver.sizes = Kernel("*fp32", ("*fp32", "*fp32"), "*fp32", ("*fp32", "*fp32"), "i64"), [8] * 9
    launcher, tensors = Launcher(kernel), [aligned() for _ in range(6)]
    fixed = Fixed(((tensors[1], tensors[2]), tensors[3]))
    arguments = (tensors[0], fixed, (tensors[4], Fixed((tensors[5],))), 9)
    launcher((1, 1, 1), cuda, *arguments)
    plain = (tensors[0], (tensors[1], tensors[2]), tensors[3], (tensors[4], tensors[5]), 9)
    assert kernel.ordinary == [((1, 1, 1), plain, {"num_warps": 4})]
    launcher((1, 1, 1), cuda, *arguments)
    assert driver.launches[0][3] == [*map(address, tensors), struct.pack("q", 9), bytes(8), bytes(8)]
    launcher((1, 1, 1), cuda, tensors[0], Fixed(((tensors[1][1:], tensors[2]), tensors[3])), *arguments[2:])
    assert (len(kernel.ordinary), len(driver.launches)) == (2, 1)  # not at a multiple of 16 bytes
    with pytest.raises(ValueError, match="a tensor in the place of a number"):
        launcher((1, 1, 1), cuda, *arguments[:3], Fixed((tensors[0],)))


def bound_rows(driver: Driver) -> tuple[RowLauncher, list[torch.Tensor], torch.Tensor, bytes]:
    """What launches rows of two fields, of which the second has entries; its blocks; what is fixed; the kind."""
    blocks, own = [torch.zeros(3, 0), torch.zeros(3, 8)], aligned()
    rows, driver.sizes = RowLauncher([(block, 0, False, False) for block in blocks]), [8] * 6
    driver_functions = [ctypes.cast(f, POINTER).value for f in (driver.cuCtxGetDevice, driver.cuLaunchKernel)]
    kernel = BoundKernel(*driver_functions, FUNCTION, 32, SHARED, "pppi", 0, device_type=DLPACK_CPU)
    kind = rows.write(0, (torch.zeros(0), aligned()))
    assert isinstance(kind, bytes)
    rows.bind(kind, kernel, 5, (1,), Fixed((own,)))
    return rows, blocks, own, kind


def test_a_row_whose_kind_is_bound_is_launched_at_once(driver):
    rows, blocks, own, kind = bound_rows(driver)
    value = aligned()
    assert rows.write(2, (torch.zeros(0), value)) is None
    (told,) = driver.launches
    assert told[1] == (5, 1, 1)
    words = [address(value), address(blocks[1]), address(own), struct.pack("q", 2)]
    assert told[3] == [*words, bytes(8), bytes(8)]
    assert rows.write(0, (torch.zeros(0), torch.zeros(9)[1:])) == kind  # not at a multiple of 16 bytes
    driver.device = 1
    assert rows.write(0, (torch.zeros(0), value)) == kind
    assert len(driver.launches) == 1


def test_a_row_is_not_launched_into_memory_that_was_freed(driver):
    rows, blocks, _, _ = bound_rows(driver)
    blocks[1].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="no memory"):
        rows.write(0, (torch.zeros(0), aligned()))
    assert driver.launches == []


def test_values_of_a_derived_class_are_launched_and_no_code_of_theirs_runs(driver):
    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            raise AssertionError(function)

    rows, _, _, _ = bound_rows(driver)
    assert rows.write(0, (torch.zeros(0), aligned().as_subclass(Refusing))) is None
    assert len(driver.launches) == 1


def test_a_value_that_is_negated_lazily_is_copied_first(driver):
    rows, _, _, _ = bound_rows(driver)
    assert rows.write(0, (torch.zeros(0), torch._neg_view(aligned()))) == ~1
    assert driver.launches == []


def test_what_a_kernel_can_read_as_it_is():
    like = torch.zeros(1)
    assert [launch.count_readable(given, like) for given in (torch.zeros(5), torch.zeros(4, 1), torch.zeros(0))] == [
        5,
        4,
        0,
    ]
    freed, negated = torch.zeros(5), torch.complex(torch.zeros(1), torch.ones(1)).conj().imag
    freed.untyped_storage().resize_(0)
    others = [
        torch.zeros(5).double(),
        torch.zeros(5, 2),
        torch.zeros(10)[::2],
        torch.zeros(()),
        freed,
        negated,
        [0.0],
        None,
    ]
    others += [torch.zeros(5, device="meta"), torch.nn.Parameter(torch.zeros(5))]
    assert negated.is_neg()
    assert [launch.count_readable(given, like) for given in others] == [-1] * len(others)


def test_powers_of_2():
    assert [launch.next_power_of_2(number) for number in (0, 1, 2, 3, 4, 5, 9)] == [1, 1, 2, 4, 4, 8, 16]


@triton.jit(do_not_specialize=["count", "factor"])
def _scale(sources, targets, count: tl.int64, factor: tl.float64, block: tl.constexpr):
    i = tl.program_id(0) * block + tl.arange(0, block)
    for f in tl.static_range(len(sources)):
        x = tl.load(sources[f] + i, mask=i < count, other=0)
        tl.store(targets[f] + i, (x * factor).to(x.dtype), mask=i < count)


@pytest.mark.parametrize("first", [0, 1], ids=["aligned", "not aligned"])
def test_a_kernel_gives_the_same_however_it_is_launched(device, first):
    launcher = Launcher(_scale, (16,))
    for count, factor in ((40, 2.0), (41, 1.0), (1, -0.5), (16, 2.0)):
        sources = tuple(torch.arange(50.0, device=device)[first:] + place for place in range(2))
        targets = tuple(torch.full((60,), -1.0, device=device)[first:] for _ in range(2))
        launcher((-(-count // 16), 1, 1), device, sources, targets, count, factor)
        for place, target in enumerate(targets):
            expected = [(first + i + place) * factor for i in range(count)]
            assert target.tolist() == expected + [-1.0] * (60 - first - count)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_the_device_the_later_launches_are_bound():
    launcher, device = Launcher(_scale, (16,)), torch.device("cuda", 0)
    source, target = torch.arange(16.0, device=device), torch.zeros(16, device=device)
    launcher((1, 1, 1), device, (source,), (target,), 16, 1.0)
    assert launcher._bound[device] is not None, "the installed Triton, or the driver, is not as launch.py knows it"
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launcher((1, 1, 1), device, (source,), (target,), 16, 3.0)
    stream.synchronize()
    assert target.tolist() == [3.0 * i for i in range(16)]
