"""The calls of the CUDA driver that we make, each checked. A test puts a fake in its place."""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress
from typing import Any

from minfer_cuda.errors import DeviceError

# These leave the context broken for good and come from work enqueued earlier (cuda.h, CUresult).
STICKY = frozenset({700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 720, 999})


class DriverFailure(Exception):
    """A driver call that did not succeed, before it is told as an error of ours."""

    def __init__(self, call: str, code: int, name: str):
        super().__init__(f"{call}: {name} ({code})")
        self.code = code
        self.sticky = code in STICKY


def wake(ordinal: int) -> None:
    """Have the driver start, and make the device's context, while the caller does other things:
    0.2 s that need no Python. What fails here fails again, and is told, where the device is opened.
    """
    try:
        from cuda.bindings import driver
    except ImportError:
        return

    def start() -> None:
        with suppress(Exception):  # as where there is no driver
            driver.cuInit(0)
            driver.cuDevicePrimaryCtxRetain(ordinal)

    # No daemon: an exit waits for it, and does not tear the driver down while it starts.
    threading.Thread(target=start, name="minfer-driver").start()


class Driver:
    """cuda.bindings.driver (12 and 13) with Python types in and out."""

    def __init__(self) -> None:
        """Raises DeviceError when cuda-bindings, the driver library or a device is missing."""
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise DeviceError(
                f"cuda-bindings is not usable ({error}): pip install cuda-bindings"
            ) from error
        self._api = driver
        try:
            self.call("cuInit", 0)
        except DriverFailure as error:
            raise DeviceError(f"no usable CUDA device: {error}. Try nvidia-smi") from error
        except (RuntimeError, OSError) as error:
            raise DeviceError("no NVIDIA driver found: install one, or use --device cpu") from error

    def call(self, function: str, *args: Any) -> Any:
        """The values of `function`, without its status. Raises DriverFailure."""
        status, *values = getattr(self._api, function)(*args)
        if int(status) != 0:
            raise DriverFailure(function, int(status), status.name)
        return values[0] if len(values) == 1 else values

    def version(self) -> tuple[int, int]:
        """The CUDA version that the driver supports: (12, 9)."""
        number = self.call("cuDriverGetVersion")
        return number // 1000, number % 1000 // 10

    def device_count(self) -> int:
        return int(self.call("cuDeviceGetCount"))

    def device_name(self, ordinal: int) -> str:
        name: bytes = self.call("cuDeviceGetName", 256, ordinal)
        return name.split(b"\0")[0].decode()

    def attribute(self, ordinal: int, name: str) -> int:
        """`name` without its prefix: MULTIPROCESSOR_COUNT."""
        attributes = self._api.CUdevice_attribute
        attribute = getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call("cuDeviceGetAttribute", attribute, ordinal))

    def primary_context(self, ordinal: int) -> Any:
        return self.call("cuDevicePrimaryCtxRetain", ordinal)

    def set_current(self, context: Any) -> None:
        self.call("cuCtxSetCurrent", context)

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the current context's device."""
        free, total = self.call("cuMemGetInfo")
        return free, total

    def synchronize(self, stream: int) -> None:
        self.call("cuStreamSynchronize", self._api.CUstream(stream))

    def load(self, cubin: bytes, lowered_name: str) -> Any:
        """The function of a module that stays loaded as long as the context lives."""
        module = self.call("cuModuleLoadData", cubin)
        return self.call("cuModuleGetFunction", module, lowered_name.encode())

    def function_attribute(self, function: Any, name: str) -> int:
        """`name` without its prefix: SHARED_SIZE_BYTES, MAX_THREADS_PER_BLOCK, NUM_REGS."""
        attribute = getattr(self._api.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        return int(self.call("cuFuncGetAttribute", attribute, function))

    def allow_shared(self, function: Any, size_bytes: int) -> None:
        """Above 48 KB a kernel must be told how much dynamic shared memory it may have."""
        attribute = self._api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.call("cuFuncSetAttribute", function, attribute, size_bytes)

    def allow_cluster(self, function: Any) -> None:
        """More than 8 blocks in a cluster, which not every card of an architecture has."""
        attribute = (
            self._api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        )
        self.call("cuFuncSetAttribute", function, attribute, 1)

    def parameter_sizes(self, function: Any, count: int) -> tuple[int, ...] | None:
        """Bytes of each of the `count` parameters; None where the driver is older than 12.4 and
        cannot say. (It cannot say how many there are: asking past the last one is an error.)"""
        if self.version() < (12, 4):
            return None
        return tuple(self.call("cuFuncGetParamInfo", function, i)[1] for i in range(count))

    def tensor_map(self, address: int, rows: int, columns: int, box_rows: int) -> bytes:
        """The CUtensorMap of a row-major matrix of f16, copied in boxes of `box_rows` by 64 columns
        with a swizzle of 128 bytes, zeros past its end."""
        api = self._api
        value = self.call(
            "cuTensorMapEncodeTiled",
            api.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            2,
            address,
            [api.cuuint64_t(columns), api.cuuint64_t(rows)],
            [api.cuuint64_t(2 * columns)],
            [api.cuuint32_t(64), api.cuuint32_t(box_rows)],
            [api.cuuint32_t(1), api.cuuint32_t(1)],
            api.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            api.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            api.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            api.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        return ctypes.string_at(value.getPtr(), 128)

    def launch_config(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        stream: int,
        dependent: bool,
        cluster: int = 1,
    ) -> Any:
        """What cuLaunchKernelEx takes; `dependent`: may start before its predecessor has ended;
        `cluster`: blocks along z that are one."""
        config = self._api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes = shared_bytes
        config.hStream = self._api.CUstream(stream)
        kinds, attributes = self._api.CUlaunchAttributeID, []
        if dependent:
            attribute = self._api.CUlaunchAttribute()
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if cluster > 1:
            attribute = self._api.CUlaunchAttribute()
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            sizes = attribute.value.clusterDim
            sizes.x, sizes.y, sizes.z = 1, 1, cluster
            attributes.append(attribute)
        config.attrs = attributes
        config.numAttrs = len(attributes)  # the bindings do not count them
        return config

    def launch(self, config: Any, function: Any, arguments: int) -> None:
        """`arguments`: address of the array of pointers to the arguments."""
        status = self._api.cuLaunchKernelEx(config, function, arguments, 0)[0]
        if status != 0:
            raise DriverFailure("cuLaunchKernelEx", int(status), status.name)
